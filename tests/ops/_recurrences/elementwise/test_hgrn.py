"""HGRN: any number of channels, and decays so weak that float32 cannot tell them from 1."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import error
from contract.cases import NAMED
from contract.problems import draw

from flacompose.ops import chunk_hgrn, fused_recurrent_hgrn

FORMS = [chunk_hgrn, fused_recurrent_hgrn]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
CASE = NAMED["chunk_hgrn"]


@each_form
@pytest.mark.parametrize("D", [257, 3000])
def test_any_number_of_channels(form, D: int, device: torch.device) -> None:
    """Each as if it were alone."""
    tensors = draw(CASE, device, T=5, V=D).tensors
    o, state = form(**tensors, output_final_state=True)
    for d in (0, D // 2, D - 1):
        one = {name: x[..., d : d + 1] for name, x in tensors.items()}
        alone, alone_state = form(**one, output_final_state=True)
        assert error(o[..., d : d + 1], alone) <= 1e-6
        assert error(state[..., d : d + 1], alone_state) <= 1e-6


@each_form
def test_weak_decays_add_up(form, device: torch.device) -> None:
    """One of 1e-6 a token takes a part of 0.033 in 33,000, though float32 has 1 minus 1e-6 to 3 percent."""
    g = torch.full((1, 33_000, 1), -1e-6, device=device)
    h = torch.ones(1, 1, device=device)
    _, state = form(torch.zeros_like(g), g, h, output_final_state=True)
    assert error(1 - state, 1 - (g.double().sum(1)).exp()) <= 1e-3
