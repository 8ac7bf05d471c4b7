"""Gated linear attention: its hard resets."""

from __future__ import annotations

import torch
from contract.accuracy import error
from contract.cases import NAMED
from contract.problems import draw

from flacompose.ops import chunk_gla


def test_a_reset_is_a_new_sequence(device: torch.device) -> None:
    """A gate of -inf on every channel forgets all that came before."""
    problem = draw(NAMED["chunk_gla"], device, B=1, T=100)
    q, k, v, g = (x.clone() for x in list(problem.tensors.values())[:4])
    g[:, 50] = float("-inf")
    o, state = chunk_gla(q, k, v, g, initial_state=problem.tensors["initial_state"], output_final_state=True)
    after, expected = chunk_gla(q[:, 50:], k[:, 50:], v[:, 50:], g[:, 50:], output_final_state=True)
    assert error(o[:, 50:], after) <= 2e-5
    assert error(state, expected) <= 2e-5
