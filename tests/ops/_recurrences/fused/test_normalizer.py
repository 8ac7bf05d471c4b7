"""The normaliser by itself: any floor, its gradient, and tokens in no sequence that hold anything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flacompose.ops._recurrences.fused.normalizer import op
from flacompose.ops._recurrences.fused.normalizer.reference import normalizer

BOUNDS = [0, 3, 3, 73, 75]
T = 77


def draw(dtype: torch.dtype) -> op.Inputs:
    """Floors above and below what queries read. The tail is not finite, or 0, where a division by the floor would be
    neither."""
    generator = torch.Generator().manual_seed(0)
    q, k, x, *numbers, n = (
        torch.randn(1, *shape, generator=generator).to(dtype)
        for shape in ((T, 2, 5), (T, 2, 5), (T, 4, 6), (T, 4), (T, 4), (T, 4), (4, 4, 5))
    )
    g, beta, floor = -0.3 * numbers[0].abs(), numbers[1].exp(), numbers[2].exp()
    g[:, 40] = -torch.inf
    x[:, 75], floor[:, 75] = torch.nan, 0
    q[:, 76], floor[:, 76] = torch.inf, torch.nan
    return op.Inputs(q, k, x, g, beta, floor, n[0], torch.tensor(BOUNDS), 0.7, 0.0)


def assert_right(form: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, rtol: float) -> None:
    """`form` gives the values and gradients of the recurrence for each sequence, and zeros for all other tokens."""
    *tensors, cu_seqlens, scale, eps = draw(dtype)
    tensors = [x.requires_grad_() for x in tensors]
    do, dn = torch.randn(1, T, 4, 6, dtype=dtype), torch.randn(4, 4, 5, dtype=dtype)
    results = form(*tensors, cu_seqlens, scale, eps)
    gradients = torch.autograd.grad(results, tensors, (do, dn))

    leaves = [x.detach().double().requires_grad_() for x in tensors]
    of_tokens, n = leaves[:-1], leaves[-1]
    truth = [
        normalizer(*(x[:, lo:hi] for x in of_tokens), n[i : i + 1], scale, eps)
        for i, (lo, hi) in enumerate(zip(BOUNDS, BOUNDS[1:]))
        if lo < hi
    ]
    expected = torch.cat([o for o, _ in truth], 1), torch.cat([truth[0][1], n[1:2], truth[1][1], truth[2][1]])
    d_expected = torch.autograd.grad(expected, leaves, (do[:, :75].double(), dn.double()))
    assert not results[0][:, 75:].any() and not any(dx[:, 75:].any() for dx in gradients[:-1])
    for found, exact in zip(
        (results[0][:, :75], results[1], *(dx[:, :75] for dx in gradients[:-1]), gradients[-1]),
        (*expected, *(dx[:, :75] for dx in d_expected[:-1]), d_expected[-1]),
        strict=True,
    ):
        assert (found - exact).norm() <= rtol * exact.norm()


def test_values_and_gradients() -> None:
    for form in (op.chunk, op.recurrent):
        assert_right(form, torch.float64, 1e-12)
