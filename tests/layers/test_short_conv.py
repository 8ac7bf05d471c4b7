"""The short convolution, against `conv1d` on one sequence at a time."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

from flacompose.layers import ShortConvolution


def alone(conv, x, state):
    """``x [T, D]`` after ``state [D, W]``."""
    if len(x) == 0:
        return x, state
    history = torch.cat([state, x.T], 1)[None]
    y = F.conv1d(history[:, :, 1:], conv.weight, conv.bias, groups=conv.hidden_size)[0].T
    return (y if conv.activation is None else F.silu(y)), history[0, :, -conv.kernel_size :]


def build(W, device, dtype=torch.float64, **arguments):
    return ShortConvolution(6, W, device=device, dtype=dtype, **arguments)


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("layout", ["rows", "one token", "lengths", "packed"])
def test_values(layout, given, W, device):
    conv = build(W, device, bias=given, activation="swish" if given else None)
    T = 1 if layout == "one token" else 9
    ends = [0, 1, 2, 9]
    if layout == "packed":
        bounds = [0, 0, 1, 3, 3, 8]
        spans = [(0, begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
        arguments = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device)}
    elif layout == "lengths":
        spans = [(b, 0, end) for b, end in enumerate(ends)]
        arguments = {"lengths": torch.tensor(ends, device=device)}
    else:
        spans, arguments = [(b, 0, T) for b in range(4)], {}
    N = len(spans)
    x = torch.randn(1 if layout == "packed" else N, T, 6, device=device, dtype=torch.float64)
    state = torch.randn(N, 6, W, device=device, dtype=torch.float64) if given else None
    y, new = conv(x, state, **arguments)
    assert new.shape == (N, 6, W)
    assert new.is_contiguous()
    for n, (b, begin, end) in enumerate(spans):
        start = state[n] if given else x.new_zeros(6, W)
        expected, after = alone(conv, x[b, begin:end], start)
        torch.testing.assert_close(y[b, begin:end], expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(new[n], after)


@pytest.mark.parametrize("layout", ["rows", "one token", "lengths", "packed"])
def test_gradients(layout):
    conv = build(3, "cpu", bias=True)
    arguments = {
        "lengths": {"lengths": torch.tensor([1, 5])},
        "packed": {"cu_seqlens": torch.tensor([0, 1, 4])},
    }.get(layout, {})
    T = 1 if layout == "one token" else 5
    x = torch.randn(1 if layout == "packed" else 2, T, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)

    def run(x, state, weight, bias):
        parameters = {"weight": weight, "bias": bias}
        return torch.func.functional_call(conv, parameters, (x, state), arguments)

    assert torch.autograd.gradcheck(run, (x, state, conv.weight, conv.bias))


@pytest.mark.parametrize("T", [1, 9])
def test_bfloat16(T, device):
    """One rounding, at the end; a state of another dtype is rounded to that of the input."""
    conv = build(4, device, torch.bfloat16, bias=True)
    x = torch.randn(1, T, 6, device=device, dtype=torch.bfloat16)
    state = torch.randn(1, 6, 4, device=device)
    for arguments in ({}, {"cu_seqlens": torch.tensor([0, T], device=device)}):
        y, new = conv.bfloat16()(x, state, **arguments)
        assert y.dtype == new.dtype == torch.bfloat16
        expected, _ = conv.double()(x.double(), state.bfloat16().double(), **arguments)
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("layout", ["rows", "lengths", "packed"])
def test_the_op(layout, monkeypatch):
    """Where it computes the layer, outputs in parts, the new state and all gradients are those of the formula."""
    arguments = {
        "lengths": {"lengths": torch.tensor([0, 5])},
        "packed": {"cu_seqlens": torch.tensor([0, 1, 4])},
    }.get(layout, {})
    B, N, sizes = 1 if layout == "packed" else 2, 2, (3, 1, 2)
    conv = build(3, "cpu", bias=layout != "rows", activation=None if layout == "lengths" else "silu")
    x = torch.randn(B, 5, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(N, 6, 3, dtype=torch.float64, requires_grad=True)
    # Tokens that do not count mean nothing.
    counted = torch.ones(B, 5, 1, dtype=torch.float64)
    counted[0, 0 if layout == "lengths" else 5 :] = 0
    counted[0, 4 if layout == "packed" else 5 :] = 0

    def results(state, by_op):
        monkeypatch.setattr(ShortConvolution, "_takes_op", lambda *_: by_op)
        found = []
        for parts in (None, sizes):
            y, new = conv(x, state, sizes=parts, **arguments)
            ys = [y] if parts is None else y
            assert new.is_contiguous() and [y.shape[2] for y in ys] == list(parts or [6])
            assert not by_op or all(y.is_contiguous() for y in ys)
            y = torch.cat(ys, 2) * counted
            wrt = [x, *conv.parameters(), *([] if state is None else [state])]
            found += [y, new, *torch.autograd.grad(y.sin().sum() + new.cos().sum(), wrt)]
        return found

    for start in (state, None):
        for actual, expected in zip(results(start, True), results(start, False), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_who_takes_the_op(monkeypatch):
    """Many tokens on a GPU: not one, nor states after several, nor a dtype that autocast would change, nor a dtype or
    a width that has no kernel. A forward pass alone is left to the compiler."""
    with FakeTensorMode():  # no GPU is needed
        x, token = (torch.empty(2, T, 6, device="cuda") for T in (5, 1))
        wide = torch.empty(2, 5, 6, device="cuda", dtype=torch.float64)
    takes = build(3, "cpu")._takes_op
    assert takes(x, None)
    assert build(8, "cpu")._takes_op(x, None) and not build(9, "cpu")._takes_op(x, None)
    assert (
        not takes(wide, None)
        and not takes(x, 2)
        and not takes(token, None)
        and not takes(torch.ones(2, 5, 6), None)
    )
    monkeypatch.setattr("flacompose.layers.short_conv.is_compiling", lambda: True)
    assert takes(x, None)
    with torch.no_grad():
        assert not takes(x, None)
    monkeypatch.setattr("flacompose.layers.short_conv.autocast_dtype", lambda _: torch.bfloat16)
    assert not takes(x, None)


def test_compiles_to_one_kernel(device):
    """Nothing but the output is written; and the new state, where it is asked for, by one more kernel."""
    conv = build(4, device, torch.float32, bias=True)
    x = torch.randn(2, 9, 6, device=device)
    state = torch.randn(2, 6, 4, device=device)
    for function, kernels in ((lambda x, s: conv(x, s)[0], 1), (conv, 2)):
        torch._dynamo.reset()
        metrics.reset()
        with torch.no_grad():
            compiled = torch.compile(function, fullgraph=True, dynamic=True)
            actual, (code,) = run_and_get_code(compiled, x, state)
            torch.testing.assert_close(actual, function(x, state))
        assert metrics.generated_kernel_count == kernels
        assert len(re.findall(r"= empty_strided", code)) == kernels


X = torch.ones(2, 5, 6)
BOUNDS = torch.tensor([0, 5])
# The arguments in place of `X`, the message, and the error, where it is no ValueError.
REFUSED = [
    ({"x": None}, "x must be a tensor, got NoneType", TypeError),
    ({"x": X.long()}, "x must be float32, bfloat16, float16 or float64, got int64", TypeError),
    ({"x": X[0]}, "x must have shape (B, T, 6), got (5, 6)"),
    ({"x": X[:, :, :4]}, "x must have shape (B, T, 6), got (2, 5, 4)"),
    ({"state": (X,)}, "state must be a tensor, got tuple", TypeError),
    ({"state": torch.ones(2, 6, 4).long()}, "state must be float32, bfloat16, float16 or ", TypeError),
    ({"state": torch.ones(2, 6, 3)}, "state must have shape (2, 6, 4), got (2, 6, 3)"),
    ({"lengths": [1, 5]}, "lengths must be a tensor, got list", TypeError),
    ({"lengths": torch.ones(2)}, "lengths must be an integer dtype, got float32", TypeError),
    ({"lengths": torch.ones(2).bool()}, "lengths must be an integer dtype, got bool", TypeError),
    ({"lengths": torch.ones(3).long()}, "lengths must have shape (2,), got (3,)"),
    ({"cu_seqlens": (0, 5)}, "cu_seqlens must be a tensor, got tuple", TypeError),
    ({"cu_seqlens": BOUNDS}, "cu_seqlens needs x of one row (B = 1), got B = 2"),
    ({"x": X[:1], "cu_seqlens": BOUNDS[:1]}, "cu_seqlens must have shape [N + 1] with N >= 1, got (1,)"),
    ({"x": X[:1], "cu_seqlens": BOUNDS.float()}, "cu_seqlens must be int32 or int64, got float32", TypeError),
    ({"sizes": (2, 3)}, "sizes must be numbers of channels, 6 in all, got (2, 3)"),
    ({"sizes": (7, -1)}, "sizes must be numbers of channels, 6 in all, got (7, -1)"),
    ({"sizes": 6}, "sizes must be numbers of channels, 6 in all, got 6"),
    ({"lengths": BOUNDS, "cu_seqlens": BOUNDS}, "lengths and cu_seqlens exclude each other"),
]


@pytest.mark.parametrize(("call", "message", "error"), [(*row, ValueError)[:3] for row in REFUSED])
def test_refused_inputs(call, message, error):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        ShortConvolution(6, 4)(**{"x": X} | call)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4), ValueError, "hidden_size must be at least 1, got 0"),
        ((16.0, 4), TypeError, "hidden_size must be an int, got float"),
        ((16, 0), ValueError, "kernel_size must be at least 1, got 0"),
        ((16, "4"), TypeError, "kernel_size must be an int, got str"),
        ((16, 4, "no"), TypeError, "bias must be a bool, got 'no'"),
        ((6, 4, False, "gelu"), ValueError, "activation must be 'silu', 'swish' or None, got 'gelu'"),
        ((16, 4, False, None, None, torch.int32), TypeError, "dtype must be float32, .* got int32"),
    ],
)
def test_refused_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ShortConvolution(*arguments)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64], ids=str)
def test_lengths_outside_the_tokens(dtype, device):
    """Lengths below 0 count as 0, those above the tokens as all of them, in any integer dtype."""
    conv = ShortConvolution(16, 4, device=device)
    x, state = torch.randn(2, 200, 16, device=device), torch.randn(2, 16, 4, device=device)
    _, new = conv(x[:, :9], state, lengths=torch.tensor([-3, 99], device=device, dtype=dtype))
    _, expected = conv(x[:, :9], state, lengths=torch.tensor([0, 9], device=device))
    assert torch.equal(new, expected)
    _, new = conv(x, state, lengths=torch.tensor([1, 100], device=device, dtype=dtype))  # T over int8
    _, expected = conv(x, state, lengths=torch.tensor([1, 100], device=device))
    assert torch.equal(new, expected)


def test_bias_is_a_parameter_even_if_absent():
    conv = build(4, "cpu")
    assert conv._parameters["bias"] is None
    with pytest.raises(TypeError, match="cannot assign"):
        conv.bias = torch.ones(6)
