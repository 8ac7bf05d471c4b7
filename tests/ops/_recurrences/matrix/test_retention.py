"""Retention: its decays."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import error
from contract.cases import NAMED

from flacompose.ops import chunk_retention, fused_recurrent_retention
from flacompose.ops.retention import log_decay

RETENTION = NAMED["chunk_retention"]
each_form = pytest.mark.parametrize("form", [chunk_retention, fused_recurrent_retention])


@each_form
@pytest.mark.parametrize("H", [1, 4, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decays(form, H: int, dtype: torch.dtype, device: torch.device) -> None:
    """What one token leaves of a state is ``1 - 2 ** (-5 - h)``, and what is forgotten is right too."""
    q = torch.zeros(1, 1, H, 1, dtype=dtype, device=device)
    state = torch.ones(1, H, 1, 1, dtype=dtype, device=device)
    _, left = form(q, q, q, initial_state=state, output_final_state=True)
    h = torch.arange(H, dtype=torch.float64, device=device)
    expected = 1 - 2 ** (-5 - h)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(left.flatten().double(), expected, rtol=tolerance, atol=0)


@each_form
def test_many_heads(form, device: torch.device) -> None:
    T, H = 2048, 21
    k = torch.ones(1, T, H, 1, device=device)
    _, state = form(k, k, k, output_final_state=True)
    a = 1 - 2 ** (-5 - torch.arange(H, dtype=torch.float64, device=device))
    assert error(state.flatten(), (1 - a**T) / (1 - a)) <= 2e-5


def test_late_heads_decay_too(device: torch.device) -> None:
    """Head 30 forgets 2**-35 a token, which ``1 - 2**-35`` would round away in float32."""
    exact = torch.log1p(-(2 ** (-5 - torch.arange(31, dtype=torch.float64, device=device))))
    assert ((log_decay(31, torch.empty(1, device=device)) / exact - 1).abs() <= 1e-6).all()
