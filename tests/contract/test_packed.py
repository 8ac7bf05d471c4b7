"""Packed sequences against the sequences one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .accuracy import assert_accurate, assert_equal
from .cases import LOSSES, OpCase, each_op, each_op_and_mamba
from .problems import call, draw, evaluate

LENGTHS = {
    "one sequence": [130],
    "five sequences": [5, 64, 1, 65, 20],
    "empty first": [0, 0, 66, 3],
    "empty in the middle": [63, 0, 0, 65, 0, 2],
    "empty last": [7, 64, 0, 0],
    "single tokens": [1, 1, 1, 1, 1],
}


@each_op_and_mamba
@pytest.mark.parametrize(("name", "tail"), [*zip(LENGTHS, [9, 0, 9, 0, 9, 0]), ("five sequences", 9)])
def test_packed(case: OpCase, name: str, tail: int, device: torch.device) -> None:
    problem = draw(case, device, lengths=LENGTHS[name], tail=tail)
    results = evaluate(problem)
    assert_accurate(problem, results)
    if tail:
        assert not results["o"][:, -tail:].any()
        gradients = {name: results[f"d{name}"] for name in problem.tensors if "T" in case.axes[name]}
        for name, x in case.at(slice(-tail, None), gradients, "T").items():
            assert not x.any(), f"d{name} is not 0 in the tail"


@each_op_and_mamba
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("arriving", [False, True], ids=["inputs", "inputs and gradients"])
def test_what_a_tail_holds_changes_nothing(
    case: OpCase, garbage: float, arriving: bool, device: torch.device
) -> None:
    """No result and no gradient changes, not even of what all tokens share. The tail's own gradients are zeros."""
    problem = draw(case, device, lengths=[40, 3], tail=5)
    expected = evaluate(problem)
    poisoned = replace(problem, tensors={name: x.clone() for name, x in problem.tensors.items()})
    poisoned = replace(poisoned, do=problem.do.clone())
    tail = case.at(slice(43, None), poisoned.tensors, "T")
    for name in (name for name in tail if "T" in case.axes[name]):
        tail[name].fill_(-garbage if name in case.gates else garbage)
    if arriving:
        poisoned.do[:, 43:] = garbage
    results = evaluate(poisoned)
    assert not results["o"][:, 43:].any()
    for name in (name for name in tail if "T" in case.axes[name]):
        assert not case.at(slice(43, None), {name: results[f"d{name}"]}, "T")[name].any(), name
    assert_equal(results, expected)


@each_op
@pytest.mark.parametrize("loss", LOSSES)
def test_packed_without_initial_state(case: OpCase, loss: str, device: torch.device) -> None:
    problem = draw(
        case, device, torch.bfloat16, lengths=[0, 70, 1, 0, 64], tail=70, state=False, gates="rare"
    )
    assert_accurate(problem, evaluate(problem, loss), loss)


@each_op
def test_int64(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, lengths=[0, 70, 1, 0, 64], tail=3)
    other = replace(problem, cu_seqlens=problem.cu_seqlens.long())
    assert_equal(evaluate(other), evaluate(problem))


@each_op
def test_nothing_but_empty_sequences(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, lengths=[0, 0, 0], tail=5)
    results = evaluate(problem)
    assert_accurate(problem, results)
    assert torch.equal(results["final_state"], problem.tensors["initial_state"])
    assert torch.equal(results["dinitial_state"], problem.d_final_state)


@each_op_and_mamba
def test_a_sequence_does_not_see_its_neighbours(case: OpCase, device: torch.device) -> None:
    """A NaN in a neighbour, or in a token of no sequence, changes nothing."""
    problem = draw(case, device, lengths=[40, 70, 33], tail=20)
    o, state = call(problem)
    poisoned = {name: x.clone() for name, x in problem.tensors.items()}
    for axis, windows in {"T": (slice(40), slice(110, None)), "N": (slice(1), slice(2, None))}.items():
        along = {name: x for name, x in poisoned.items() if axis in case.axes[name]}
        for window in windows:
            for x in case.at(window, along, axis).values():
                x.fill_(torch.nan)
    o_, state_ = call(problem, **poisoned)
    assert torch.equal(o_[:, 40:110], o[:, 40:110])
    assert torch.equal(state_[1], state[1])
    assert not o_[:, 143:].any()


@each_op
def test_bounds_changed_in_place_are_read_again(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, lengths=[40, 70])
    evaluate(problem)
    problem.cu_seqlens[1] = 65
    assert_accurate(problem, evaluate(problem))
