"""The kernel of one token of Mamba-3."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import VALUES, assert_accurate, error
from contract.cases import MAMBA3
from contract.problems import Problem, draw, evaluate
from contract.problems import call as public
from helpers.operators import flat

from flacompose.ops._recurrences.fused.mamba3 import cuda, eager, op
from ops._composed.test_mamba3 import inputs_of_a_token

CPU = torch.device("cpu")
# In the branch of an exponential that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def check(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, launches = cuda.launch, []
    monkeypatch.setattr(cuda, "launch", lambda *args, **given: launches.append(launch(*args, **given)))
    monkeypatch.setattr(op, "token", flat(cuda, "token"))
    results = evaluate(problem, function=torch.no_grad()(public))
    assert_accurate(problem, {name: results[name] for name in VALUES})
    assert len(launches) == 1


@pytest.mark.parametrize("state", [True, False], ids=["states", "nothing"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (40, 70), (300, 33), (512, 9), (4, 1)])
def test_values(K: int, V: int, state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(draw(MAMBA3, CPU, T=1, H=1, K=K, V=V, state=state, gates="mixed"), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(draw(MAMBA3, CPU, dtype, T=1, K=24, V=40), monkeypatch)


@pytest.mark.parametrize("values_first", [False, True], ids=["keys first", "values first"])
@pytest.mark.parametrize("without", [(), ("D",), ("Z",), ("D", "Z")], ids=str)
def test_slices(without: tuple[str, ...], values_first: bool) -> None:
    """Of a projection, as a layer gives them, with angles that all heads share."""
    inputs = inputs_of_a_token(torch.float32, values_first, without)
    assert not inputs.V.is_contiguous() and not inputs.Angles.is_contiguous()
    exact = eager.forward(op.Inputs(*(x.double() if isinstance(x, torch.Tensor) else x for x in inputs)))
    for x, y in zip(cuda.token(inputs), exact, strict=True):
        assert error(x, y) < 1e-6
