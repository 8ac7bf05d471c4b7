"""Gated linear attention: that its two forms are one function, and the graphs that they are captured as."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import FIXED, VALUES, error
from contract.cases import CASES
from contract.graphs import listing
from contract.problems import draw, evaluate, gate
from torch import Tensor, nn
from torch.export import Dim, export

from flacompose.ops import chunk_gla, fused_recurrent_gla

CHUNK, RECURRENT = (next(c for c in CASES if c.name == name) for name in ("chunk_gla", "fused_recurrent_gla-gk"))


@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 59]], ids=["dense", "packed"])
@pytest.mark.parametrize("gates", ["mild", "mixed"])
def test_both_forms_are_one_function(lengths: list[int] | None, gates: str, device: torch.device) -> None:
    chunk = evaluate(draw(CHUNK, device, T=130, lengths=lengths, gates=gates))
    recurrent = evaluate(draw(RECURRENT, device, T=130, lengths=lengths, gates=gates))
    recurrent["dg"] = recurrent.pop("dgk")
    assert chunk.keys() == recurrent.keys()
    for name, x in chunk.items():
        assert error(x, recurrent[name]) <= 2 * FIXED[torch.float32][name not in VALUES], name


def test_prompt_then_tokens(device: torch.device) -> None:
    """A prompt in chunks, then tokens one by one from its state: the whole sequence in chunks."""
    problem = draw(CHUNK, device, T=70, state=False)
    q, k, v, g = problem.tensors.values()
    whole, final = chunk_gla(q, k, v, g, output_final_state=True)
    _, state = chunk_gla(q[:, :66], k[:, :66], v[:, :66], g[:, :66], output_final_state=True)
    for t in range(66, 70):
        token = slice(t, t + 1)
        o, state = fused_recurrent_gla(
            q[:, token], k[:, token], v[:, token], gk=g[:, token], initial_state=state, output_final_state=True
        )
        assert error(o, whole[:, token]) <= 2e-5
    assert error(state, final) <= 2e-5


def test_a_reset_is_a_new_sequence(device: torch.device) -> None:
    """A gate of -inf on every channel forgets as a packed boundary does, to the bit of what is read after it."""
    problem = draw(CHUNK, device, B=1, T=100)
    q, k, v, g = (x.clone() for x in list(problem.tensors.values())[:4])
    g[:, 50] = float("-inf")
    o, state = chunk_gla(q, k, v, g, initial_state=problem.tensors["initial_state"], output_final_state=True)
    after, expected = chunk_gla(q[:, 50:], k[:, 50:], v[:, 50:], g[:, 50:], output_final_state=True)
    assert error(o[:, 50:], after) <= 2e-5
    assert error(state, expected) <= 2e-5


class Layer(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        g = torch.nn.functional.logsigmoid(x)
        return chunk_gla(q, k, v, g, initial_state=state, output_final_state=True)


class Decode(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, gv: Tensor, cu_seqlens: Tensor) -> Tensor:
        return fused_recurrent_gla(q, k, v, gv=gv, cu_seqlens=cu_seqlens)[0]


def inputs(lengths: list[int] | None = None) -> list[Tensor]:
    return list(draw(CHUNK, torch.device("cpu"), T=37, lengths=lengths, K=8, V=8).tensors.values())
