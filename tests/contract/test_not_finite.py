"""How far a number that is not finite reaches: its head, its sequence, and nothing before the chunk of its token.

Heads that share queries and keys count as one. Chunks are of 64 tokens, counted from the start of each sequence. What
lies outside stays the same to the bit, gradients included. The output at the token itself shows a NaN, and the output
at the next token that of a gate.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .cases import OpCase, each_op_and_mamba
from .problems import Problem, Results, call, draw, evaluate

LENGTHS = [70, 0, 131, 5]
CHUNK, TOKEN = 64, 66  # of the sequence


def check(problem: Problem, value: float, function: Callable = call) -> None:
    """Of one number in each input: in the second row, or the third sequence, and in the last head."""
    expected = evaluate(problem, function=function)
    for name in problem.tensors:
        check_input(problem, name, value, function, expected)


def check_input(problem: Problem, name: str, value: float, function: Callable, expected: Results) -> None:
    case, packed = problem.case, problem.cu_seqlens is not None
    start, end = problem.cu_seqlens[2:4].tolist() if packed else (0, problem.first.shape[1])
    row = {"B": 0, "N": 2} if packed else {"B": 1, "N": 1}
    poisoned = case.axes[name]
    of_a_row = "B" in poisoned or "N" in poisoned

    def reached(axes: tuple[str, ...], since: int) -> tuple[slice, ...]:
        """Of a tensor with these axes: the row, the sequence from this token on, the heads of the group."""
        windows = {"H": slice(-1, None), "D": slice(-1, None)}
        windows |= dict.fromkeys(("HV", "HQ"), slice(-case.groups, None))
        if not windows.keys() & {*poisoned}:  # all heads, or channels, share it
            windows = {}
        if of_a_row:
            windows |= {axis: slice(n, n + 1) for axis, n in row.items()} | {"T": slice(start + since, end)}
        return tuple(windows.get(axis, slice(None)) for axis in axes)

    at = {**row, "T": start + TOKEN, "H": -1, "HV": -1, "HQ": -1, "D": -1}
    x = problem.tensors[name].clone()
    x[tuple(at.get(axis, 0) for axis in poisoned)] = value
    results = evaluate(problem.with_tensors(**{name: x}), function=function)

    output = case.output_axes
    if value != value and name in {**case.inputs, **case.gates} and "T" in poisoned:
        # Some recurrences read before they decay: a gate is seen at the next token.
        since = TOKEN if name in case.inputs else TOKEN + 1
        token = results["o"][reached(output, since)].select(output.index("T"), 0)
        assert not token.isfinite().all(), f"o does not show a NaN of {name}"
    axes = {"o": output, "final_state": case.state} | {f"d{x}": names for x, names in case.axes.items()}
    for result, y in results.items():
        window = reached(axes[result], CHUNK if result == "o" and "T" in poisoned else 0)
        y = y.clone()
        y[window] = expected[result][window]
        assert torch.equal(y, expected[result]), f"{result} is reached by {value} in {name}"


@each_op_and_mamba
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_how_far_it_reaches(
    case: OpCase, value: float, lengths: list[int] | None, device: torch.device
) -> None:
    check(draw(case, device, T=131, lengths=lengths), value)
