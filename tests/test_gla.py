"""Gated linear attention: that its two forms are one function, and the graphs that they are captured as."""

# ruff: noqa: E501  the graphs

from __future__ import annotations

import pytest
import torch
from contract.accuracy import FIXED, VALUES, error
from contract.cases import CASES
from contract.graphs import listing
from contract.problems import draw, evaluate
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.export import Dim, export

from flacompose.ops import chunk_gla, fused_recurrent_gla

CHUNK, RECURRENT = (
    next(c for c in CASES if c.name == name) for name in ("chunk_gla", "fused_recurrent_gla-gk")
)


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
            q[:, token],
            k[:, token],
            v[:, token],
            gk=g[:, token],
            initial_state=state,
            output_final_state=True,
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
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return chunk_gla(q, k, v, -x.exp(), initial_state=state, output_final_state=True)


class Packed(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, gv: Tensor, cu_seqlens: Tensor) -> Tensor:
        return fused_recurrent_gla(q, k, v, gv=gv, scale=1.0, cu_seqlens=cu_seqlens)[0]


def snapshot(module: nn.Module, arguments: list[Tensor], lengths: int) -> str:
    """The exported graph, decomposed; the first `lengths` arguments have a dynamic T."""
    dims = tuple({1: Dim("T", min=2, max=2**20)} if i < lengths else None for i in range(len(arguments)))
    return listing(export(module, tuple(arguments), dynamic_shapes=dims).run_decompositions().graph_module)


def test_graph_of_chunk_gla() -> None:
    expecttest = pytest.importorskip("expecttest")
    arguments = list(draw(CHUNK, torch.device("cpu"), T=37, K=4, V=8).tensors.values())
    expecttest.assert_expected_inline(
        snapshot(Layer(), arguments, 4),
        """\
%0 = placeholder : float32[2, s0, 2, 4]
%1 = placeholder : float32[2, s0, 2, 4]
%2 = placeholder : float32[2, s0, 2, 8]
%3 = placeholder : float32[2, s0, 2, 4]
%4 = placeholder : float32[2, 2, 4, 8]
%5 = aten.exp.default(%3) : float32[2, s0, 2, 4]
%6 = aten.neg.default(%5) : float32[2, s0, 2, 4]
%7 = flacompose.vector_decay_chunk.default(%0, %1, %2, %6, None, None, %4, None, 0.5, False, False) : (float32[2, s0, 2, 8], float32[2, 2, 4, 8])
%8 = getitem(%7, 0) : float32[2, s0, 2, 8]
%9 = getitem(%7, 1) : float32[2, 2, 4, 8]
return %8, %9""",
    )


def test_graph_of_fused_recurrent_gla_packed() -> None:
    expecttest = pytest.importorskip("expecttest")
    problem = draw(CHUNK, torch.device("cpu"), lengths=[37, 0, 3], K=8, V=8, state=False)
    arguments = [*problem.tensors.values(), problem.cu_seqlens]
    expecttest.assert_expected_inline(
        snapshot(Packed(), arguments, 4),
        """\
%0 = placeholder : float32[1, s0, 2, 8]
%1 = placeholder : float32[1, s0, 2, 8]
%2 = placeholder : float32[1, s0, 2, 8]
%3 = placeholder : float32[1, s0, 2, 8]
%4 = placeholder : int32[4]
%5 = flacompose.vector_decay_recurrent.default(%0, %1, %2, None, %3, None, None, %4, 1.0, False, False) : (float32[1, s0, 2, 8], float32[3, 2, 8, 8])
%6 = getitem(%5, 0) : float32[1, s0, 2, 8]
return %6""",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there compilation replaces the op by its kernels")
def test_graphs_of_training() -> None:
    """One forward op, one backward op; what is saved between them is the inputs."""
    expecttest = pytest.importorskip("expecttest")
    graphs: list[str] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(listing(module))
        return make_boxed_func(module.forward)

    compiled = torch.compile(chunk_gla, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=False)
    q, k, v, g = (
        x.requires_grad_() for x in draw(CHUNK, torch.device("cpu"), K=4, V=8, state=False).tensors.values()
    )
    o, _ = compiled(q, k, v, g)
    o.sum().backward()
    expecttest.assert_expected_inline(
        "\n\n".join(graphs),
        """\
%0 = placeholder : float32[2, 70, 2, 4]
%1 = placeholder : float32[2, 70, 2, 4]
%2 = placeholder : float32[2, 70, 2, 8]
%3 = placeholder : float32[2, 70, 2, 4]
%4 = flacompose.vector_decay_chunk.default(%0, %1, %2, %3, None, None, None, None, 0.5, False, False) : (float32[2, 70, 2, 8], float32[2, 2, 4, 8])
%5 = getitem(%4, 0) : float32[2, 70, 2, 8]
return %5, %0, %1, %2, %3

%0 = placeholder : float32[2, 70, 2, 4]
%1 = placeholder : float32[2, 70, 2, 4]
%2 = placeholder : float32[2, 70, 2, 8]
%3 = placeholder : float32[2, 70, 2, 4]
%4 = placeholder : float32[2, 70, 2, 8]
%5 = flacompose.vector_decay_backward.default(%0, %1, %2, %3, None, None, None, None, 0.5, False, False, %4, None) : (float32[2, 70, 2, 4], float32[2, 70, 2, 4], float32[2, 70, 2, 8], float32[2, 70, 2, 4], float32[0], float32[0], float32[0])
%6 = getitem(%5, 0) : float32[2, 70, 2, 4]
%7 = getitem(%5, 1) : float32[2, 70, 2, 4]
%8 = getitem(%5, 2) : float32[2, 70, 2, 8]
%9 = getitem(%5, 3) : float32[2, 70, 2, 4]
return %6, %7, %8, %9""",
    )
