"""torch.export and AOTInductor: one node, exact at lengths that were not traced."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule

from .accuracy import assert_close, assert_equal
from .cases import CALLS_OF_OPERATORS, DISTINCT, INDUCTOR, OPERATORS, OpCase, each_call_of_operators, each_op
from .graphs import op_arguments, op_nodes, other_ops
from .problems import Problem, Results, call, draw

ROOT = Path(__file__).parents[2]
LENGTHS = [2, 3, 63, 64, 65, 165, 2048]
T = Dim("T", min=2, max=2**20)
B = Dim("B", min=1, max=64)
# Not "N", which is a function to sympy.
N = Dim("sequences", min=1, max=1024)


class Op(nn.Module):
    def __init__(self, case: OpCase) -> None:
        super().__init__()
        self.case = case

    def forward(
        self, tensors: dict[str, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.case.call(**tensors, output_final_state=True, cu_seqlens=cu_seqlens)


def dynamic(problem: Problem, **dims: Dim) -> dict[str, dict[int, Dim]]:
    """The named axes of every input."""
    axes = problem.case.axes
    return {
        name: {i: dims[axis] for i, axis in enumerate(axes[name]) if axis in dims} for name in problem.tensors
    }


def exported(problem: Problem, cu_dims: dict[int, Dim] | None = None, **dims: Dim) -> ExportedProgram:
    shapes = {"tensors": dynamic(problem, **dims), "cu_seqlens": cu_dims}
    return export(Op(problem.case), (problem.tensors, problem.cu_seqlens), dynamic_shapes=shapes)


def results(output: tuple[Tensor, Tensor]) -> Results:
    return dict(zip(("o", "final_state"), output, strict=True))


def nodes(case: OpCase) -> list[str]:
    return [f"flacompose::{name}" for name in case.ops]


def packed(case: OpCase, device: torch.device, n: int, length: int = 70, **options) -> Problem:
    lengths = [length] if n == 1 else [length // 2, 0, length - length // 2 - 1, *[0] * (n - 4), 1]
    return draw(case, device, lengths=lengths, tail=length % 3, seed=length, **options)


def check_node(module: GraphModule, problem: Problem) -> None:
    """Inputs that are given are arguments of the node, others leave nothing, and nothing is copied before or after."""
    case = problem.case
    assert op_nodes(module) == nodes(case)
    if case.other_ops is not None and (
        case.nodes == 1 or ("initial_state" not in problem.tensors and problem.cu_seqlens is None)
    ):
        assert other_ops(module) == list(case.other_ops)
    # The parts of a state that is a tuple have names of their own in a graph.
    if len(case.ops) != 1 or case.prepared or len(case.states) > 1:
        return
    made_of: dict[str, set[str]] = {}
    for name in [*problem.tensors, *([] if problem.cu_seqlens is None else ["cu_seqlens"])]:
        # A graph has the names of its inputs in small letters.
        made_of.setdefault(case.operands.get(name, name), set()).add(name.lower())
    node, arguments = op_arguments(module)
    assert {name: x for name, x in arguments.items() if isinstance(x, set) and x} == made_of
    if case.scaled:
        assert arguments["scale"] == problem.first.shape[-1] ** -0.5
    o, state = node.meta["val"]
    assert (o.dtype, o.shape[2:]) == (problem.do.dtype, problem.do.shape[2:])
    assert (state.dtype, state.shape[1:]) == (problem.d_final_state.dtype, problem.d_final_state.shape[1:])


@each_op
def test_one_node_at_every_length(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=37)
    program = exported(problem, T=T, B=B, N=B)
    decomposed = program.run_decompositions()
    assert op_nodes(program.graph_module) == nodes(case)
    check_node(decomposed.graph_module, problem)
    forms = [program.module(), decomposed.module()]
    if case in CALLS_OF_OPERATORS:
        longer = exported(draw(case, device, T=2048), T=T, B=B, N=B)
        assert len(longer.graph.nodes) == len(program.graph.nodes)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        forms.append(torch.export.load(file).module())
    for length, batch in zip(LENGTHS, [1, 2, 1, 3, 1, 2, 1], strict=True):
        problem = draw(case, device, B=batch, T=length, seed=length)
        expected = results(call(problem))
        for form in forms:
            actual = results(form(problem.tensors, None))
            # What softplus is decomposed to may differ from it in the last bit.
            if form is forms[1] and (case.before or case.softplus):
                assert_close(actual, expected, 1e-5)
            else:
                assert_equal(actual, expected)


@each_call_of_operators
def test_an_absent_state_leaves_nothing(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=37, state=False)
    check_node(exported(problem, T=T).run_decompositions().graph_module, problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there compilation replaces the op by its kernels")
@each_op
def test_graphs_of_training(case: OpCase) -> None:
    """One forward op and one backward op for each node; what is saved between them is the inputs."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: list[Tensor]):
        graphs.append(module)
        return make_boxed_func(module.forward)

    compiled = torch.compile(Op(case), backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=False)
    problem = draw(case, torch.device("cpu"))
    leaves = {name: x.requires_grad_() for name, x in problem.tensors.items()}
    torch.autograd.backward(compiled(leaves), (problem.do, problem.d_final_state))
    forward, backward = graphs
    assert op_nodes(forward) == nodes(case)
    assert op_nodes(backward) == [f"flacompose::{name}" for name in case.backward_ops]
    if case.other_ops == ():
        saved = forward.graph.output_node().args[0][2:]
        assert {x for x in saved if x.op == "placeholder"} == {*forward.graph.find_nodes(op="placeholder")}
        assert other_ops(forward) == other_ops(backward) == []


@pytest.mark.parametrize(
    ("case", "any_number"),
    [(case, True) for case in CALLS_OF_OPERATORS if case in DISTINCT]
    + [(case, False) for case in OPERATORS.values()],
    ids=lambda x: x.name if isinstance(x, OpCase) else "any number" if x else "one",
)
def test_packed(case: OpCase, any_number: bool, device: torch.device) -> None:
    """One sequence, or as many as there are, at every length."""
    traced = packed(case, device, 7 if any_number else 1)
    program = exported(traced, {0: N + 1}, T=T, N=N) if any_number else exported(traced, T=T)
    check_node(program.run_decompositions().graph_module, traced)
    module = program.module()
    for i, length in enumerate(LENGTHS):
        problem = packed(case, device, (1, 5, 20)[i % 3] if any_number else 1, length)
        assert_equal(results(module(problem.tensors, problem.cu_seqlens)), results(call(problem)))


class Calls(nn.Module):
    """A dense and two packed calls of each of several ops in one program, so that one compilation proves them."""

    def __init__(self, cases: list[OpCase]) -> None:
        super().__init__()
        self.ops = [Op(case) for case in cases]

    def forward(
        self, calls: list[tuple[dict[str, Tensor], Tensor | None]]
    ) -> list[tuple[Tensor, Tensor | None]]:
        return [op(*call) for op, three in zip(self.ops, calls, strict=True) for call in three]


# On a GPU each op is a program of its own, whose failures have nothing to do with those of others.
PROGRAMS = [[case] for case in INDUCTOR] if torch.cuda.is_available() else [[*OPERATORS.values()]]


@pytest.mark.parametrize("cases", PROGRAMS, ids=lambda cases: cases[0].name if len(cases) == 1 else "all")
@pytest.mark.usefixtures("aoti_packages_load")
def test_aotinductor(cases: list[OpCase], device: torch.device, tmp_path: Path) -> None:
    def three(case: OpCase, length: int, batch: int) -> tuple[Problem, Problem, Problem]:
        dense = draw(case, device, B=batch, T=length, seed=length)
        return dense, packed(case, device, 1, length), packed(case, device, 5, length)

    def arguments(length: int, batch: int) -> list[list[tuple]]:
        return [[(p.tensors, p.cu_seqlens) for p in three(case, length, batch)] for case in cases]

    lengths = [Dim(f"T{i}", min=2, max=2**20) for i in range(3)]
    shapes = [
        [
            (dynamic(problem, T=length, **({} if problem.cu_seqlens is not None else {"B": B, "N": B})), None)
            for problem, length in zip(three(case, 37, 2), lengths, strict=True)
        ]
        for case in cases
    ]
    with torch.no_grad():
        program = export(Calls(cases), (arguments(37, 2),), dynamic_shapes=(shapes,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "op.pt2"))
        runner = torch._inductor.aoti_load_package(path)
        for length, batch in ((2, 1), (3, 3), (63, 1), (64, 3), (65, 1), (165, 3), (2048, 1)):
            outputs = runner(given := arguments(length, batch))
            problems = [problem for case in cases for problem in three(case, length, batch)]
            for problem, output in zip(problems, outputs, strict=True):
                assert_close(results(output), results(call(problem)), 1e-6)
    if cases[0].name == "chunk_gla":
        saved = tmp_path / "call.pt"
        torch.save((given, [x.clone() for output in outputs for x in output]), saved)
        command = [sys.executable, "-c", ELSEWHERE, path, str(saved)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, run.stderr


# What another process needs to run a package: it imports the library, which registers the operators.
ELSEWHERE = """
import sys, torch, flacompose.ops
arguments, expected = torch.load(sys.argv[2])
outputs = torch._inductor.aoti_load_package(sys.argv[1])(arguments)
for x, y in zip((x for output in outputs for x in output), expected, strict=True):
    torch.testing.assert_close(x, y)
"""
