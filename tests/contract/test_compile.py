"""torch.compile: no break, one graph for every length, values and gradients those of eager."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flacompose
from flacompose.ops import chunk_gla
from flacompose.ops._composed import logsumexp

from .accuracy import assert_close
from .cases import (
    CALLS_OF_OPERATORS,
    INDUCTOR,
    ONE_OP_A_GRAPH,
    SSD,
    OpCase,
    every,
    one_op_a_form,
    one_op_a_graph,
)
from .problems import Problem, Results, call, draw, evaluate

LENGTHS = [64, 2, 65, 165]
# On a GPU the compiler may build a kernel otherwise, and a few results then round the other way.
BFLOAT16 = 1e-4
one_graph = torch._dynamo.config.patch(error_on_recompile=True)


@pytest.fixture(autouse=True)
def few_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running logsumexp is traced for at most 256 tokens, so that its compilation is short."""
    monkeypatch.setattr(logsumexp, "LEVELS", 8)


def run(problem: Problem, function: Callable[..., tuple[Tensor, Tensor]]) -> Results:
    """`problem` through a function of a dictionary and ``cu_seqlens``."""
    return evaluate(problem, function=lambda problem, **tensors: function(tensors, problem.cu_seqlens))


def plain(case: OpCase) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(tensors: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return case.call(**tensors, output_final_state=True, cu_seqlens=cu_seqlens)

    return function


def layered(case: OpCase) -> Callable[..., tuple[Tensor, Tensor]]:
    """The op among PyTorch that the compiler fuses, and twice, the state carried from one to the other."""

    def function(tensors: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        gates = {name: F.logsigmoid(tensors[name] + 2) for name in case.gates}
        tensors = {**tensors, case.first: F.silu(tensors[case.first]), **gates}
        o, state = case.call(**tensors, output_final_state=True, cu_seqlens=cu_seqlens)
        tensors = {**tensors, case.output: (o.float() * 0.5).tanh().to(o.dtype), "initial_state": state}
        return case.call(**tensors, output_final_state=True, cu_seqlens=cu_seqlens)

    return function


def exactness(case: OpCase, device: torch.device) -> float:
    """On CUDA, Mamba-2's scan outside graphs has kernels of its own, which add up in another order."""
    return 2e-5 if case is SSD and device.type == "cuda" else 1e-6


@pytest.mark.parametrize(
    ("case", "B", "dynamic"),
    [(case, 1, True) for case in CALLS_OF_OPERATORS] + [(case, 2, None) for case in ONE_OP_A_GRAPH],
    ids=lambda x: x.name if isinstance(x, OpCase) else str(x),
)
@one_graph
def test_one_graph_for_every_length(case: OpCase, B: int, dynamic: bool | None, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(plain(case), backend=counter, fullgraph=True, dynamic=dynamic)
    for T in LENGTHS:
        problem = draw(case, device, B=B, T=T, seed=T)

        def marked(tensors: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
            if dynamic is None:
                for name, axes in case.axes.items():
                    if "T" in axes:
                        torch._dynamo.mark_dynamic(tensors[name], axes.index("T"))
            return compiled(tensors, cu_seqlens)

        assert_close(run(problem, marked), run(problem, plain(case)), exactness(case, device))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("case", "N"),
    [(case, 5) for case in CALLS_OF_OPERATORS] + [(case, 1) for case in ONE_OP_A_GRAPH],
    ids=lambda x: x.name if isinstance(x, OpCase) else str(x),
)
@one_graph
def test_one_graph_for_every_packing(case: OpCase, N: int, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(plain(case), backend=counter, fullgraph=True, dynamic=True)
    for T in LENGTHS:
        lengths = [T] if N == 1 else [T // 2, 0, T - T // 2 - 1, 0, 1]
        problem = draw(case, device, lengths=lengths, tail=T % 3, seed=T)
        assert_close(run(problem, compiled), run(problem, plain(case)), exactness(case, device))
    assert counter.frame_count == 1


@one_op_a_graph
@one_graph
def test_training_through_inductor(case: OpCase, device: torch.device) -> None:
    compiled = torch.compile(layered(case), fullgraph=True, dynamic=True)
    for T in LENGTHS:
        problem = draw(case, device, B=1, T=T, seed=T)
        assert_close(run(problem, compiled), run(problem, layered(case)), 1e-5)


# Packing changes the arguments of a call, and no code of Inductor's own. On a GPU the kernels are in its graph.
@every(INDUCTOR if torch.cuda.is_available() else INDUCTOR[:1])
@one_graph
def test_packed_training_through_inductor(case: OpCase, device: torch.device) -> None:
    compiled = torch.compile(layered(case), fullgraph=True, dynamic=True)
    for T in LENGTHS:
        problem = draw(case, device, lengths=[T // 2, 0, T - T // 2 - 1, 0, 1], tail=T % 3, seed=T)
        assert_close(run(problem, compiled), run(problem, layered(case)), 1e-5)


@one_op_a_graph
def test_static_inference_through_inductor(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, torch.bfloat16, T=65)
    compiled = torch.compile(plain(case), fullgraph=True)
    with torch.no_grad():
        names = ("o", "final_state")
        actual = dict(zip(names, compiled(problem.tensors, None), strict=True))
        bound = BFLOAT16 if device.type == "cuda" else 1e-6
        assert_close(actual, dict(zip(names, call(problem), strict=True)), bound)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
@one_op_a_form
@pytest.mark.parametrize("T", [1, 65])
def test_cuda_graphs(case: OpCase, T: int, device: torch.device) -> None:
    """Replayed on fresh inputs and a state that changes, none of the outputs is of an earlier replay."""
    compiled = torch.compile(plain(case), fullgraph=True, mode="reduce-overhead")
    expected = actual = draw(case, device, torch.bfloat16, T=T).tensors["initial_state"]
    with torch.no_grad():
        for seed in range(6):
            tensors = draw(case, device, torch.bfloat16, T=T, seed=seed).tensors
            torch.compiler.cudagraph_mark_step_begin()
            o, state = compiled({**tensors, "initial_state": actual}, None)
            results = {"o": o.clone(), "final_state": state.clone()}
            o, expected = plain(case)({**tensors, "initial_state": expected}, None)
            assert_close(results, {"o": o, "final_state": expected}, BFLOAT16)
            actual = results["final_state"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
@one_op_a_form
def test_training_with_cuda_graphs(case: OpCase, device: torch.device) -> None:
    compiled = torch.compile(layered(case), fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        problem = draw(case, device, T=65, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(run(problem, compiled), run(problem, layered(case)), 1e-5)


@pytest.mark.parametrize("changes", [{"v": torch.ones(2, 5, 1, 4)}, {"output_final_state": "yes"}], ids=list)
def test_errors_begin_with_their_text(changes: dict[str, object]) -> None:
    """With the numbers of the call, not with symbols. Where breaks of the graph are allowed, it is the error itself."""
    q, k, v, g = torch.randn(4, 2, 5, 3, 4)
    arguments = {"q": q, "k": k, "v": v, "g": -g.abs(), **changes}
    with pytest.raises((TypeError, ValueError)) as plain:
        chunk_gla(**arguments)
    with pytest.raises(torch._dynamo.exc.Unsupported) as reported:
        torch.compile(chunk_gla, fullgraph=True, dynamic=True, backend="eager")(**arguments)
    assert str(reported.value).startswith(f"{plain.type.__name__}: {plain.value}\n")
    with pytest.raises(plain.type, match=f"^{re.escape(str(plain.value))}$"):
        torch.compile(chunk_gla, dynamic=True, backend="eager")(**arguments)


def test_every_file_raises_errors_that_are_reported_so() -> None:
    """Every file of ops, layers and models whose errors users see imports them from `_errors`.

    The errors of a state are made anew by the layer, and nobody compiles the reading of files.
    """
    others = "state.py", "hub_mixin.py", "weights.py"
    package = Path(flacompose.__file__).parent
    for folder in ("ops", "layers", "models"):
        for file in {*(package / folder).glob("*.py")} - {package / folder / "__init__.py"}:
            raised = {x for x in ("TypeError", "ValueError") if f"raise {x}(" in file.read_text()}
            module = importlib.import_module(f"flacompose.{folder}.{file.stem}")
            assert raised <= vars(module).keys() or file.name in others, (
                f"{file} raises Python's own {raised}"
            )
