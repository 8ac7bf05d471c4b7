"""Functions of two formulas have one derivative where the formulas meet: that on both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flacompose.layers import Mamba3
from flacompose.layers.feature_map import elu_plus_one
from flacompose.layers.forget_gate import forget_gate
from flacompose.layers.rodimus import _log_softplus
from flacompose.ops import chunk_rg_lru


def heavy_tail(x: Tensor) -> Tensor:
    return Mamba3(hidden_size=8, head_dim=8, state_size=4, A_activation="heavy_tail")._rates(x)


def bounded_gate(x: Tensor) -> Tensor:
    return forget_gate(x[None, None], torch.tensor([0.25], dtype=x.dtype))[1][0, 0]


def strength(a_param: Tensor) -> Tensor:
    """What enters the RG-LRU at the first token."""
    o, _ = chunk_rg_lru(*(torch.ones(1, 1, 1, dtype=a_param.dtype) for _ in range(3)), a_param)
    return o.flatten()


@pytest.mark.parametrize(
    ("function", "point"),
    [
        (heavy_tail, 0.0),
        (elu_plus_one, 0.0),
        (_log_softplus, -20.0),
        # Where the gate is 0.5 and another formula has its logarithm, and where another has what it forgets.
        (bounded_gate, -0.6931471805599453),
        (bounded_gate, 0.0),
        (strength, 40.0),
    ],
)
def test_one_derivative(function: Callable[[Tensor], Tensor], point: float) -> None:
    found = []
    for x in (point - 1e-9, point, point + 1e-9):
        leaf = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        y = function(leaf)
        found.append((y.item(), *(g.item() for g in torch.autograd.grad(y.sum(), leaf))))
    # Derivatives change by no more than the distance, and _log_softplus has a series of two terms.
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found[2], found[1], rtol=1e-8, atol=1e-8)
