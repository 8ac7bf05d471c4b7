"""The measure can fail."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from .accuracy import assert_accurate, assert_close
from .cases import CASES
from .problems import call_reference, draw, evaluate

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["o", "final_state", "dq", "dg", "dinitial_state"])
def test_one_wrong_element_in_a_tensor_is_seen(name: str, dtype: torch.dtype) -> None:
    problem = draw(CASES[0], CPU, dtype, T=3, gates="rare")
    exact = evaluate(problem.to(torch.float64), function=call_reference)
    assert_accurate(problem, {n: x.to(dtype) for n, x in exact.items()})
    x = exact[name] = exact[name].clone()
    x.view(-1)[0] += 0.1 * x.norm()
    with pytest.raises(AssertionError, match=f"^{name} is off by"):
        assert_accurate(problem, exact)
    x.view(-1)[0] = torch.nan
    with pytest.raises(AssertionError, match=f"^{name} is not finite"):
        assert_accurate(problem, exact)
    with pytest.raises(AssertionError, match=f"^{name} is not finite"):
        assert_close(exact, exact, 1e-6)


def test_a_truth_of_zero_is_measured_on_the_natural_scale() -> None:
    problem = draw(CASES[0], CPU, T=3, gates=float("-inf"))
    exact = evaluate(problem.to(torch.float64), function=call_reference)
    assert not exact["dg"].any()
    natural = evaluate(problem.with_gates(0.0).to(torch.float64), function=call_reference)["dg"].norm()
    exact["dg"][0, 0, 0, 0] = 0.9e-6 * natural
    assert_accurate(problem, exact)
    exact["dg"][0, 0, 0, 0] = 1.1e-6 * natural
    with pytest.raises(AssertionError, match="^dg is 0, off by"):
        assert_accurate(problem, exact)


def test_a_tiny_truth_keeps_its_relative_error() -> None:
    """With every gate at -30 the gradient of the gate is 1e-13 of what it is without decay, and has to be right."""
    problem = draw(CASES[0], CPU, T=3, gates=-30.0)
    exact = evaluate(problem.to(torch.float64), function=call_reference)
    exact["dg"] = exact["dg"] * 1.001
    with pytest.raises(AssertionError, match="^dg is off by"):
        assert_accurate(problem, exact)


def test_a_difference_of_two_terms_is_measured_on_one() -> None:
    """Means of values do not depend on queries of one channel: their gradient is 0, of two terms that are not."""
    case = next(case for case in CASES if case.uncancelled is not None)
    problem = draw(case, CPU, T=3, K=1)
    exact = evaluate(problem.to(torch.float64), function=call_reference)
    one_term = partial(call_reference, uncancelled=True)
    norm = evaluate(problem.to(torch.float64), function=one_term)["dq"].norm()
    assert exact["dq"].norm() < 1e-8 * norm
    exact["dq"][0, 0, 0, 0] += 0.9e-4 * norm
    assert_accurate(problem, exact)
    exact["dq"][0, 0, 0, 0] += 0.2e-4 * norm
    with pytest.raises(AssertionError, match="^dq is off by"):
        assert_accurate(problem, exact)
