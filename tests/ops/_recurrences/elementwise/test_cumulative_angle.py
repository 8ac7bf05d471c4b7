"""Mamba-3's angles by themselves: packed sequences, some of them empty, and tokens that are in none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flacompose.ops._recurrences.elementwise.cumulative_angle import op
from flacompose.ops._recurrences.elementwise.cumulative_angle.reference import cumulative_angle

BOUNDS = [0, 3, 3, 37, 39]
END, T = 39, 41


def draw(dtype: torch.dtype, H: int) -> op.Inputs:
    """Speeds of any size, and time steps of up to some turns. The tail is not finite."""
    generator = torch.Generator().manual_seed(0)
    x, dt, initial = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((1, T, H, 3), (1, T, 4), (4, 4, 3))
    )
    x, dt = x.exp().log2(), dt.exp()
    x[:, 1::2] *= 0.01
    for y in (x, dt):
        y[:, END], y[:, END + 1] = torch.nan, torch.inf
    return op.Inputs(x, dt, initial.clamp(-3, 3), torch.tensor(BOUNDS))


def assert_right(
    forward: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, rtol: float, H: int
) -> None:
    """`forward` gives the values and gradients of the loop for each sequence, and zeros for other tokens."""
    *tensors, cu_seqlens = draw(dtype, H)
    tensors = [x.requires_grad_() for x in tensors]
    o, final = forward(*tensors, cu_seqlens)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    x, dt, initial = leaves
    parts = [
        cumulative_angle(x[:, lo:hi], dt[:, lo:hi], initial[n : n + 1])
        if lo < hi
        else (o[:, :0], initial[n : n + 1])
        for n, (lo, hi) in enumerate(zip(BOUNDS, BOUNDS[1:]))
    ]
    expected, last = (torch.cat(y, i) for i, y in zip((1, 0), zip(*parts, strict=True)))
    assert not o[:, END:].any() and o.abs().max() <= 1
    for y, exact in ((o[:, :END], expected), (final / torch.pi, last / torch.pi)):
        off = (y - exact + 1).remainder(2) - 1
        assert off.abs().max() <= rtol
    d, d_final = torch.randn_like(o), torch.randn_like(final)
    for wanted in ([0, 1, 2], [0], [1], [2]):
        found = torch.autograd.grad((o, final), [tensors[i] for i in wanted], (d, d_final), retain_graph=True)
        exact = torch.autograd.grad(
            (expected, last),
            [leaves[i] for i in wanted],
            (d[:, :END].double(), d_final.double()),
            retain_graph=True,
        )
        for y, z in zip(found, exact, strict=True):
            assert_close(y.double(), z, atol=30 * rtol, rtol=30 * rtol)


@pytest.mark.parametrize("H", [1, 4])
def test_values_and_gradients(H: int) -> None:
    assert_right(op.forward, torch.float64, 1e-12, H)


def test_the_operator_is_a_good_one() -> None:
    x, dt, initial, cu_seqlens = draw(torch.float32, 1)
    args = x[:, :END].requires_grad_(), dt[:, :END].requires_grad_(), initial.requires_grad_(), cu_seqlens
    torch.library.opcheck(op.forward, args)
    torch.library.opcheck(op.forward, (*args[:2], None, None))
