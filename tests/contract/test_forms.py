"""Both forms are one function, states pass from one to the other, and heads in groups share what they have to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .accuracy import FIXED, VALUES, assert_close, error
from .cases import CASES, TWO_FORMS, OpCase, each_op_of_two_forms, every
from .problems import Problem, call, draw, evaluate

each_order = pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])


def forms(case: OpCase, reverse: bool = False) -> list[OpCase]:
    """The entry, and the same one with the function of the other form."""
    both = [case, replace(case, function=case.other)]
    return both[::-1] if reverse else both


GATES = [
    (case, gates)
    for case in TWO_FORMS
    for gates in ("weak", "mixed", "rare", -1e-6)[: 4 if case.gates else 1]
]


@pytest.mark.parametrize(("case", "gates"), GATES, ids=[f"{case.name}-{gates}" for case, gates in GATES])
@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 59]], ids=["dense", "packed"])
def test_both_forms_are_one_function(
    case: OpCase, gates: str | float, lengths: list[int] | None, device: torch.device
) -> None:
    one, other = (evaluate(draw(form, device, T=130, lengths=lengths, gates=gates)) for form in forms(case))
    for name, x in one.items():
        if device.type == "cpu" and case.nodes == 1:  # there they are one function also by their code
            assert torch.equal(x, other[name]), name
        bound = 2 * FIXED[torch.float32][name not in VALUES] if case.gates else 1e-5
        assert error(x, other[name]) <= bound, name


@each_op_of_two_forms
@each_order
@pytest.mark.parametrize("points", [[1], [64], [69], [66, 67, 68, 69]], ids=str)
def test_a_state_passes_from_one_form_to_the_other(
    case: OpCase, points: list[int], reverse: bool, device: torch.device
) -> None:
    """The whole sequence in the first form is a start in the first and parts, single tokens too, in the other."""
    first, second = forms(case, reverse)
    problem = draw(first, device, T=70, gates="rare", state=False)
    whole, final = call(problem)
    o, state = [], {}
    for start, end in zip([0, *points], [*points, 70], strict=True):
        part = case.at(slice(start, end), problem.tensors, "T")
        output, after = call(replace(problem, case=second if start else first, tensors={**part, **state}))
        o.append(output)
        state = {"initial_state": after}
    assert error(torch.cat(o, 1), whole) <= 2e-5
    assert error(state["initial_state"], final) <= 2e-5


@every([case for case in CASES if case.groups > 1])
@each_order
@pytest.mark.parametrize("lengths", [None, [20, 0, 1, 40]], ids=["dense", "packed"])
def test_heads_in_groups_share(
    case: OpCase, lengths: list[int] | None, reverse: bool, device: torch.device
) -> None:
    """As if what neighbouring heads share were repeated for each of them, in results and in every gradient."""
    problem = draw(forms(case, reverse)[0], device, torch.float64, lengths=lengths)

    def repeat(x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x.repeat_interleave(case.groups, axes.index("H")) if "H" in axes else x

    def repeated(problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, state = call(problem, **{name: repeat(x, case.axes[name]) for name, x in tensors.items()})
        return o, state[:, :: case.groups] if "H" in case.state else state

    assert_close(evaluate(problem), evaluate(problem, function=repeated), 1e-10)
