"""The short convolution: any width, its activations, weights of other dtypes, and inputs as models have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from contract.accuracy import assert_accurate, assert_equal
from contract.cases import NAMED, every
from contract.problems import draw, evaluate
from helpers.operators import flat
from torch import Tensor, nn
from torch.export import Dim, export

from flacompose.layers import ShortConvolution
from flacompose.ops import causal_conv1d
from flacompose.ops._launch.launch import launching_by
from flacompose.ops._recurrences.short_conv import eager
from flacompose.ops._recurrences.short_conv.inputs import Inputs

each = every([NAMED["causal_conv1d-silu"], NAMED["causal_conv1d"]])
WIDTHS = [1, 2, 3, 5, 8, 9, 30]


@each
@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("T", [1, 2, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widths(case, W: int, T: int, dtype: torch.dtype, device: torch.device) -> None:
    """Also wider than the sequence, whose state is then partly the old one."""
    problem = draw(case, device, dtype, T=T, W=W)
    assert_accurate(problem, evaluate(problem))


@each
@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("loss", ["o", "state"])
def test_widths_of_packed_sequences(case, W: int, loss: str, device: torch.device) -> None:
    problem = draw(case, device, W=W, lengths=[0, 3, 1, 0, 129, 64, 2, 0], tail=5)
    assert_accurate(problem, evaluate(problem, loss), loss)


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_sums_are_rounded_once(activation: str | None, T: int, device: torch.device) -> None:
    x = torch.randn(2, T, 6, device=device, dtype=torch.bfloat16)
    weight, bias, state = (torch.randn(s, device=device) for s in ((6, 4), (6,), (2, 6, 4)))
    y, _ = causal_conv1d(x, weight, bias, activation, state)
    exact, _ = causal_conv1d(*(t.double() for t in (x, weight, bias)), activation, state.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_parameters_of_another_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """They are computed with in float32, and their gradients have their dtype."""
    case = NAMED["causal_conv1d-silu"]
    problem = draw(case, device)
    parameters = {name: problem.tensors[name].to(dtype) for name in ("weight", "bias")}
    results = evaluate(problem.with_tensors(**parameters))
    rounded = {name: x.float() for name, x in parameters.items()}
    expected = evaluate(problem.with_tensors(**rounded))
    for name in parameters:
        gradient = results.pop(f"d{name}")
        assert gradient.dtype == dtype
        assert torch.equal(gradient, expected.pop(f"d{name}").to(dtype))
    assert_equal(results, expected)


def test_both_names_of_silu(device: torch.device) -> None:
    x, weight = torch.randn(1, 5, 3, device=device), torch.randn(3, 4, device=device)
    silu, _ = causal_conv1d(x, weight, activation="silu")
    swish, _ = causal_conv1d(x, weight, activation="swish")
    plain, _ = causal_conv1d(x, weight)
    assert torch.equal(silu, swish)
    torch.testing.assert_close(silu, F.silu(plain))


@pytest.mark.parametrize("activation", ["gelu", "SiLU", True, F.silu])
def test_refused_activations(activation: object) -> None:
    x, weight = torch.randn(1, 5, 3), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"^activation must be 'silu', 'swish' or None, got "):
        causal_conv1d(x, weight, activation=activation)


def test_a_weight_of_conv1d_is_refused() -> None:
    """`torch.nn.Conv1d` has an axis more; it is to be taken away without a copy, by ``weight.squeeze(1)``."""
    with pytest.raises(ValueError, match=r"^weight must have shape \[D, W\], got \(3, 1, 4\)$"):
        causal_conv1d(torch.randn(1, 5, 3), torch.randn(3, 1, 4))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_layer_is_the_same_function(packed: bool, device: torch.device) -> None:
    layer = ShortConvolution(6, 4, bias=True, device=device, dtype=torch.float64)
    x = torch.randn(1, 20, 6, device=device, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 3, 3, 20], device=device) if packed else None
    state = torch.randn(3 if packed else 1, 6, 4, device=device, dtype=torch.float64)
    y, final = layer(x, state, cu_seqlens=cu_seqlens)
    weight = layer.weight.squeeze(1)
    results = causal_conv1d(x, weight, layer.bias, layer.activation, state, True, cu_seqlens)
    torch.testing.assert_close(results, (y, final), rtol=1e-12, atol=1e-12)


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's own, ``[B, D, T]``."""
    W = weight.shape[1]
    return F.silu(F.conv1d(F.pad(x, (W - 1, 0)), weight[:, None], bias, groups=len(weight)))


@pytest.mark.parametrize("source", ["channels first", "a part of a projection"])
def test_inputs_as_models_have_them(source: str, device: torch.device) -> None:
    """Strided in any way: with results and gradients, to the bit, of what is contiguous."""
    if source == "channels first":
        x = torch.randn(2, 16, 150, device=device).mT
    else:
        x = torch.randn(2, 150, 40, device=device)[..., 8:24]
    weight, bias = torch.randn(16, 4, device=device), torch.randn(16, device=device)
    dy = torch.randn(2, 16, 150, device=device).mT
    results = []
    for layout in (lambda t: t, Tensor.contiguous):
        leaves = [t.detach().requires_grad_() for t in (layout(x), weight, bias)]
        y, _ = causal_conv1d(*leaves, "silu")
        results.append([y.detach(), *torch.autograd.grad(y, leaves, layout(dy))])
    for strided, contiguous in zip(*results, strict=True):
        assert torch.equal(strided, contiguous)
    torch.testing.assert_close(results[0][0].mT, conv1d(x.mT, weight, bias))


class InPyTorch(nn.Module):
    """What AOTInductor has of a convolution too wide for the kernels."""

    def forward(self, x: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor | None):
        return eager.forward(Inputs(x, weight, None, state, cu_seqlens, True))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_pytorch_has_one_graph_for_every_length(packed: bool) -> None:
    def arguments(T: int) -> tuple[Tensor | None, ...]:
        cu_seqlens = torch.tensor([0, 1, 1, T]) if packed else None
        return torch.randn(1 if packed else 3, T, 5), torch.randn(5, 9), torch.randn(3, 5, 9), cu_seqlens

    shapes = {1: Dim("T", min=2, max=8192)}, None, None, None
    module = export(InPyTorch(), arguments(37), dynamic_shapes=shapes).module()
    for T in (2, 8, 9, 10, 65, 2048):
        given = arguments(T)
        for actual, expected in zip(module(*given), InPyTorch()(*given), strict=True):
            assert torch.equal(actual, expected)


def test_a_state_holds_the_inputs_as_they_are(device: torch.device) -> None:
    x, weight = torch.randn(2, 9, 3, device=device, dtype=torch.bfloat16), torch.randn(3, 4, device=device)
    _, state = causal_conv1d(x, weight, output_final_state=True)
    assert state.dtype == torch.float32 and torch.equal(state, x[:, -4:].mT.float())
    # The next token drops the oldest of them and keeps, in every bit, what was in float32.
    old = torch.randn(2, 3, 4, device=device)
    _, state = causal_conv1d(x[:, :1], weight, initial_state=old, output_final_state=True)
    assert torch.equal(state, torch.cat([old[..., 1:], x[:, :1].mT.float()], 2))


def test_in_a_graph_one_token_is_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its few products become part of Inductor's own kernels; longer inputs and packed ones are a kernel."""
    cuda = pytest.importorskip("flacompose.ops._recurrences.short_conv.cuda")
    launched: list[str] = []
    x, weight, state = torch.randn(2, 3, 6), torch.randn(6, 4), torch.randn(2, 6, 4)
    args = weight, None, state, None, True
    with launching_by(lambda kernel, *_, **__: launched.append(kernel.__name__), into_graph=True):
        token = flat(cuda, "forward")(x[:, :1], *args)
        assert launched == []
        flat(cuda, "forward")(x, *args)
        flat(cuda, "forward")(x[:1, :1], weight, None, state, torch.tensor([0, 0, 1]), True)
    assert launched == ["short_conv_kernel"] * 2
    y, final_state = causal_conv1d(x[:, :1], weight, None, "silu", state, True)
    assert torch.equal(token[0], y) and torch.equal(token[1], final_state)
