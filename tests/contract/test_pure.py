"""Inputs unchanged, outputs new, layouts irrelevant, memory written, results repeated, nothing read on the host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.operators import flat, part
from helpers.reference_cycles import in_cycles
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flacompose.ops import fused_recurrent_gsa, fused_recurrent_mlstm

from .accuracy import assert_accurate, assert_close, assert_equal
from .cases import CASES, LOSSES, MAMBA3_MIMO, NAMED, SELECTIVE_GROUPS, OpCase, each_op, every
from .graphs import recorded
from .problems import Problem, call, draw, evaluate, permuted, side_by_side, tokens_last

PACKED = {"dense": None, "packed": [0, 20, 1, 44]}
dense_and_packed = pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)


def sliced(x: Tensor) -> Tensor:
    """A window of a larger tensor, every other element of it."""
    large = torch.full([2 * n + 3 for n in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    window = large[tuple(slice(2, 2 + 2 * n, 2) for n in x.shape)]
    return window.copy_(x)


def head_first(x: Tensor) -> Tensor:
    if x.dim() < 3:
        return x
    # A copy also where one axis has the size 1.
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


@each_op
@pytest.mark.parametrize("layout", [permuted, sliced, head_first, tokens_last, side_by_side])
@dense_and_packed
def test_layouts(case: OpCase, layout, lengths: list[int] | None, device: torch.device) -> None:
    problem = draw(case, device, lengths=lengths)
    other = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
    other = replace(other, do=layout(problem.do), d_final_state=layout(problem.d_final_state))
    if lengths is not None:
        every_other = torch.stack([problem.cu_seqlens, problem.cu_seqlens + 1000], 1)[:, 0]
        assert not every_other.is_contiguous()
        other = replace(other, cu_seqlens=every_other)
    assert not other.first.is_contiguous()
    # PyTorch sums the gradient of a divisor, and products of a part of a state, in the order of the layout, and where
    # tokens are last in memory also what is summed over them.
    if layout is tokens_last or case.other_ops is None or "cat" in case.other_ops:
        assert_close(evaluate(other), evaluate(problem), 1e-6)
    else:
        assert_equal(evaluate(other), evaluate(problem))


@each_op
def test_expanded(case: OpCase, device: torch.device) -> None:
    """One head, one token, one channel seen many times, and a gradient that is one number."""
    problem = draw(case, device, H=3)
    for axes in (("T",), ("H", "HV", "HQ"), ("K", "V", "D")):
        one = case.at(slice(1), problem.tensors, *axes)
        expanded = {name: x.expand_as(problem.tensors[name]) for name, x in one.items()}
        do = problem.do[(slice(1),) * problem.do.dim()].expand_as(problem.do)
        other = replace(problem.with_tensors(**expanded), do=do)
        copied = other.with_tensors(**{name: x.contiguous() for name, x in expanded.items()})
        assert_equal(evaluate(other), evaluate(replace(copied, do=other.do.contiguous())))


def storages(tensors: list[Tensor]) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in tensors if x.numel()]


@every()
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_inputs_are_unchanged_and_outputs_new(
    case: OpCase, T: int, dtype: torch.dtype, packed: bool, device: torch.device
) -> None:
    problem = draw(case, device, dtype, T=T, lengths=[T] if packed else None, B=1)
    with recorded() as calls:
        evaluate(problem)
    expected = case.ops + case.backward_ops
    one_kernel = {fused_recurrent_gsa: "slot_attention", fused_recurrent_mlstm: "mlstm"}
    if T == 1 and not packed and case.function in one_kernel:
        expected = [f"{one_kernel[case.function]}_{form}" for form in ("token", "backward")]
    assert [op.name() for op, _, _ in calls] == [f"flacompose::{name}" for name in expected]
    for op, before, _ in calls:
        args = [x.clone() if isinstance(x, Tensor) else x for x in before]
        outputs = op(*args)
        for x, y in zip(args, before, strict=True):
            assert not isinstance(x, Tensor) or torch.equal(x, y), f"{op} wrote to an input"
        used = storages([x for x in args if isinstance(x, Tensor)])
        new = storages(list(outputs))
        assert len(set(new)) == len(new), f"{op} returns one memory twice"
        assert not set(new) & set(used), f"{op} returns an input's memory"


@pytest.mark.parametrize("cases", [CASES] if not torch.cuda.is_available() else [[case] for case in CASES])
def test_memory_is_free_when_a_call_returns(cases: list[OpCase], device: torch.device) -> None:
    """On CUDA also after the second call, which is recorded, and the third, which repeats it."""
    calls = 3 if device.type == "cuda" else 1
    problems = [draw(case, device) for case in cases]
    assert in_cycles(lambda: [evaluate(problem) for problem in problems for _ in range(calls)]) == set()


OTHER_PROGRAMS = {"short_conv", "selective_scan", "head_decay", "normalizer"}


@each_op
def test_only_what_requires_a_gradient_gets_one(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    every = evaluate(problem)
    for name in problem.tensors:
        tensors = {n: x.clone().requires_grad_(n == name) for n, x in problem.tensors.items()}
        o, state = call(problem, **tensors)
        torch.autograd.backward([o, state], [problem.do, problem.d_final_state])
        assert [n for n, x in tensors.items() if x.grad is not None] == [name]
        one, among_all = tensors[name].grad, every[f"d{name}"]
        if device.type == "cuda" and case.recurrence in OTHER_PROGRAMS:
            # Their kernel of fewer results is another program, which may add in another order.
            torch.testing.assert_close(one, among_all, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(one, among_all), name


@each_op
def test_without_gradients_nothing_is_recorded(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    o, state = call(problem)
    assert not o.requires_grad and not state.requires_grad
    with torch.no_grad():
        o, state = call(problem, **{case.first: problem.first.clone().requires_grad_()})
    assert not o.requires_grad and not state.requires_grad


@each_op
def test_gradients_that_are_not_wanted_are_empty(case: OpCase, device: torch.device) -> None:
    """The backward op always returns as many tensors; those of absent and of constant inputs have no element."""
    problem = draw(case, device, T=5, state=False)
    with recorded() as calls:
        evaluate(problem)
    op, args, outputs = [x for x in calls if x[0]._opname == case.backward][-1]
    inputs = {argument.name: x for argument, x in zip(op._schema.arguments, args, strict=True)}
    names = [returned.name.removeprefix("d").removeprefix("_") for returned in op._schema.returns]
    for name, dx, wanted in zip(names, outputs, inputs["output_mask"], strict=True):
        x = inputs[name]
        # Some functions make the fixed decays of heads themselves, or ones where an op needs a `beta`.
        made = name in ("g_gamma", "beta") and name not in case.operands.values()
        assert wanted == (x is not None and not made)
        assert dx.shape == (x.shape if wanted else (0,))


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@each_op
@pytest.mark.parametrize("lengths", [None, [0, 20, 1, 0, 64, 0]], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("dtype", "loss"),
    [*((torch.float32, loss) for loss in LOSSES), (torch.bfloat16, "both")],
    ids=str,
)
def test_all_memory_is_written(
    case: OpCase,
    dtype: torch.dtype,
    lengths: list[int] | None,
    loss: str,
    device: torch.device,
    nan_in_new_memory: None,
) -> None:
    problem = draw(case, device, dtype, lengths=lengths, tail=9, K=20, V=17)
    assert_accurate(problem, evaluate(problem, loss), loss)


@each_op
@dense_and_packed
def test_deterministic(case: OpCase, lengths: list[int] | None, device: torch.device) -> None:
    problem = draw(case, device, torch.bfloat16, lengths=lengths, T=300, gates="rare")
    first = evaluate(problem)
    for _ in range(99 if device.type == "cuda" else 2):
        assert_equal(evaluate(problem), first)


@each_op
def test_a_row_does_not_depend_on_the_batch(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=150)
    whole = evaluate(problem)
    row = replace(
        problem.with_tensors(**case.at(slice(1, None), problem.tensors, "B", "N")),
        do=problem.do[1:],
        d_final_state=problem.d_final_state[1:],
    )
    results = evaluate(row)
    for name, axes in case.axes.items():
        if "B" not in axes and "N" not in axes:  # its gradient is a sum over the batch
            results.pop(f"d{name}")
    for name, x in results.items():
        # Libraries choose their matrix products by the batch size on CPU.
        assert torch.equal(x, whole[name][1:]) or (
            device.type == "cpu" and torch.allclose(x, whole[name][1:], rtol=1e-5, atol=1e-5)
        ), name


def on_meta(problem: Problem) -> Problem:
    meta = problem.with_tensors(**{name: x.to("meta") for name, x in problem.tensors.items()})
    cu = None if problem.cu_seqlens is None else problem.cu_seqlens.to("meta")
    return replace(
        meta, do=problem.do.to("meta"), d_final_state=problem.d_final_state.to("meta"), cu_seqlens=cu
    )


class NoEnvironment(dict):
    def __getitem__(self, key):
        raise AssertionError(f"{key} read from the environment")

    get = __contains__ = __getitem__


@each_op
@dense_and_packed
def test_nothing_is_read_on_the_host(
    case: OpCase, lengths: list[int] | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors that have no values neither the function nor its implementation in PyTorch asks for one."""
    problem = draw(case, device, lengths=lengths)
    expected = evaluate(problem)
    if device.type == "cpu":
        monkeypatch.setattr(os, "environ", NoEnvironment())
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
    try:
        results = evaluate(problem)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    monkeypatch.undo()
    assert_equal(results, expected)
    with recorded() as calls:
        evaluate(on_meta(problem))
        assert len(calls) == len(case.ops + case.backward_ops)
        for op, args, _ in list(calls):
            recurrence, form = op._opname.rsplit("_", 1)
            flat(part(recurrence, "eager"), "backward" if form == "backward" else "forward")(*args)


@each_op
def test_inputs_changed_in_place_are_read_again(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    evaluate(problem)
    for x in problem.tensors.values():
        x.mul_(2)
    assert_accurate(problem, evaluate(problem))


def of_one_number(x: Tensor) -> Tensor:
    return x[(slice(1),) * x.dim()].expand_as(x)


def strides(x: Tensor) -> list[int]:
    """Of axes with more than one place: to Inductor too, the others are all the same."""
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1]


@every([*NAMED.values(), SELECTIVE_GROUPS, MAMBA3_MIMO])
@pytest.mark.parametrize(
    "sizes",
    [{"T": T} | one for T in (9, 1) for one in ({}, {"B": 1, "H": 1})]
    + [{"lengths": [3, 5, 1, 4]} | one for one in ({}, {"H": 1})],
    ids=str,
)
def test_fakes_match(case: OpCase, sizes: dict[str, Any], device: torch.device) -> None:
    """In shape, dtype and strides, whatever the strides of the inputs and of the gradients that arrive."""
    problem = draw(case, device, state_dtype=torch.float16, **sizes)
    for layout in (torch.Tensor.contiguous, permuted, head_first, of_one_number):
        other = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
        other = replace(other, do=layout(problem.do), d_final_state=layout(problem.d_final_state))
        with recorded() as calls:
            evaluate(other)
        for op, args, outputs in calls:
            fakes = op(*(x.to("meta") if isinstance(x, Tensor) else x for x in args))
            for real, fake in zip(tree_leaves(outputs), tree_leaves(fakes), strict=True):
                assert (fake.shape, fake.dtype, strides(fake)) == (real.shape, real.dtype, strides(real)), op
    assert all(x.device.type == "meta" for x in evaluate(on_meta(problem)).values())


@each_op
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("gate_dtype", [torch.float64, torch.float16], ids=str)
def test_gates_of_another_dtype(case: OpCase, T: int, gate_dtype: torch.dtype, device: torch.device) -> None:
    """Results have the dtypes that a graph is told, and may be changed in place."""
    problem = draw(case, device, T=T, gate_dtype=gate_dtype)
    leaves = {name: x.requires_grad_() for name, x in problem.tensors.items()}
    for _ in range(3):
        o, state = call(problem, **leaves)
        assert (o.dtype, state.dtype) == (torch.float32, torch.float32)
        o.mul_(2)
