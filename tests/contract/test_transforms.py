"""torch.func, double backward, autocast, checkpointing, counting: right, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from .accuracy import assert_close as assert_results_close
from .accuracy import assert_equal
from .cases import CALLS_OF_OPERATORS, DISTINCT, ONE_OP_A_GRAPH, OpCase, each_gated_op, each_op, every
from .graphs import recorded
from .problems import Problem, call, call_reference, draw, evaluate, permuted

exact = partial(assert_close, rtol=1e-9, atol=1e-11)
PACKED = pytest.mark.parametrize("lengths", [None, [2, 0, 1]], ids=["dense", "packed"])


def small(case: OpCase, device: torch.device, lengths: list[int] | None = None, **options) -> Problem:
    options = {"T": 3, "H": 1, "K": 2, "V": 3, "lengths": lengths, **options}
    return draw(case, device, torch.float64, **options)


def of_inputs(problem: Problem, function):
    """The problem's op as a function of its float tensors, in order."""
    return lambda *xs: function(problem, **dict(zip(problem.tensors, xs, strict=True)))


# Differences of numbers see that the stabiliser of exponentials is no constant.
each_without_stabiliser = every([case for case in DISTINCT if not case.before and case.recurrence != "rwkv4"])


@each_without_stabiliser
@PACKED
def test_gradcheck(case: OpCase, lengths: list[int] | None, device: torch.device) -> None:
    problem = small(case, device, lengths, B=1)
    inputs = [x.requires_grad_() for x in problem.tensors.values()]
    assert torch.autograd.gradcheck(of_inputs(problem, call), inputs, check_forward_ad=True, fast_mode=True)


@each_without_stabiliser
@PACKED
def test_double_backward(case: OpCase, lengths: list[int] | None, device: torch.device) -> None:
    problem = small(case, device, lengths, B=1)
    inputs = [x.requires_grad_() for x in problem.tensors.values()]
    assert torch.autograd.gradgradcheck(of_inputs(problem, call), inputs, fast_mode=True)


@each_op
def test_double_backward_across_chunks(case: OpCase, device: torch.device) -> None:
    problem = small(case, device, T=70)
    results = []
    for function in (call, call_reference):
        inputs = [x.clone().requires_grad_() for x in problem.tensors.values()]
        o, state = of_inputs(problem, function)(*inputs)
        first = torch.autograd.grad(o.sin().sum() + state.cos().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(x.sin().sum() for x in first), inputs))
    exact(*results)


def loss(function, *xs: Tensor) -> Tensor:
    o, state = function(*xs)
    return o.sin().sum() + state.cos().sum()


@each_op
@PACKED
def test_grad_vjp_jvp_jacrev(case: OpCase, lengths: list[int] | None, device: torch.device) -> None:
    problem = small(case, device, lengths)
    op, truth = of_inputs(problem, call), of_inputs(problem, call_reference)
    inputs = tuple(problem.tensors.values())
    every = tuple(range(len(inputs)))
    exact(grad(partial(loss, op), every)(*inputs), grad(partial(loss, truth), every)(*inputs))
    arriving = (problem.do, problem.d_final_state)
    exact(vjp(op, *inputs)[1](arriving), vjp(truth, *inputs)[1](arriving))
    tangents = tuple(torch.randn_like(x) for x in inputs)
    exact(jvp(op, inputs, tangents), jvp(truth, inputs, tangents))
    exact(jacrev(op, every)(*inputs), jacrev(truth, every)(*inputs))


@each_op
def test_transforms_of_transforms(case: OpCase, device: torch.device) -> None:
    """grad of grad, and forward over reverse: where a wrong grad mode gives zeros."""
    problem = small(case, device)
    op, truth = of_inputs(problem, call), of_inputs(problem, call_reference)
    inputs = tuple(problem.tensors.values())
    tangents = tuple(torch.randn_like(x) for x in inputs)
    every = tuple(range(len(inputs)))

    def twice(function):
        inner = grad(partial(loss, function), every)
        return grad(lambda *xs: sum(x.sin().sum() for x in inner(*xs)), every)(*inputs)

    def forward_over_reverse(function):
        return jvp(grad(partial(loss, function), every), inputs, tangents)

    exact(twice(op), twice(truth))
    exact(forward_over_reverse(op), forward_over_reverse(truth))


@pytest.mark.parametrize(
    ("case", "lengths", "mapped"),
    [
        pytest.param(case, lengths, mapped, id=f"{case.name}-{'packed' if lengths else 'dense'}-{mapped}")
        for case in DISTINCT
        for lengths in (None, [2, 0, 1])
        for mapped in ("all", case.first, "initial_state", *(() if lengths else [*case.axes][1:-1]))
    ],
)
def test_vmap(case: OpCase, lengths: list[int] | None, mapped: str, device: torch.device) -> None:
    """Over every float input or one of them, alone and around its gradient."""
    problem = small(case, device, lengths)
    many = [draw_again(problem, seed) for seed in range(3)]
    inputs = [
        torch.stack([p.tensors[name] for p in many]) if mapped in ("all", name) else x
        for name, x in problem.tensors.items()
    ]
    in_dims = tuple(0 if mapped in ("all", name) else None for name in problem.tensors)
    op = of_inputs(problem, call)
    rows = [[x if dim is None else x[i] for x, dim in zip(inputs, in_dims, strict=True)] for i in range(3)]
    expected = [op(*row) for row in rows]
    exact(vmap(op, in_dims)(*inputs), tuple(torch.stack(x) for x in zip(*expected, strict=True)))
    every = tuple(range(len(inputs)))
    slope = grad(partial(loss, op), every)
    expected = [slope(*row) for row in rows]
    exact(vmap(slope, in_dims)(*inputs), tuple(torch.stack(x) for x in zip(*expected, strict=True)))


def draw_again(problem: Problem, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def noise(x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=generator, dtype=x.dtype).to(x.device)

    return problem.with_tensors(**{name: x * noise(x) for name, x in problem.tensors.items()})


@each_op
def test_autocast(case: OpCase, device: torch.device) -> None:
    """Inputs of tokens are cast; gates, a bonus and states are not, and every gradient is of its input's dtype."""
    problem = draw(case, device)
    with torch.autocast(device.type, torch.bfloat16):
        results = evaluate_under_autocast(problem)
    assert results["o"].dtype == torch.bfloat16
    assert results["final_state"].dtype == torch.float32
    tokens = [name for name, axes in case.inputs.items() if "T" in axes and name not in case.not_cast]
    cast = problem.with_tensors(**{name: problem.tensors[name].bfloat16() for name in tokens})
    expected = evaluate(replace(cast, do=problem.do.bfloat16()))
    for name, x in problem.tensors.items():
        assert results[f"d{name}"].dtype == x.dtype
        expected[f"d{name}"] = expected[f"d{name}"].to(x.dtype)
    if case.nodes == 1:
        assert_equal(results, expected)
    else:  # gradients of two nodes meet in float32, not in bfloat16
        assert_results_close(results, expected, 2**-8)


def evaluate_under_autocast(problem: Problem) -> dict[str, Tensor]:
    return evaluate(replace(problem, do=problem.do.bfloat16()))


@each_gated_op
def test_autocast_keeps_float64(case: OpCase, device: torch.device) -> None:
    problem = small(case, device)
    with torch.autocast(device.type, torch.bfloat16):
        o, state = call(problem)
    assert o.dtype == state.dtype == torch.float64


@each_op
def test_selective_checkpointing(case: OpCase, device: torch.device) -> None:
    """Saved by its overload, the op is not computed a second time."""
    problem = draw(case, device)
    overload = getattr(torch.ops.flacompose, case.forward).default

    def keep(context, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == overload else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(problem: Problem, *, contexts: dict, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        def body(*xs: Tensor) -> tuple[Tensor, Tensor]:
            o, state = call(problem, **dict(zip(tensors, xs, strict=True)))
            return o.sinh().asinh(), state  # something to recompute, that needs o

        return checkpoint(body, *tensors.values(), use_reentrant=False, **contexts)

    saving = {"context_fn": partial(create_selective_checkpoint_contexts, keep)}
    problem = replace(problem, tensors={n: x * 0.1 for n, x in problem.tensors.items()})
    results = {}
    for name, contexts, times in (("saved", saving, 1), ("recomputed", {}, 2)):
        with recorded() as calls:
            results[name] = evaluate(problem, function=partial(checkpointed, contexts=contexts))
        assert [op for op, _, _ in calls].count(overload) == times * case.nodes
    assert_equal(results["saved"], results["recomputed"])
    plain = evaluate(problem)
    for name in case.inputs:
        assert_close(results["saved"][f"d{name}"], plain[f"d{name}"], rtol=1e-3, atol=1e-4)


@each_op
def test_flops(case: OpCase, device: torch.device) -> None:
    """All ops are counted, and in proportion to the tokens; those of the state alone are `case.flops` for each."""

    def count(T: int) -> dict[str, int]:
        problem = draw(case, device, T=T)
        with FlopCounterMode(display=False) as counter:
            evaluate(problem)
        counts = counter.get_flop_counts()["Global"]
        ops = {"forward": {*case.ops}, "backward": {*case.backward_ops}}
        return {
            name: sum(counts.get(getattr(torch.ops.flacompose, op), 0) for op in of)
            for name, of in ops.items()
        }

    short, long = count(64), count(128)
    state = draw(case, device, T=1).d_final_state
    assert short["forward"] >= 64 * case.flops * state.numel()
    assert short["backward"] >= 2 * short["forward"]
    assert long == {name: 2 * n for name, n in short.items()}


@pytest.mark.parametrize(
    ("case", "layout", "lengths"),
    [(case, "permuted", [2, 0, 1]) for case in CALLS_OF_OPERATORS]
    + [(case, "contiguous", None) for case in ONE_OP_A_GRAPH],
    ids=lambda x: x.name if isinstance(x, OpCase) else "packed" if isinstance(x, list) else str(x),
)
def test_opcheck(case: OpCase, layout: str, lengths: list[int] | None, device: torch.device) -> None:
    problem = draw(case, device, T=5, lengths=lengths)
    if layout == "permuted":
        problem = problem.with_tensors(**{name: permuted(x) for name, x in problem.tensors.items()})
    with recorded() as calls:
        evaluate(problem)
    # CUDA alone has the skip and the gate of Mamba in an operator.
    names = [op._opname for op, _, _ in calls if not op._opname.startswith("gated_skip")]
    assert len(names) == len(case.ops + case.backward_ops)
    for op, args, _ in calls:
        opcheck(op, args)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    leaves = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args
    ]
    if not op.name().endswith("_backward"):
        torch.library.opcheck(op, leaves)
        return
    # Its own gradient, checked above, is a graph of thousands of nodes: minutes to trace at symbolic sizes.
    torch.library.opcheck(op, leaves, test_utils=CHECKS[:-1])
    constants = [x.detach() if isinstance(x, Tensor) else x for x in args]
    torch.library.opcheck(op, constants, test_utils=CHECKS)
