"""The error measure of the contract, in one place.

Per tensor, ``||x - truth|| / ||truth||``, the truth being the reference in float64 on the inputs as rounded to the
working dtype. At most

- float64: 1e-10;
- float32: 2e-5, gradients 1e-4;
- bfloat16, float16: 3 times, gradients 4 times, the same error of the yardstick: the reference on those inputs in
  float32, every result rounded to the working dtype. States, and gradients of float32 inputs, are rounded
  too: what a kernel multiplies to make them is in the working dtype.

A truth of 0 has no relative error. There the tensor may be off by 1e-6 of its natural scale: the norm it has when
every gate is 0, so that nothing is forgotten. A tensor that is 0 even then, as the gradient of ``q`` is for
a loss on the state alone, has to be 0 exactly. A norm below the smallest float32 times the natural scale counts
as 0: nothing computed in float32 can tell the two apart.

Nor has a small difference of two large terms a relative error. Where a gradient is one, by its formula, the errors
above, that of the yardstick included, may be those of the first term alone.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .problems import Problem, Results, call_reference, evaluate

VALUES = ("o", "final_state")
FIXED = {torch.float64: (1e-10, 1e-10), torch.float32: (2e-5, 1e-4)}
SLACK = (3, 4)


def error(x: Tensor, truth: Tensor) -> float:
    return distance(x, truth) / size(truth)


def distance(x: Tensor, truth: Tensor) -> float:
    return float(torch.where(x == truth, 0, x.double() - truth.double()).norm())


def size(truth: Tensor) -> float:
    """The norm of its elements that are not infinite: the logsumexp of no tokens is -inf, which is right."""
    return float(torch.where(truth.isinf(), 0, truth.double()).norm())


def is_finite(x: Tensor, truth: Tensor) -> bool:
    return bool((x.isfinite() | (truth.isinf() & (x == truth))).all())


def assert_accurate(problem: Problem, actual: Results, loss: str = "both") -> None:
    """Every tensor of ``actual``, as `problems.evaluate` returns them, is right for that problem."""
    truth = evaluate(problem.to(torch.float64), loss, call_reference)
    yardstick = None
    if problem.dtype not in FIXED:
        yardstick = evaluate(problem.to(torch.float32), loss, call_reference)
    uncancelled = truth
    if problem.case.uncancelled is not None:
        uncancelled = evaluate(problem.to(torch.float64), loss, partial(call_reference, uncancelled=True))
    unforgotten: Results = {}
    assert actual.keys() <= truth.keys()
    for name, x in actual.items():
        exact = truth[name]
        assert x.shape == exact.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(exact.shape)}"
        assert is_finite(x, exact), f"{name} is not finite"
        norm = max(size(exact), size(uncancelled[name]))
        if norm < 1e-30:
            unforgotten = unforgotten or evaluate(
                problem.with_gates(0.0).to(torch.float64), loss, call_reference
            )
            natural = size(unforgotten[name])
            if norm <= torch.finfo(torch.float32).tiny * natural:
                off = distance(x, exact)
                assert off <= 1e-6 * natural, f"{name} is 0, off by {off:.1e} where {natural:.1e} is natural"
                continue
        gradient = name not in VALUES
        if yardstick is None:
            bound = FIXED[problem.dtype][gradient]
        else:
            off = distance(yardstick[name].to(problem.dtype), exact)
            if uncancelled is not truth:
                off = max(off, distance(uncancelled[name].to(problem.dtype), uncancelled[name]))
            bound = SLACK[gradient] * off / norm
        wrong = distance(x, exact) / norm
        assert wrong <= bound, f"{name} is off by {wrong:.2e}, allowed {bound:.2e}"


def assert_close(actual: Results, expected: Results, relative: float) -> None:
    """Two evaluations of one op agree, tensor by tensor, in norm."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        y = expected[name]
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), name
        assert is_finite(x, y), f"{name} is not finite"
        off, norm = distance(x, y), size(y)
        assert off <= relative * norm, f"{name} differs by {off:.1e}, of {norm:.1e}"


def assert_equal(actual: Results, expected: Results) -> None:
    """Two evaluations of one op agree to the bit."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert torch.equal(x, expected[name]), f"{name} differs"
