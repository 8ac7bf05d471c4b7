"""HGRN: that its two forms are one function, of any number of channels, sharded by them, and its graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from contract.accuracy import FIXED, VALUES, error
from contract.cases import CASES
from contract.graphs import listing
from contract.problems import draw, evaluate
from ranks import check_sharded, on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim, export

from flacompose.ops import chunk_hgrn, fused_recurrent_hgrn

FORMS = [chunk_hgrn, fused_recurrent_hgrn]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
CASE = next(c for c in CASES if c.name == "chunk_hgrn")


@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 59]], ids=["dense", "packed"])
@pytest.mark.parametrize("gates", ["mild", "rare", -1e-6])
def test_both_forms_are_one_function(
    gates: str | float, lengths: list[int] | None, device: torch.device
) -> None:
    problem = draw(CASE, device, T=130, lengths=lengths, gates=gates)
    options = {"output_final_state": True, "cu_seqlens": problem.cu_seqlens}

    def results(form):
        return evaluate(problem, function=lambda _, **tensors: form(**tensors, **options))

    chunk, recurrent = map(results, FORMS)
    for name, x in chunk.items():
        assert error(x, recurrent[name]) <= 2 * FIXED[torch.float32][name not in VALUES], name


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


def test_prompt_then_tokens(device: torch.device) -> None:
    """A prompt in chunks, then tokens one by one from its state: the whole sequence in chunks."""
    tensors = draw(CASE, device, T=70, state=False).tensors
    whole, final = chunk_hgrn(**tensors, output_final_state=True)
    _, state = chunk_hgrn(**CASE.at(slice(66), tensors, "T"), output_final_state=True)
    for t in range(66, 70):
        token = CASE.at(slice(t, t + 1), tensors, "T")
        o, state = fused_recurrent_hgrn(**token, initial_state=state, output_final_state=True)
        assert error(o, whole[:, t : t + 1]) <= 2e-5
    assert error(state, final) <= 2e-5


@each_form
def test_weak_decays_add_up(form, device: torch.device) -> None:
    """One of 1e-6 a token takes a part of 0.033 in 33,000, though float32 has 1 minus 1e-6 to 3 percent."""
    g = torch.full((1, 33_000, 1), -1e-6, device=device)
    h = torch.ones(1, 1, device=device)
    _, state = form(torch.zeros_like(g), g, h, output_final_state=True)
    assert error(1 - state, 1 - (g.double().sum(1)).exp()) <= 1e-3


def sharded(mesh: DeviceMesh) -> None:
    """By rows and by channels on two ranks: the results and gradients of one, sharded as the inputs."""
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, 6), -torch.rand(2, 5, 6), torch.randn(2, 6)]
    for form in FORMS:
        for tokens, state in ((Shard(0), Shard(0)), (Shard(2), Shard(1))):
            run = partial(form, output_final_state=True)
            assert check_sharded(mesh, run, inputs, [tokens, tokens, state]) == [tokens, state]


def test_dtensor() -> None:
    on_two_ranks(sharded)


class Layer(nn.Module):
    def forward(self, x: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        return chunk_hgrn(x, -g.exp(), initial_state=state, output_final_state=True)


def test_graph_of_chunk_hgrn() -> None:
    expecttest = pytest.importorskip("expecttest")
    arguments = tuple(draw(CASE, torch.device("cpu"), T=37, V=8).tensors.values())
    time = {1: Dim("T", min=2, max=2**20)}
    program = export(Layer(), arguments, dynamic_shapes=(time, time, None)).run_decompositions()
    expecttest.assert_expected_inline(
        listing(program.graph_module),
        """\
%0 = placeholder : float32[2, s0, 8]
%1 = placeholder : float32[2, s0, 8]
%2 = placeholder : float32[2, 8]
%3 = aten.exp.default(%1) : float32[2, s0, 8]
%4 = aten.neg.default(%3) : float32[2, s0, 8]
%5 = flacompose.scan_chunk.default(%0, %4, %2, None) : (float32[2, s0, 8], float32[2, 8])
%6 = getitem(%5, 0) : float32[2, s0, 8]
%7 = getitem(%5, 1) : float32[2, 8]
return %6, %7""",
    )
