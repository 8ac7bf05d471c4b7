"""The kernels that go from token to token store the states after some of the last ones."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import FIXED, VALUES, assert_close
from contract.cases import OpCase, every
from contract.problems import Problem, draw
from contract.states import WITH_STATES, by_calls, with_states
from helpers.operators import flat, part
from helpers.unregistered import launch_one_token
from torch import Tensor

from ops._recurrences.test_kernels import CPU

# What a gate of -inf leaves is computed in two ways, of which one is chosen.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

each = every([case for case in WITH_STATES if case.form == "recurrent"])


def launched(problem: Problem, function, n: int) -> tuple[Tensor, Tensor]:
    """`function`, its launches in the place of what is registered."""
    op, cuda = part(problem.case.recurrence, "op"), part(problem.case.recurrence, "cuda")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        steps = flat(cuda, "steps")
        patch.setattr(op, "recurrent", flat(cuda, "recurrent"))
        patch.setattr(op, "steps", lambda *args, count, stride: steps(*args, count, stride))
        launch_one_token(patch)
        return function(problem, n=n)


@each
@pytest.mark.parametrize(
    ("dtype", "T", "n"),
    [*((torch.float32, T, n) for T, n in ((1, 1), (5, 5), (18, 16))), (torch.float16, 3, 2)],
    ids=str,
)
def test_states(case: OpCase, dtype: torch.dtype, T: int, n: int) -> None:
    """To the bit those of shorter calls, if kernels get the same numbers; those of PyTorch within bounds of both."""
    problem = draw(case, CPU, dtype, B=2, T=T, H=1, K=5, V=17, M=3, gates="rare", state=T != 5)
    o, states = launched(problem, with_states, n)
    o_of_calls, expected = launched(problem, by_calls, n)
    if case.before or case.softplus:
        # PyTorch computes what the kernels are given, and rounds some functions differently at another length.
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(o, o_of_calls)
    else:
        assert torch.equal(states, expected)
        assert torch.equal(o, o_of_calls)
    if dtype == torch.float32:
        actual, expected = (
            dict(zip(VALUES, x, strict=True)) for x in ((o, states), with_states(problem, n=n))
        )
        assert_close(actual, expected, 2 * FIXED[dtype][0])


@each
def test_large_heads(case: OpCase) -> None:
    """Several tiles of the value axis, and keys that fill no tile."""
    problem = draw(case, CPU, B=1, T=3, H=1, K=40, V=130, M=20)
    actual = dict(zip(VALUES, launched(problem, with_states, 2), strict=True))
    assert_close(
        actual, dict(zip(VALUES, with_states(problem, n=2), strict=True)), 2 * FIXED[torch.float32][0]
    )


def test_every_place_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other place is written: memory that nothing has written to is NaN here."""
    for case in (x for x in WITH_STATES if x.form == "recurrent"):
        problem = draw(case, CPU, B=1, T=4, H=1, K=3, V=5, M=3)
        empty = torch.empty

        def poisoned(*args, empty=empty, **kwargs):
            x = empty(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", poisoned)
            o, states = launched(problem, with_states, 3)
        assert o.isfinite().all()
        assert states.isfinite().all()
