"""One token of gated slot attention is one operator, the same function as the two calls it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from contract.accuracy import FIXED, assert_accurate, assert_close, assert_equal
from contract.cases import NAMED, OpCase, every
from contract.graphs import op_nodes, recorded
from contract.problems import Problem, call, call_named, draw, evaluate, named, permuted
from contract.test_transforms import draw_again, exact, loss, of_inputs, opcheck
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.export import Dim, export
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from flacompose.ops import chunk_gsa, fused_recurrent_gsa, gsa

TOKEN, RECURRENT = "flacompose::slot_attention_token", "flacompose::matrix_recurrence_recurrent"
CASES = [
    replace(NAMED["chunk_gsa"], name="gated", function=fused_recurrent_gsa),
    replace(NAMED["fused_recurrent_gsa-grouped"], name="grouped"),
    replace(NAMED["chunk_abc"], name="without gates", function=fused_recurrent_gsa),
]
each = every(CASES)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


def small(case: OpCase, device: torch.device) -> Problem:
    return draw(case, device, torch.float64, B=2, T=1, H=1, K=2, V=3, M=3)


def by_two_calls(
    problem: Problem, run: Callable[..., tuple[Tensor, Tensor]] = call, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """The function in two calls, as it is computed where a graph does not know that there is one token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gsa, "always_true", lambda _: False)
        return run(problem, **tensors)


def called(problem: Problem, **options) -> list[str]:
    with recorded() as calls:
        problem.case.function(
            **{x: y for x, y in problem.tensors.items() if x != "initial_state"},
            cu_seqlens=problem.cu_seqlens,
            **options,
        )
    return [op.name() for op, _, _ in calls]


@each
def test_one_operator(case: OpCase, device: torch.device) -> None:
    drawn = partial(draw, case, device, H=1)
    with recorded() as calls:
        evaluate(drawn(T=1))
    assert [op.name() for op, _, _ in calls] == [TOKEN, "flacompose::slot_attention_backward"]
    assert called(drawn(T=1, K=512, V=512), output_states=1) == [TOKEN]
    assert called(drawn(T=2)) == [RECURRENT] * 2
    assert called(drawn(lengths=[1])) == [RECURRENT] * 2
    assert called(drawn(T=1, K=513)) == [RECURRENT] * 3
    assert called(drawn(T=1, V=513)) == [RECURRENT] * 3
    chunk = replace(case, function=chunk_gsa)
    assert called(draw(chunk, device, T=1)) == ["flacompose::matrix_recurrence_chunk"] * 2


@each
@each_dtype
@pytest.mark.parametrize("state", [True, False], ids=["a state", "nothing"])
@pytest.mark.parametrize(
    ("K", "M", "V"), [(16, 12, 32), (20, 64, 300), (300, 16, 20), (64, 300, 64), (512, 512, 512)]
)
def test_values_and_gradients(
    case: OpCase, dtype: torch.dtype, K: int, M: int, V: int, state: bool, device: torch.device
) -> None:
    """Those of the reference. Gradients are those of two calls to the bit, and on a CPU all is."""
    problem = draw(case, device, dtype, T=1, K=K, M=M, V=V, state=state, gates="rare")
    found = evaluate(problem)
    assert_accurate(problem, found)
    expected = evaluate(problem, function=by_two_calls)
    if device.type == "cuda":
        assert_close({"o": found.pop("o")}, {"o": expected.pop("o")}, bound_of_two(dtype))
    assert_equal(found, expected)


def bound_of_two(dtype: torch.dtype) -> float:
    """Two results that are each within the bounds of the truth, or off by one rounding more."""
    return {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 2 * FIXED[torch.float32][0])


@each
def test_one_of_everything(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, B=1, T=1, H=1, K=1, M=1, V=1)
    assert_accurate(problem, evaluate(problem))


@each
@pytest.mark.parametrize("gates", [0.0, -1e-6, -30.0, -1e4, "mixed", "rare"])
def test_gates(case: OpCase, gates: str | float, device: torch.device) -> None:
    problem = draw(case, device, T=1, K=40, V=70, M=70, gates=gates)
    assert_accurate(problem, evaluate(problem))


@each
@pytest.mark.parametrize("wanted", ["o", "state", "both"])
def test_gradients_of_one_result(case: OpCase, wanted: str, device: torch.device) -> None:
    """And those that nobody wants are empty."""
    problem = draw(case, device, T=1)
    assert_accurate(problem, evaluate(problem, wanted), wanted)
    everything = evaluate(problem, wanted)
    for name in problem.tensors:

        def one(problem: Problem, name: str = name, **tensors: Tensor) -> tuple[Tensor, Tensor]:
            return call(problem, **{x: y if x == name else y.detach() for x, y in tensors.items()})

        with recorded() as calls:
            found = evaluate(problem, wanted, one)
        assert torch.equal(found[f"d{name}"], everything[f"d{name}"])
        for op, args, outputs in calls:
            if op.name().endswith("token_backward"):
                assert [dx.shape != (0,) for dx in outputs] == args[-1]


@each
@pytest.mark.parametrize("part", [0, 1])
def test_part_of_a_state(
    case: OpCase, part: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss on one state alone: what only the other depends on gets zeros, where two calls know no gradient."""
    tensors = {name: x.requires_grad_() for name, x in named(draw(case, device, T=1)).items()}
    results = []
    for one_call in (True, False):
        if not one_call:
            monkeypatch.setattr(gsa, "always_true", lambda _: False)
        with recorded() as calls:
            _, states = call_named(case, **tensors, output_final_state=True)
            found = torch.autograd.grad(states[part].sin().sum(), list(tensors.values()), allow_unused=True)
        if one_call:
            (_, args, outputs) = calls[-1]
            assert [dx.shape for dx in outputs] == [x.shape for x in args[:7]]
        results.append([torch.zeros_like(x) if dx is None else dx for x, dx in zip(tensors.values(), found)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@each
@pytest.mark.parametrize("layout", [Tensor.contiguous, permuted])
def test_fakes_match(case: OpCase, layout: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """In shape, dtype and strides, and no result is a part of another or of an input."""
    for sizes in ({}, {"B": 1, "H": 1}):
        problem = draw(case, device, torch.bfloat16, T=1, state_dtype=torch.float16, **sizes)
        moved = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
        with recorded() as calls:
            evaluate(moved)
        assert len(calls) == 2
        for op, args, outputs in calls:
            fakes = op(*(x.to("meta") if isinstance(x, Tensor) else x for x in args))
            for real, fake in zip(outputs, fakes, strict=True):
                assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
                assert not real._is_view()
            given = [x for x in (*args, *outputs) if isinstance(x, Tensor) and x.numel()]
            places = {x.untyped_storage().data_ptr() for x in outputs if x.numel()}
            assert len(places) == sum(x.numel() > 0 for x in outputs)
            assert sum(x.untyped_storage().data_ptr() in places for x in given) == len(places)


@each
@pytest.mark.parametrize("layout", [Tensor.contiguous, permuted])
def test_opcheck(case: OpCase, layout: Callable[[Tensor], Tensor], device: torch.device) -> None:
    problem = draw(case, device, T=1, K=4, V=3, M=5)
    problem = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
    with recorded() as calls:
        evaluate(problem)
    for op, args, _ in calls:
        opcheck(op, args)


@each
def test_derivatives(case: OpCase, device: torch.device) -> None:
    """Of both orders, forwards and backwards."""
    problem = small(case, device)
    function, inputs = of_inputs(problem, call), [x.requires_grad_() for x in problem.tensors.values()]
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@each
def test_functions_of_functions(case: OpCase, device: torch.device) -> None:
    problem = small(case, device)
    op, truth = of_inputs(problem, call), of_inputs(problem, by_two_calls)
    inputs = tuple(problem.tensors.values())
    every_input = tuple(range(len(inputs)))
    slope = [grad(partial(loss, function), every_input) for function in (op, truth)]
    exact(slope[0](*inputs), slope[1](*inputs))
    arriving = problem.do, problem.d_final_state
    exact(vjp(op, *inputs)[1](arriving), vjp(truth, *inputs)[1](arriving))
    tangents = tuple(torch.randn_like(x) for x in inputs)
    exact(jvp(op, inputs, tangents), jvp(truth, inputs, tangents))
    exact(jvp(slope[0], inputs, tangents), jvp(slope[1], inputs, tangents))
    exact(jacrev(op, every_input)(*inputs), jacrev(truth, every_input)(*inputs))
    for mapped in (None, *range(len(inputs))):
        in_dims = tuple(0 if mapped in (None, i) else None for i in every_input)
        many = [tuple(draw_again(problem, seed).tensors.values()) for seed in range(3)]
        stacked = [torch.stack(x) if dim == 0 else x[0] for x, dim in zip(zip(*many), in_dims)]
        rows = [[x if dim is None else x[i] for x, dim in zip(stacked, in_dims)] for i in range(3)]
        for one, other in ((op, truth), slope):
            expected = [other(*row) for row in rows]
            exact(vmap(one, in_dims)(*stacked), tuple(torch.stack(x) for x in zip(*expected)))


@each
@pytest.mark.parametrize("backward", [False, True])
def test_flops(case: OpCase, backward: bool, device: torch.device) -> None:
    """As many as those of two calls."""
    problem = draw(case, device, T=1)
    counts = []
    for function in (call, by_two_calls):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            evaluate(problem, function=function) if backward else function(problem)
        found = counter.get_flop_counts()["Global"]
        counts.append(sum(n for op, n in found.items() if "flacompose" in str(op)))
    assert counts[0] == counts[1] > 0


@each
def test_autocast(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=1)
    with torch.autocast(device.type, torch.bfloat16):
        found, expected = (evaluate(problem, function=f) for f in (call, by_two_calls))
    assert found["o"].dtype == torch.bfloat16 and found["final_state"].dtype == torch.float32
    if device.type == "cuda":
        assert_close({"o": found.pop("o")}, {"o": expected.pop("o")}, bound_of_two(torch.bfloat16))
    assert_equal(found, expected)


def flat(case: OpCase) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    return lambda tensors: case.call(**tensors, output_final_state=True)


class Model(torch.nn.Module):
    def __init__(self, case: OpCase) -> None:
        super().__init__()
        self.case = case

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.case.call(**tensors, output_final_state=True)


@each
def test_compiled(case: OpCase, device: torch.device) -> None:
    """One token has a graph of its own with one node, and all other lengths have another, with two."""
    graphs = EagerAndRecordGraphs()
    counter = CompileCounterWithBackend(graphs)
    compiled = torch.compile(flat(case), backend=counter, fullgraph=True, dynamic=True)
    for T in (5, 1, 2, 64, 1, 7):
        problem = draw(case, device, T=T, seed=T)
        assert_equal(evaluate(problem, function=lambda _, **x: compiled(x)), evaluate(problem))
    assert [op_nodes(graph) for graph in graphs.graphs] == [[RECURRENT] * 2, [TOKEN]]


@each
@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_for_training(case: OpCase, dynamic: bool, device: torch.device) -> None:
    """At any batch size, with a state that is carried from one token to the next; through Inductor one case on a CPU.

    To Inductor an op is a call of no known code.
    """

    def two_tokens(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        o, state = case.call(**tensors, output_final_state=True)
        q = tensors["q"] * o.mean(-1, keepdim=True).tanh()
        return case.call(**{**tensors, "q": q, "initial_state": state}, output_final_state=True)

    backend = "inductor" if (case.name == "gated" and dynamic) or device.type == "cuda" else "eager"
    compiled = torch.compile(two_tokens, fullgraph=True, dynamic=dynamic, backend=backend)
    for B in (3, 2):
        problem = draw(case, device, B=B, T=1)
        found, expected = (
            evaluate(problem, function=lambda _, f=f, **x: f(x)) for f in (compiled, two_tokens)
        )
        assert_close(found, expected, 1e-5)


@each
def test_decoding_through_inductor(case: OpCase, device: torch.device) -> None:
    """Token by token, on a GPU replayed as a CUDA graph: the kernel in the graph gives what the operator does."""
    mode = "reduce-overhead" if device.type == "cuda" else None
    compiled = torch.compile(flat(case), fullgraph=True, mode=mode)
    expected = actual = draw(case, device, torch.bfloat16, T=1).tensors["initial_state"]
    with torch.no_grad():
        for seed in range(4):
            tensors = draw(case, device, torch.bfloat16, T=1, seed=seed).tensors
            torch.compiler.cudagraph_mark_step_begin()
            o, actual = (x.clone() for x in compiled({**tensors, "initial_state": actual}))
            o_expected, expected = flat(case)({**tensors, "initial_state": expected})
            assert_close({"o": o}, {"o": o_expected}, bound_of_two(torch.bfloat16))
            assert_close({"state": actual}, {"state": expected}, 1e-5)


@each
@pytest.mark.parametrize("autocast", [False, True])
def test_exported(case: OpCase, autocast: bool, device: torch.device) -> None:
    problem = draw(case, device, T=1)
    shapes = {name: {0: Dim("B", min=1, max=64)} for name in problem.tensors}
    program = export(Model(case), (problem.tensors,), dynamic_shapes=(shapes,))
    assert op_nodes(program.graph_module) == op_nodes(program.run_decompositions().graph_module) == [TOKEN]
    for B in (1, 5):
        tensors = draw(case, device, B=B, T=1).tensors
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            found, expected = program.module()(tensors), flat(case)(tensors)
        if autocast and "s" in case.gates:  # the node casts what is made of logits, too
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        else:
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@each
def test_exported_at_any_length(case: OpCase, device: torch.device) -> None:
    """A program for every length has no guard on a single token, and is right for one."""
    T = Dim("T", min=1, max=2**20)
    problem = draw(case, device, T=5)
    shapes = {name: {1: T} if "T" in case.axes[name] else {} for name in problem.tensors}
    program = export(Model(case), (problem.tensors,), dynamic_shapes=(shapes,))
    assert op_nodes(program.graph_module) == [RECURRENT] * 2
    for T in (1, 2, 65):
        tensors = draw(case, device, T=T).tensors
        found, expected = program.module()(tensors), flat(case)(tensors)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
