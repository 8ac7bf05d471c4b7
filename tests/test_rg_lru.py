"""RG-LRU: resets, and decays that no number can tell from 1."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import error
from torch import Tensor
from torch.testing import assert_close

from flacompose.ops import chunk_rg_lru, fused_recurrent_rg_lru

FORMS = [chunk_rg_lru, fused_recurrent_rg_lru]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def drawn(T: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, T, 5), (2, T, 5), (2, T, 5), (5,), (2, 5)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def by_tokens(
    x: Tensor, r: Tensor, i: Tensor, a_param: Tensor, h: Tensor, reset: Tensor
) -> tuple[Tensor, Tensor]:
    """As the code of Griffin has it: at a reset the state counts nothing, and the input is not scaled."""
    o = []
    for t in range(x.shape[1]):
        a = (-8 * a_param.exp().log1p() * r[:, t].sigmoid()).exp()
        entering, again = i[:, t].sigmoid() * x[:, t], reset[:, t, None]
        h = torch.where(again, entering, a * h + (1 - a * a).sqrt() * entering)
        o.append(h)
    return torch.stack(o, 1), h


@each_form
def test_resets(form) -> None:
    """Of some sequences and in the middle, from a state; values and all gradients."""
    inputs = drawn(9)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[0, 0] = reset[1, 4] = reset[0, 8] = True
    *tokens, h = inputs
    results = form(*tokens, reset, h, True), by_tokens(*inputs, reset)
    assert_close(*results, atol=1e-12, rtol=1e-12)
    gradients = (torch.autograd.grad(o.sum() + h.square().sum(), inputs) for o, h in results)
    assert_close(*gradients, atol=1e-11, rtol=1e-11)


@each_form
def test_decays_of_1(form) -> None:
    """Of a rate of 0 nothing enters and nothing is NaN; beside a rate of 1e-12, 1 minus the decay's square is exact."""
    x, r, i, a_param, h = drawn(3, torch.float32)
    with torch.no_grad():
        r[:, 1] = -200.0  # of which the sigmoid is 0
        a_param.copy_(torch.tensor([-26.0, -27.0, -28.0, -29.0, -200.0]))
    o, _ = form(x, r, i, a_param)
    assert torch.equal(o[:, 1], o[:, 0]) and not o[..., 4].any()
    gradients = torch.autograd.grad(o.sum(), [x, r, i, a_param])
    assert all(gradient.isfinite().all() for gradient in gradients)
    double = [y.detach().double().requires_grad_() for y in (x, r, i, a_param)]
    g = -8 * double[3].exp().log1p() * double[1].sigmoid()
    expected = ((-torch.expm1(2 * g)).sqrt() * double[2].sigmoid() * double[0]).cumsum(1)
    assert error(o.detach(), expected.detach()) <= 1e-6
    exact = torch.autograd.grad(expected.sum(), double)
    for gradient, truth in zip(gradients, exact, strict=True):
        assert error(gradient, truth.nan_to_num()) <= 1e-5


def test_errors() -> None:
    x, r, i, a_param, _ = drawn(3)
    with pytest.raises(TypeError, match="reset must be bool, got int64"):
        chunk_rg_lru(x, r, i, a_param, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"reset must have shape \(2, 3\), got \(3,\)"):
        chunk_rg_lru(x, r, i, a_param, torch.zeros(3, dtype=torch.bool))
