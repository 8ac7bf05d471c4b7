"""The kernels of the selective scan, in tiles of a few channels and numbers of the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from contract.accuracy import assert_equal
from contract.cases import SELECTIVE, SELECTIVE_GROUPS, OpCase, every
from contract.problems import draw, evaluate, permuted, tokens_last
from contract.test_not_finite import check as check_reach
from helpers.unregistered import launched

from flacompose.ops._launch import sequences
from flacompose.ops._recurrences.elementwise.selective_scan import cuda
from ops._recurrences.elementwise.test_selective_scan import FULL, OPTIONS, WITH, case_of
from ops._recurrences.test_kernels import CPU, check

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
each = every([SELECTIVE, SELECTIVE_GROUPS])


@each
@pytest.mark.parametrize("T", [1, 8, 9, 37])
def test_lengths(case: OpCase, T: int) -> None:
    check(draw(case, CPU, B=2, H=2, T=T, K=3, V=4))


@pytest.mark.parametrize("given", WITH)
@pytest.mark.parametrize("lengths", [None, [0, 17, 1, 3]], ids=["dense", "packed"])
def test_skip_gate_and_time_steps(given: str, lengths: list[int] | None) -> None:
    softplus, options = WITH[given]
    case = case_of(softplus, *(x for x in options if x in OPTIONS))
    check(draw(case, CPU, B=1, K=3, V=4, T=21, lengths=lengths))


@pytest.mark.parametrize("tile", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize(("case", "K", "V"), [(FULL, 5, 3), (SELECTIVE, 2, 5), (SELECTIVE_GROUPS, 3, 6)])
def test_several_tiles(
    case: OpCase, K: int, V: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the states, whose sums are then added up outside, of the channels, and of those of a group."""
    states, channels = tile
    monkeypatch.setattr(cuda, "STATES", states)
    for config in ("SWEEP", "GRADIENT"):
        tokens, _ = getattr(cuda, config)
        monkeypatch.setattr(cuda, config, (tokens, channels))
    check(draw(case, CPU, B=1, H=2, T=18, K=K, V=V))


@each
@pytest.mark.parametrize("loss", ["o", "state"])
def test_one_loss(case: OpCase, loss: str) -> None:
    check(draw(case, CPU, B=1, T=10, K=2, V=2), loss)


def test_float16_without_a_state() -> None:
    check(draw(SELECTIVE, CPU, torch.float16, B=1, T=20, K=2, V=3, state=False))


@each
@pytest.mark.parametrize("lengths", [[6], [0, 17, 1, 0, 16, 0]], ids=["one", "six"])
def test_packed(case: OpCase, lengths: list[int]) -> None:
    check(draw(case, CPU, K=2, V=2, lengths=lengths, tail=3))


@pytest.mark.parametrize("rate", [1e-3, 1.0], ids=["slow", "fast"])
@pytest.mark.parametrize("lengths", [None, [3, 60, 0, 40]], ids=["dense", "packed"])
def test_segments(rate: float, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what a segment begins with reaches its end."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    problem = draw(SELECTIVE, CPU, B=1, T=100, K=2, V=3, lengths=lengths)
    check(problem.with_tensors(A=problem.tensors["A"] * rate))


@pytest.mark.parametrize("rate", [0.0, 30.0, 1e4, 3e38])
def test_rates_of_every_size(rate: float) -> None:
    problem = draw(SELECTIVE, CPU, B=1, T=18, K=2, V=3)
    check(problem.with_tensors(A=torch.full_like(problem.tensors["A"], -rate)))


def test_rates_of_minus_infinity() -> None:
    """Beside a slow one, at time steps above 0 and of 0, also in the tokens that fill up a tile. Rates below -1e31
    do the same."""
    problem = draw(SELECTIVE, CPU, B=1, T=10, K=2, V=2)
    delta = problem.tensors["delta"].clone()
    delta[:, 1::3] = 0
    A = problem.tensors["A"].clone()
    A[:, 0] = -torch.inf
    problem = problem.with_tensors(A=A, delta=delta)
    check(problem)
    other = problem.with_tensors(A=A.clamp(min=-1.1e31))
    assert_equal(evaluate(other, function=launched), evaluate(problem, function=launched))


@pytest.mark.parametrize("layout", [permuted, tokens_last])
def test_layouts(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    problem = draw(SELECTIVE_GROUPS, CPU, T=10, K=2, V=2)
    other = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
    other = replace(other, do=layout(problem.do), d_final_state=layout(problem.d_final_state))
    assert_equal(evaluate(other, function=launched), evaluate(problem, function=launched))


def test_how_far_a_nan_reaches() -> None:
    check_reach(draw(SELECTIVE, CPU, K=2, V=2, lengths=[3, 0, 68, 2]), torch.nan, launched)
