"""The kernel of one token of mLSTM."""

from __future__ import annotations

import pytest
import torch
from contract.cases import NAMED
from contract.problems import Problem, draw

from flacompose.ops._recurrences.fused.mlstm import cuda
from ops._recurrences.test_kernels import CPU, check, forward_alone

# The floor of the denominator may be infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

CASE = NAMED["fused_recurrent_mlstm"]


@pytest.mark.parametrize("state", [True, False], ids=["a state", "nothing"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (40, 70), (300, 33), (512, 9), (1, 1)])
def test_values(K: int, V: int, state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, launches = cuda.launch, []
    monkeypatch.setattr(cuda, "launch", lambda *args, **given: launches.append(launch(*args, **given)))
    check(draw(CASE, CPU, B=2, T=1, H=1, K=K, V=V, state=state, gates="weak"))
    assert len(launches) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    check(draw(CASE, CPU, dtype, B=2, T=1, K=24, V=40, gates="weak"))


SIZES = [(1e4, 0.3), (1e4, -torch.inf), (-9e3, -torch.inf), (-9e3, 60.0), (-torch.inf, 0.3)]


@pytest.mark.parametrize(("i", "f"), SIZES)
@pytest.mark.parametrize("m", [0.0, 1e4, -9e3])
def test_gates_of_any_size(i: float, m: float, f: float) -> None:
    check(with_gates(i, m, f), "o")


@pytest.mark.parametrize("m", [0.0, -torch.inf])
def test_a_token_that_leaves_nothing(m: float) -> None:
    problem = with_gates(-torch.inf, m, -torch.inf)
    o, state = forward_alone(problem)
    C, n, stabiliser = CASE.split(state, problem.tensors)
    assert not o.any() and not C.any() and not n.any() and stabiliser.isfinite().all()


def with_gates(i: float, m: float, f: float) -> Problem:
    problem = draw(CASE, CPU, B=1, T=1, H=1, K=16, V=16)
    tensors = dict(problem.tensors)
    tensors["i"], tensors["f"] = torch.full_like(tensors["i"], i), torch.full_like(tensors["f"], f)
    tensors |= {name: tensors[name].abs() for name in ("q", "k", "initial_state")}
    tensors["initial_state"][:, :, -1] = m
    return problem.with_tensors(**tensors)
