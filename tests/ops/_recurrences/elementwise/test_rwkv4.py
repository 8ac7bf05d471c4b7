"""RWKV-4: every value and gradient, of keys of any size, against the recurrence in float64, and its states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from contract.accuracy import error
from helpers.ranks import check_sharded, on_two_ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

from flacompose.ops import chunk_rwkv4, fused_recurrent_rwkv4
from flacompose.ops._recurrences.elementwise.rwkv4 import op
from flacompose.ops._recurrences.elementwise.rwkv4.inputs import LOWEST
from flacompose.ops._recurrences.elementwise.rwkv4.reference import rwkv4

FORMS = [chunk_rwkv4, fused_recurrent_rwkv4]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
State = tuple[Tensor, Tensor, Tensor]


def by_tokens(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
    """With logarithms of the sums of weights in place of the sums, which overflow."""
    o, (a, b, m) = [], state
    mean, total = a / b, b.log() + m
    for t in range(k.shape[1]):
        now = torch.logaddexp(total, u + k[:, t])
        o.append((total - now).exp() * mean + (u + k[:, t] - now).exp() * v[:, t])
        new = torch.logaddexp(w + total, k[:, t])
        mean = (w + total - new).exp() * mean + (k[:, t] - new).exp() * v[:, t]
        total = new
    return torch.stack(o, 1), (mean, total)


def drawn(
    T: int, B: int = 2, D: int = 5, size: float = 1.0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(0)
    w, u, k, v = torch.randn(D).exp() / -8, torch.randn(D), size * torch.randn(B, T, D), torch.randn(B, T, D)
    state = torch.randn(B, D), torch.rand(B, D) + 0.1, torch.randn(B, D)
    return [x.to(dtype).requires_grad_() for x in (w, u, k, v, *state)]


def draw(
    T: int,
    bounds: list[int] | None = None,
    D: int = 7,
    size: float = 1.0,
    state: bool = True,
    dtype: torch.dtype = torch.float32,
) -> op.Inputs:
    """Decays from none to -inf, of one channel each. Tokens that are in no sequence are not finite."""
    generator = torch.Generator().manual_seed(T)
    N = 2 if bounds is None else len(bounds) - 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    v, k = normal(2 if bounds is None else 1, T, D), size * normal(2 if bounds is None else 1, T, D)
    w = torch.tensor([0, -1e-6, -0.3, -5, -30, -1e4, -torch.inf]).repeat(D)[:D]
    initial = (normal(N, D), normal(N, D).abs() + 0.1, size * normal(N, D)) if state else (None,) * 3
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    if bounds is not None:
        for x in (v, k):
            x[:, bounds[-1] :] = torch.inf
    return op.Inputs(v.to(dtype), k.to(dtype), w, normal(D), *initial, cu_seqlens)


def assert_right(form: Callable[..., tuple[Tensor, ...]], inputs: op.Inputs, bound: float) -> None:
    """`form` gives the values of the recurrence in float64, and its gradients, of all inputs and of each alone.

    A state is compared by what it stands for: maxima may be rounded. Where one token has all of the weight, a gradient
    is a small difference of numbers of size 1.
    """
    *tensors, cu_seqlens = inputs
    given = [x if x is None else x.detach().requires_grad_() for x in tensors]
    double = [x if x is None else x.detach().double().requires_grad_() for x in tensors]
    v, k, w, u, *initial = double
    B, T, D = v.shape
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    parts, ends = [], []
    for n, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        start = [x if x is None else x[rows] for x in initial]
        if lo == hi:
            nothing = [v.new_full((1, D), x) for x in (0, 0, LOWEST)]
            ends.append(nothing if initial[0] is None else start)
            continue
        o, *end = rwkv4(v[:, lo:hi], k[:, lo:hi], w, u, *start)
        parts.append(o)
        ends.append(end)
    expected = torch.cat(parts, 1), *(torch.cat(x) for x in zip(*ends, strict=True))
    o, a, b, m = form(*given, cu_seqlens)
    assert o.dtype == inputs.v.dtype and not o[:, : bounds[0]].any() and not o[:, bounds[-1] :].any()
    found = o[:, bounds[0] : bounds[-1]], a, b, m
    (scale,) = torch.exp(m.detach().double() - expected[3].detach())[None]
    for x, y in zip(found, (expected[0], expected[1] / scale, expected[2] / scale, expected[3])):
        assert_near(x, y, bound)
    do, d_final = torch.randn_like(found[0]), [torch.randn_like(x) for x in (a, b)]
    of = [i for i, x in enumerate(given[:6]) if x is not None]
    # The maximum is a constant, of the value that the results have.
    losses = (expected[0], expected[1] / scale, expected[2] / scale)
    exact = torch.autograd.grad(
        losses, [double[i] for i in of], [x.double() for x in (do, *d_final)], retain_graph=True
    )
    exact = dict(zip(of, exact, strict=True))
    for wanted in (of, *([i] for i in of)):
        gradients = torch.autograd.grad(
            found[:3], [given[i] for i in wanted], (do, *d_final), retain_graph=True
        )
        for i, x in zip(wanted, gradients, strict=True):
            assert_near(x, exact[i], 4 * bound)
    if given[6] is not None:
        (dm,) = torch.autograd.grad(m, [given[6]], torch.ones_like(m), retain_graph=True)
        kept = torch.tensor([lo == hi for lo, hi in zip(bounds, bounds[1:])])
        assert torch.equal(
            dm, torch.zeros_like(dm) if cu_seqlens is None else kept[:, None].expand_as(dm).float()
        )


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    assert (found.double() - expected).norm() <= bound * (expected.norm() + 1), (found, expected)


def means(state: State) -> tuple[Tensor, Tensor]:
    a, b, m = state
    return a / b, b.log() + m


@each_form
@pytest.mark.parametrize(
    ("T", "size", "dtype", "bound"),
    [(130, 1.0, torch.float64, 1e-11), (7, 100.0, torch.float64, 1e-11), (130, 30.0, torch.float32, 1e-4),
     (1, 1.0, torch.float32, 1e-5), (130, 8.0, torch.bfloat16, 2e-3)],
)  # fmt: skip
def test_values_and_gradients(form, T: int, size: float, dtype: torch.dtype, bound: float) -> None:
    """From a state. Errors of single precision are those of exponents of keys that are up to 100."""
    inputs = drawn(T, size=size, dtype=dtype)
    double = [x.detach().double().requires_grad_() for x in inputs]
    o, state = form(*inputs[:4], tuple(inputs[4:]), output_final_state=True)
    assert o.dtype == dtype and {x.dtype for x in state} <= {torch.float32, torch.float64}
    expected, ends = by_tokens(*double[:4], tuple(double[4:]))
    mean, total = means(state)
    actual = [o, mean, total]
    for x, y in zip(actual, (expected, *ends), strict=True):
        assert error(x.detach(), y.detach()) <= bound

    def loss(o: Tensor, mean: Tensor, total: Tensor) -> Tensor:
        return o.double().square().sum() + mean.double().sin().sum() + total.double().sin().sum()

    # The maximum before the first token only scales the state, and gets no gradient.
    gradients = torch.autograd.grad(loss(*actual), inputs[:6])
    exact = torch.autograd.grad(loss(expected, *ends), double[:6])
    for x, y in zip(gradients, exact, strict=True):
        # Where one token has all of the weight, a gradient is a small difference of numbers of size 1.
        assert (x.double() - y).norm() <= 10 * bound * (y.norm() + 1)


@each_form
def test_packed_sequences_and_pieces(form) -> None:
    """Packed ones are computed as if each were alone, an empty one keeps its state, and pieces give the whole."""
    w, u, k, v, *state = (x.detach() for x in drawn(12, B=3))
    bounds = [0, 4, 4, 10]
    row = [x[:1].clone() for x in (k, v)]
    for x in row:
        x[:, 10:] = torch.nan
    w.requires_grad_(), u.requires_grad_()
    o, ends = form(w, u, *row, tuple(state), True, torch.tensor(bounds))
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), [w, u]))
    w, u, o, ends = w.detach(), u.detach(), o.detach(), tuple(x.detach() for x in ends)
    assert not o[:, 10:].any() and all(torch.equal(x[1], y[1]) for x, y in zip(ends, state, strict=True))
    for n in (0, 2):
        at = slice(bounds[n], bounds[n + 1])
        alone, end = chunk_rwkv4(w, u, k[:1, at], v[:1, at], tuple(x[n : n + 1] for x in state), True)
        assert_close(o[:, at], alone)
        assert_close(tuple(x[n : n + 1] for x in ends), end)
    whole, end = chunk_rwkv4(w, u, k, v, output_final_state=True)
    first, middle = form(w, u, k[:, :5], v[:, :5], output_final_state=True)
    second, last = form(w, u, k[:, 5:], v[:, 5:], middle, True)
    assert_close((torch.cat([first, second], 1), last), (whole, end))
    assert_close(whole[:, 0], v[:, 0])
    # A common factor of all weights cancels, however small it is.
    assert_close(form(w, u, k - 2000, v)[0], whole)


def test_states_of_the_last_tokens() -> None:
    w, u, k, v, *_ = (x.detach() for x in drawn(6))
    _, states = fused_recurrent_rwkv4(w, u, k, v, output_states=2)
    for i in range(2):
        _, expected = chunk_rwkv4(w, u, k[:, : 5 + i], v[:, : 5 + i], output_final_state=True)
        assert_close(tuple(x[:, i] for x in states), expected)


def test_export() -> None:
    """At any length."""

    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor, State | None]:
            return chunk_rwkv4(*inputs, output_final_state=True)

    w, u, k, v, *_ = (x.detach() for x in drawn(9))
    T = torch.export.Dim("T", min=2, max=2**16)
    program = torch.export.export(Model(), (w, u, k, v), dynamic_shapes=(((None, None, {1: T}, {1: T})),))
    for T in (2, 40):
        inputs = [x.detach() for x in drawn(T)[:4]]
        assert_close(program.module()(*inputs), Model()(*inputs))


def test_autocast() -> None:
    w, u, k, v, *_ = (x.detach() for x in drawn(9, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        o, state = chunk_rwkv4(w, u, k, v, output_final_state=True)
    expected, end = chunk_rwkv4(w, u, k, v.bfloat16(), output_final_state=True)
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected)
    assert_close(state, end)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w": torch.zeros(4)}, ValueError, r"w must have shape \(5,\), got \(4,\)"),
        ({"u": torch.zeros(4)}, ValueError, r"u must have shape \(5,\), got \(4,\)"),
        ({"k": torch.zeros(2, 3, 4)}, ValueError, r"k must have shape \(2, 3, 5\), got \(2, 3, 4\)"),
        ({"initial_state": (torch.zeros(2, 5),)}, TypeError, r"must be a tuple \(a, b, m\), got tuple of 1"),
        ({"initial_state": (torch.zeros(2, 4),) * 3}, ValueError, r"initial_state\[0\] must have shape \(2, 5\)"),
    ],
)  # fmt: skip
def test_errors(changes, error, message) -> None:
    w, u, k, v, *_ = drawn(3)
    with pytest.raises(error, match=message):
        chunk_rwkv4(**{"w": w, "u": u, "k": k, "v": v} | changes)


@each_form
def test_weights_that_are_all_small(form) -> None:
    """Of a token before which nothing was written the output is its value, also where its weight underflows."""
    k, v = torch.full((1, 1, 2), -200.0), torch.randn(1, 1, 2)
    w, u, state = -torch.ones(2), torch.zeros(2), tuple(torch.zeros(3, 1, 2).unbind())
    assert_close(form(w, u, k, v, state)[0], v)
    u = torch.full((2,), -200.0, requires_grad=True)
    keys, values, bounds = torch.zeros(1, 6, 2), torch.randn(1, 6, 2), torch.tensor([0, 3])  # and a tail
    form(w, u, keys, values, cu_seqlens=bounds)[0].sum().backward()
    assert u.grad is not None and u.grad.isfinite().all()


@each_form
def test_a_state_of_zeros_is_none(form) -> None:
    w, u, k, v, *state = (x.detach() for x in drawn(6))
    k -= 200
    zeros = tuple(torch.zeros_like(x) for x in state)
    o, end = form(w, u, k, v, zeros, True)
    expected, expected_end = form(w, u, k, v, None, True)
    assert torch.equal(o, expected) and all(torch.equal(x, y) for x, y in zip(end, expected_end))


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masks_are_keys(form, dtype: torch.dtype) -> None:
    """The lowest number of a dtype is what masks are filled with: such tokens have no weight beside others."""
    w, u, k, v = (x.detach() for x in drawn(6, dtype=dtype)[:4])
    k[:, :2] = torch.finfo(dtype).min
    o, _ = form(w, u, k, v)
    torch.testing.assert_close(o[:, 2:], form(w, u, k[:, 2:], v[:, 2:])[0])
    assert torch.equal(o[:, 0], v[:, 0])


@each_form
def test_a_maximum_is_a_constant(form) -> None:
    w, u, k, v, a, b, m = drawn(3)
    form(w, u, k, v, (a, b, m))[0].sum().backward()
    assert m.grad is None or not m.grad.any()


@each_form
def test_vmap(form) -> None:
    """Over sets of all arguments."""
    inputs = [torch.stack([x, x.flip(-1)]).detach() for x in drawn(7)]
    mapped, _ = torch.vmap(lambda *x: form(*x[:4], x[4:], output_final_state=True))(*inputs)
    for i, o in enumerate(mapped):
        assert torch.equal(o, form(*(x[i] for x in inputs[:4]), tuple(x[i] for x in inputs[4:]))[0])


def test_sharded() -> None:
    """Along the channels and along the batch."""
    on_two_ranks(sharded)


def sharded(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate, Shard

    def run(*x: Tensor) -> list[Tensor]:
        o, state = chunk_rwkv4(*x[:4], x[4:], output_final_state=True)
        assert state is not None
        return [o, *state[:2]]

    inputs, whole = [x.detach() for x in drawn(7, D=4)], [Replicate()] * 2
    check_sharded(mesh, run, inputs, [Shard(0), Shard(0), Shard(2), Shard(2), *[Shard(1)] * 3])
    check_sharded(mesh, run, inputs, [*whole, *[Shard(0)] * 5])


def test_compiled_once() -> None:
    """For all lengths, and no number of the code is taken for an input."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chunk_rwkv4, backend=counter, fullgraph=True, dynamic=True)
    for T in (6, 9):
        inputs = drawn(T)[:4]
        assert_close(compiled(*inputs)[0], chunk_rwkv4(*inputs)[0])
    assert counter.frame_count == 1


@each_form
def test_states_have_the_dtype_of_sums(form) -> None:
    w, u, k, v = (x.detach().float() for x in drawn(3)[:4])
    _, state = form(w, u, k.double(), v, output_final_state=True)
    assert {x.dtype for x in state} == {torch.float32}


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize(
    ("T", "bounds", "state"),
    [(1, None, True), (9, None, False), (150, None, True), (75, [0, 3, 3, 55, 60], True),
     (150, [0, 0, 130, 141], False)],
    ids=str,
)  # fmt: skip
def test_the_operator(form: str, T: int, bounds: list[int] | None, state: bool) -> None:
    inputs = draw(T, bounds, state=state, dtype=torch.float64)
    inputs = op.Inputs(*(x if x is None or x is inputs.cu_seqlens else x.double() for x in inputs))
    assert_right(getattr(op, form), inputs, 1e-11)
