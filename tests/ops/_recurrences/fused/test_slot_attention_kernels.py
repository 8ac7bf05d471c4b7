"""The kernel of one token of slot attention: its own values, and those of two calls of channel decay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from contract.accuracy import FIXED, assert_accurate, assert_close, assert_equal
from contract.cases import OpCase, every
from contract.problems import Problem, draw, evaluate, permuted, side_by_side
from helpers.unregistered import launched
from torch import Tensor

from flacompose.ops._recurrences.fused.slot_attention import cuda
from ops._recurrences.fused.test_slot_attention import CASES, by_two_calls
from ops._recurrences.test_kernels import CPU

# What a gate of -inf leaves is computed in two ways, of which one is chosen.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

each = every(CASES)
# Two passes in float32 are each within the bounds of the truth.
BOUND = 2 * FIXED[torch.float32][0]


by_two_passes = partial(by_two_calls, run=launched)


def heads_first(x: Tensor) -> Tensor:
    """``[B, T, H, ...]`` whose tokens are beside one another within a head, as attention has them."""
    return (
        x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) if x.dim() > 3 else x
    )


def values(problem: Problem, function: Callable[..., tuple[Tensor, Tensor]] = launched) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(zip(("o", "final_state"), function(problem), strict=True))


@each
@pytest.mark.parametrize("state", [True, False], ids=["a state", "nothing"])
@pytest.mark.parametrize(
    ("K", "M", "V"),
    [(16, 16, 16), (20, 20, 20), (64, 64, 64), (300, 300, 300), (16, 300, 64), (300, 20, 64), (64, 300, 20),
     (64, 16, 300), (1, 1, 1), (512, 12, 3), (3, 512, 1), (3, 1, 512)],
)  # fmt: skip
def test_values(case: OpCase, K: int, M: int, V: int, state: bool) -> None:
    problem = draw(case, CPU, B=2, T=1, H=1, K=K, M=M, V=V, state=state, gates="weak")
    found = values(problem)
    assert_accurate(problem, found)
    expected = values(problem, by_two_passes)
    assert torch.equal(found["final_state"], expected["final_state"])  # the same sums of the same terms
    assert_close(found, expected, BOUND)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [permuted, side_by_side, heads_first])
def test_layouts(case: OpCase, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    problem = draw(case, CPU, dtype, T=1, K=5, V=6, M=3)
    moved = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
    assert_equal(values(moved), values(problem))


@each
@pytest.mark.parametrize("gates", [0.0, -1e-6, -30.0, -1e4, -torch.inf, "mixed", "rare"])
def test_gates(case: OpCase, gates: str | float) -> None:
    problem = draw(case, CPU, T=1, K=16, V=20, M=70, gates=gates)
    assert_accurate(problem, values(problem))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@each
def test_dtypes_of_states_and_gates(case: OpCase, dtype: torch.dtype) -> None:
    problem = draw(case, CPU, T=1, K=5, V=6, gate_dtype=dtype, state_dtype=dtype)
    assert_accurate(problem, values(problem))
    low = draw(case, CPU, torch.float16, T=1, K=40, V=70, M=70)
    found = values(low)
    assert found["o"].dtype == torch.float16
    assert_accurate(low, found)


@each
@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
@pytest.mark.parametrize("strength", [1e-3, 1e3, 1e6])
def test_logits_of_any_size(case: OpCase, strength: float, order: int) -> None:
    """Where the largest is in the last of several tiles, and where it is in the first."""
    problem = draw(case, CPU, T=1, K=3, V=5, M=150, scale=1.0)
    inputs, M = problem.tensors, 150
    states = case.split(inputs["initial_state"], inputs)
    states = (torch.linspace(-order, order, M).expand(states[0].shape), *states[1:])
    problem = problem.with_tensors(
        initial_state=case.join(states), q=inputs["q"].abs() * strength, k=inputs["k"] * 0
    )
    found = values(problem)
    assert found["o"].isfinite().all()
    assert_close(found, values(problem, by_two_passes), BOUND)


@each
def test_first_slots_without_weight(case: OpCase) -> None:
    """The logits of a whole tile of slots overflow to -inf, and those of the next are finite."""
    problem = draw(case, CPU, T=1, K=3, V=5, M=150, scale=1.0)
    inputs = problem.tensors
    states = case.split(inputs["initial_state"], inputs)
    first = torch.where(torch.arange(150) < 100, -3e38, 0.0).expand(states[0].shape)
    problem = problem.with_tensors(
        initial_state=case.join((first, *states[1:])), q=inputs["q"].abs() + 2, k=inputs["k"] * 0
    )
    found = values(problem)
    assert found["o"].isfinite().all()
    assert_close(found, values(problem, by_two_passes), BOUND)


@each
def test_equal_slots_are_read_alike(case: OpCase) -> None:
    """Where all slots hold the same, what they hold is read, whatever the query."""
    problem = draw(case, CPU, T=1, K=16, V=20, M=70, state=False, gates=-0.5)
    tensors = {x: y[..., :1].expand(y.shape) if x in "sg" else y for x, y in problem.tensors.items()}
    o, state = launched(problem.with_tensors(**tensors))
    Hv = case.split(state, tensors)[1]
    groups = o.shape[2] // Hv.shape[1]
    torch.testing.assert_close(o[:, 0], Hv[:, :, 0].repeat_interleave(groups, 1))


@each
@pytest.mark.parametrize(
    ("loss", "state"),
    [("o", True), ("state", True), ("both", False)],
    ids=["o", "state", "both-from nothing"],
)
def test_gradients_are_those_of_two_passes(case: OpCase, loss: str, state: bool) -> None:
    """To the bit, and each what it is among all of them."""
    problem = draw(case, CPU, T=1, K=5, V=17, M=20, state=state)
    found = evaluate(problem, loss, launched)
    assert_accurate(problem, found, loss)
    expected = evaluate(problem, loss, by_two_passes)
    assert_equal(
        {name: x for name, x in found.items() if name != "o"},
        {name: x for name, x in expected.items() if name != "o"},
    )
    for name in problem.tensors:
        alone = evaluate(problem, loss, partial(one_wanted, name))
        assert torch.equal(alone[f"d{name}"], found[f"d{name}"]), name


def one_wanted(wanted: str, problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    return launched(problem, **{name: x if name == wanted else x.detach() for name, x in tensors.items()})


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@each
def test_a_nan_stays_in_its_head(case: OpCase) -> None:
    problem = draw(case, CPU, T=1, H=2, K=16, V=40, M=70)
    expected = values(problem)
    for name in "qkvs":
        x = problem.tensors[name].clone()
        x[0, 0, 0, -1] = torch.nan
        found = values(problem.with_tensors(**{name: x}))
        assert not found["o"][0, 0, 0].isfinite().all(), name
        assert torch.equal(found["o"][1], expected["o"][1])
        assert torch.equal(found["o"][0, 0, case.groups :], expected["o"][0, 0, case.groups :])
        assert torch.equal(found["final_state"][:, 1], expected["final_state"][:, 1])


def test_every_place_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of slots and blocks of values, in memory that is NaN where nothing was written."""
    problem = draw(CASES[1], CPU, T=1, K=40, V=150, M=130)
    expected = values(problem)
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
        assert_equal(values(problem), expected)
    config = cuda.token_config(40, 130, 150)
    assert config["BM"] < 130 and config["BV"] < 150
