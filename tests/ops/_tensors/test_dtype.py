"""Products of half-precision numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flacompose.ops._tensors.dtype import product, upcast

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32, torch.float64)


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    return (upcast(x, y) * y).to(x.dtype)


def factors(*dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 1000).exp().to(dtype).requires_grad_() for dtype in dtypes]


@pytest.mark.parametrize("of_y", FLOATS, ids=str)
@pytest.mark.parametrize("of_x", FLOATS, ids=str)
def test_product_is_rounded_once(of_x: torch.dtype, of_y: torch.dtype) -> None:
    """Its value and both gradients have the bits of the product of wider numbers."""
    x, y = leaves = factors(of_x, of_y)
    actual, expected = product(x, y), wide_product(x, y)
    assert actual.dtype == of_x and torch.equal(actual, expected)
    d = torch.randn(4, 1000).to(of_x)
    for dx, expected_dx in zip(*(torch.autograd.grad(z, leaves, d) for z in (actual, expected)), strict=True):
        assert torch.equal(dx, expected_dx)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_product_keeps_no_wider_copy(dtype: torch.dtype) -> None:
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        product(*factors(dtype, dtype))
    assert kept == [dtype, dtype]
