"""The states after each of the last tokens are those of shorter calls, in every form that gives them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
import torch._dynamo
from helpers.operators import operator
from helpers.ranks import BATCH, HEADS, check_sharded, on_two_ranks, placement
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim, export
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_leaves

from flacompose.ops._composed import logsumexp

from .accuracy import FIXED, VALUES, assert_close, error
from .cases import OpCase, every
from .graphs import op_nodes, recorded
from .problems import Problem, Results, call, call_named, draw, evaluate, named, permuted
from .states import COMPILED, FEW, by_calls, drawn, each, few, few_compiled, states_of, with_states


@each
@pytest.mark.parametrize(("T", "n"), [(1, 1), (7, 1), (7, 3), (7, 7), (80, 16)])
@pytest.mark.parametrize("state", [True, False], ids=["a state", "nothing"])
def test_states_are_those_of_shorter_calls(
    case: OpCase, T: int, n: int, state: bool, device: torch.device
) -> None:
    problem = drawn(case, device, n, T=T, state=state, gates="rare")
    actual = dict(zip(VALUES, with_states(problem, n=n), strict=True))
    expected = dict(zip(VALUES, by_calls(problem, n=n), strict=True))
    # Where the CPU computes a call in chunks, the calls have other chunks: each is within the bound of its truth.
    assert_close(actual, expected, 2 * FIXED[torch.float32][0])
    assert actual["final_state"].is_contiguous()
    # The first state is that of a shorter call by the same arithmetic, and so are all where one kernel walks along. A
    # running logsumexp is PyTorch, whose kernels on a GPU may depend on the length, as a sigmoid's do everywhere.
    same = 0 if case.before else 1 if device.type == "cpu" else 0 if "initial_state[2]" in case.states else n
    assert torch.equal(actual["final_state"][:, :same], expected["final_state"][:, :same])


@each
def test_states_of_single_tokens(case: OpCase, device: torch.device) -> None:
    """Where every token's state is wanted, the arithmetic is that of one call for each token, to the bit.

    But for a running logsumexp, which is float64 within a call and float32 between two.
    """
    exact = "initial_state[2]" not in case.states
    problem = draw(case, device, T=5)
    o, states = with_states(problem, n=5)
    state = problem.tensors["initial_state"]
    for t in range(5):
        token = case.at(slice(t, t + 1), problem.tensors, "T") | {"initial_state": state}
        o_t, state = call(replace(problem, tensors=token))
        assert torch.equal(states[:, t], state) if exact else error(states[:, t], state) <= 1e-6
        if device.type == "cpu" and exact:
            assert torch.equal(o[:, t : t + 1], o_t)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """States have the dtype of a final state, and are not rounded on their way from token to token."""
    problem = draw(case, device, dtype, T=6)
    actual, expected = with_states(problem, n=3), by_calls(problem, n=3)
    for x, y in zip(actual, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        # One rounding of a number that float32 sums have in another order: bfloat16 has 8 bits.
        assert error(x, y) <= (2**-8 if x.dtype == dtype else 1e-5)


@each
@pytest.mark.parametrize("loss", ["o", "state", "both"])
@pytest.mark.parametrize("state", [True, False], ids=["a state", "nothing"])
def test_gradients(case: OpCase, loss: str, state: bool, device: torch.device) -> None:
    problem = drawn(case, device, 3, torch.float64, T=5, K=3, V=4, state=state)
    actual = evaluate(problem, loss, partial(with_states, n=3))
    assert_close(actual, evaluate(problem, loss, partial(by_calls, n=3)), 1e-10)


@few
def test_derivatives_with_respect_to_one_input(case: OpCase, device: torch.device) -> None:
    """Forward over reverse, for each input by itself, also for those that no state depends on."""
    problem = drawn(case, device, 2, torch.float64, B=1, T=3, H=1, K=2, V=2)
    for name, x in problem.tensors.items():

        def loss(
            x: Tensor, name: str = name, form: Callable[..., tuple[Tensor, Tensor]] = with_states
        ) -> Tensor:
            return sum((y**3).sum() for y in form(problem.with_tensors(**{name: x}), n=2))

        found = jvp(grad(loss), (x,), (torch.ones_like(x),))
        expected = jvp(grad(partial(loss, form=by_calls)), (x,), (torch.ones_like(x),))
        for y, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(y, exact, rtol=1e-9, atol=1e-9)


@few
def test_gradcheck(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, torch.float64, B=1, T=3, H=1, K=2, V=2, M=2, W=2)
    names = [*problem.tensors]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return with_states(problem, n=2, **dict(zip(names, inputs, strict=True)))

    leaves = [x.requires_grad_() for x in problem.tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@every([case for case in FEW if case.form == "recurrent" and case.nodes == 1])
def test_gradients_that_are_not_wanted_are_empty(case: OpCase, device: torch.device) -> None:
    problem = drawn(case, device, 2, T=5)
    with recorded() as calls:
        evaluate(problem, function=lambda p, **x: with_states(p, n=2, **{case.first: x[case.first]}))
    backward = [(op, out) for op, _, out in calls if op.name().endswith("_backward")]
    assert (
        len(backward) == 2
    )  # one for the tokens up to each state, of which the second begins at the first state
    for (op, out), state in zip(backward, (["d_initial_state"], []), strict=True):
        returned = [value.name for value in op._schema.returns]
        filled = [name for name, x in zip(returned, out, strict=True) if x.numel() > 0]
        assert filled == [f"d{case.operands.get(case.first, case.first)}", *state]


@each
def test_errors(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, B=1, T=5)

    def check(kind: type[Exception], message: str, n: object, **options: object) -> None:
        with pytest.raises(kind, match=message), recorded() as calls:
            case.function(**{**inputs, **options}, output_states=n)
        assert not calls

    inputs = {name: x for name, x in problem.tensors.items() if name != "initial_state"}
    check(ValueError, "output_states must be from 1 to 16, got 0", 0)
    check(ValueError, "output_states must be from 1 to 16, got -1", -1)
    check(ValueError, "output_states must be from 1 to 16, got 17", 17)
    check(ValueError, "output_states must be at most the number of tokens T = 5, got 6", 6)
    check(TypeError, "output_states must be an int, got float", 2.0)
    check(TypeError, "output_states must be an int, got bool", True)
    check(TypeError, "output_states must be an int, got Tensor", torch.tensor(2))
    cu_seqlens = torch.tensor([0, 5], device=device)
    check(ValueError, "output_states must not be given with cu_seqlens, whose", 2, cu_seqlens=cu_seqlens)
    check(TypeError, f"{case.first} must be a tensor, got NoneType", 2, **{case.first: None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        nested = torch.nested.nested_tensor([*inputs[case.first]])
    check(TypeError, f"{case.first} must be a dense tensor, got a nested one", 2, **{case.first: nested})
    for x, y in zip(*(case.function(**inputs, output_states=n) for n in (2, numpy.int64(2))), strict=True):
        assert all(map(torch.equal, tree_leaves(x), tree_leaves(y)))


@each
def test_layouts(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    other = problem.with_tensors(**{name: permuted(x) for name, x in problem.tensors.items()})
    for x, y in zip(with_states(problem, n=3), with_states(other, n=3), strict=True):
        assert error(y, x) <= 1e-6


# The compiler


@pytest.fixture
def few_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running logsumexp is traced for at most 256 tokens, so that its compilation is short."""
    monkeypatch.setattr(logsumexp, "LEVELS", 8)


def of_tensors(case: OpCase, n: int) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    return lambda tensors: states_of(case, tensors, n, {})


@few_compiled
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_graph_for_every_length(case: OpCase, device: torch.device, few_levels: None) -> None:
    """Training too: the gradient has nodes for each state, as many at every length."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(of_tensors(case, 3), backend=counter, fullgraph=True, dynamic=True)

    def run(problem: Problem, function: Callable[..., tuple[Tensor, Tensor]]) -> Results:
        return evaluate(problem, function=lambda problem, **tensors: function(tensors))

    for T in (5, 4, 17, 70):
        problem = drawn(case, device, 3, B=1, T=T, seed=T)
        assert_close(run(problem, compiled), run(problem, of_tensors(case, 3)), 1e-6)
    assert counter.frame_count == 1


# To Inductor an op is a call of no known code: it is enough to see one, and PyTorch's own operations.
@every([case for case in COMPILED if "kda" in case.name or case.form == "forward"])
def test_inductor(case: OpCase, device: torch.device, few_levels: None) -> None:
    problem = draw(case, device, T=5)
    compiled = torch.compile(of_tensors(case, 3), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for x, y in zip(compiled(problem.tensors), with_states(problem, n=3), strict=True):
            assert error(x, y) <= 1e-5


class Op(nn.Module):
    def __init__(self, case: OpCase) -> None:
        super().__init__()
        self.case = case

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return states_of(self.case, tensors, 3, {})


@few_compiled
def test_export(case: OpCase, device: torch.device, few_levels: None) -> None:
    """One node at every length, and in a file."""
    problem = draw(case, device, T=37)
    dims = {"T": Dim("T", min=3, max=2**logsumexp.LEVELS), "B": Dim("B", min=1, max=64)}
    dims["N"] = dims["B"]
    shapes = {
        name: {i: dims[axis] for i, axis in enumerate(case.axes[name]) if axis in dims}
        for name in problem.tensors
    }
    program = export(Op(case), (problem.tensors,), dynamic_shapes={"tensors": shapes})
    form = case.forward if case.form == "forward" else f"{operator(case.recurrence)}_steps"
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for form_of_it in (program, program.run_decompositions(), torch.export.load(file)):
        assert op_nodes(form_of_it.graph_module) == [
            f"flacompose::{name}" for name in (*case.before, *[form] * case.nodes)
        ]
        for T, B in ((3, 1), (5, 2), (70, 3)):
            problem = draw(case, device, B=B, T=T)
            actual = form_of_it.module()(problem.tensors)
            for x, y in zip(actual, with_states(problem, n=3), strict=True):
                assert torch.equal(x, y)


@few
def test_vmap(case: OpCase, device: torch.device) -> None:
    problems = [draw(case, device, torch.float64, T=4, K=3, V=4, seed=seed) for seed in range(3)]
    names = [*problems[0].tensors]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return with_states(problems[0], n=2, **dict(zip(names, inputs, strict=True)))

    stacked = [torch.stack([p.tensors[name] for p in problems]) for name in names]
    for mapped in ("all", case.first):
        in_dims = tuple(0 if mapped in ("all", name) else None for name in names)
        inputs = [x if dim == 0 else x[0] for x, dim in zip(stacked, in_dims, strict=True)]
        rows = [[x[i] if dim == 0 else x for x, dim in zip(inputs, in_dims, strict=True)] for i in range(3)]
        expected = [torch.stack(x) for x in zip(*(function(*row) for row in rows), strict=True)]
        for x, y in zip(vmap(function, in_dims)(*inputs), expected, strict=True):
            assert error(x, y) <= 1e-10


@each
def test_autocast(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    with torch.autocast(device.type, torch.bfloat16):
        actual, expected = with_states(problem, n=2), by_calls(problem, n=2)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert error(x, y) <= (2**-8 if x.dtype == torch.bfloat16 else 1e-5)


@every([case for case in COMPILED if case.nodes == 1])
def test_opcheck(case: OpCase, device: torch.device) -> None:
    problem = drawn(case, device, 2, T=5)
    with recorded() as calls:
        evaluate(problem, function=partial(with_states, n=2))
    # One call, and for its gradient two of a form and two of its backward; the convolution's states are PyTorch.
    assert len(calls) == (2 if case.form == "forward" else 5)
    for op, args, _ in calls:
        if not op.name().endswith("backward"):
            args = [
                x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in args
            ]
        else:
            args = [x.detach() if isinstance(x, Tensor) else x for x in args]
        torch.library.opcheck(op, args)


# Distributed tensors


def check_distributed(mesh: DeviceMesh) -> None:
    for case in COMPILED:
        tensors = named(draw(case, torch.device("cpu"), T=5, K=4, V=6, M=3))
        axes_of = {**case.inputs, **case.gates, **case.states}

        def run(*x: Tensor, case: OpCase = case, names: list[str] = [*tensors]) -> tuple[Tensor, ...]:  # noqa: B006
            o, states = call_named(case, **dict(zip(names, x, strict=True)), output_states=2)
            return (o, states) if isinstance(states, Tensor) else (o, *states)

        for split in (BATCH, HEADS):
            placements = [placement(axes_of[x], split) for x in tensors]
            check_sharded(mesh, run, list(tensors.values()), placements, run)


def test_dtensor() -> None:
    on_two_ranks(check_distributed)
