"""The running maximum, in PyTorch: its values, that its gates fit its maxima, what its gradients are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flacompose.ops._recurrences.elementwise.stabilizer import op
from flacompose.ops._recurrences.elementwise.stabilizer.inputs import LOWEST
from flacompose.ops._recurrences.elementwise.stabilizer.reference import stabilizer

# An addition or two of numbers up to 1e4 for each of a few levels, in units of the precision.
ROUNDINGS = 8


def draw(T: int, bounds: tuple[int, ...] | None, state: bool, dtype: torch.dtype) -> op.Inputs:
    """Numbers from -1e4 to 1e4 and -inf, gates from weak to -1e4 and -inf."""
    generator = torch.Generator().manual_seed(T)
    B, N = (2, 2) if bounds is None else (1, len(bounds) - 1)

    def chosen(*among: float) -> Tensor:
        return torch.tensor(among)[torch.randint(len(among), (B, T, 3), generator=generator)]

    x = torch.randn(B, T, 3, generator=generator) + chosen(0, 0, 0, 1e4, -1e4, -torch.inf)
    g = -torch.rand(B, T, 3, generator=generator) + chosen(0, 0, 0, 0, -30, -1e4, -torch.inf)
    start = torch.randn(N, 3, generator=generator) + torch.tensor([0, 1e4, -torch.inf])
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    return op.Inputs(x.to(dtype), g.to(dtype), start.to(dtype) if state else None, cu_seqlens)


def assert_right(inputs: op.Inputs, results: tuple[Tensor, ...]) -> None:
    """Maxima are those of the recurrence, up to rounding; gates are between the maxima as they were rounded."""
    x, g, start, cu_seqlens = inputs
    bounds = list(range(x.shape[0] + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    eps = torch.finfo(x.dtype).eps
    for n, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        at = (slice(n, n + 1), slice(None)) if cu_seqlens is None else (slice(None), slice(lo, hi))
        first = torch.zeros(1, 3) if start is None else start[n : n + 1].clamp(min=LOWEST)
        gates, m, final = (*(y[at] for y in results[:2]), results[2][n : n + 1])
        if m.shape[1] == 0:
            assert torch.equal(final, first)
            continue
        _, exact, _ = stabilizer(x[at].double(), g[at].double(), first.double())
        torch.testing.assert_close(m.double(), exact, rtol=ROUNDINGS * eps, atol=ROUNDINGS * eps * 1e4)
        before = torch.cat([first[:, None], m[:, :-1]], 1)
        between = (g[at].double() + (before.double() - m.double())).to(m.dtype)
        assert torch.equal(gates, between) and torch.equal(final, m[:, -1])
    if cu_seqlens is not None:
        outside = [*range(bounds[0]), *range(bounds[-1], x.shape[1])]
        assert not any(y[:, outside].any() for y in results[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("T", "bounds", "state"),
    [(1, None, True), (64, None, False), (70, None, True), (70, (0, 0, 5, 36, 36, 61), True)],
    ids=str,
)
def test_values(T: int, bounds: tuple[int, ...] | None, state: bool, dtype: torch.dtype) -> None:
    inputs = draw(T, bounds, state, dtype)
    assert_right(inputs, op.forward(*inputs))


def test_gradients() -> None:
    """A gate passes on its gradient, of second order too, and maxima, which are constants, pass on nothing."""
    inputs = draw(5, None, True, torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    results = op.forward(*leaves, None)
    arriving = [torch.randn_like(y) for y in results]
    dx, dg, d_start = torch.autograd.grad(results, leaves, arriving)
    assert torch.equal(dg, arriving[0]) and not dx.any() and not d_start.any()
    _, tangents = torch.func.jvp(
        lambda x, g: op.forward(x, g, inputs.initial_state, None), inputs[:2], (dx + 1, dg)
    )
    assert torch.equal(tangents[0], dg) and not tangents[1].any() and not tangents[2].any()


def test_the_operator_is_a_good_one() -> None:
    inputs = draw(5, (0, 2, 4), True, torch.float32)
    operator = torch.ops.flacompose.stabilizer_forward.default
    torch.library.opcheck(operator, (inputs.x, inputs.g.requires_grad_(), *inputs[2:]))
