"""Gates as logarithms: of a sigmoid, and of rates times time steps, with their bound."""

from __future__ import annotations

from math import inf, log

import torch
import torch.nn.functional as F
from torch import Tensor, finfo

from flacompose.ops._tensors.dtype import upcast


def lowest(dtype: torch.dtype) -> float:
    """The logarithm of the smallest number above 0, minus 1, so that its exponential is 0.

    A function, since Dynamo would take a number of the module for an input of the graph.
    """
    return log(finfo(dtype).smallest_normal * finfo(dtype).eps) - 1


def log_sigmoid(x: Tensor) -> Tensor:
    """``log(sigmoid(x))``, by a function whose gradient DTensor supports, unlike that of `F.logsigmoid`."""
    # Above its threshold `softplus` returns its argument, which is exact from 40 on even in float64.
    return -F.softplus(-x, threshold=40)


def bounded(g: Tensor) -> Tensor:
    """`g`, clamped from below at a bound whose exponential underflows to 0.

    Below the bound the true gradient is 0. Kernels would return a rounding error, which a huge rate would
    multiply; the clamp returns exactly 0.
    """
    return g.clamp(min=lowest(g.dtype))


def time_step(
    dt: Tensor, dt_bias: Tensor | None, softplus: bool, x: Tensor, limit: tuple[float, float] | None = None
) -> Tensor:
    """`dt` with its bias, through softplus if asked, within `limit`; upcast as by `upcast(dt, x)`."""
    dt = upcast(dt, x) if dt_bias is None else dt + upcast(dt_bias, dt, x)
    if softplus:
        dt = F.softplus(dt)
    if limit is None or (softplus and tuple(limit) == (0.0, inf)):  # a softplus is at least 0
        return dt
    return dt.clamp(*limit)


def forgets(A: Tensor) -> Tensor:
    """Whether a rate is so large, above 1.2e30 in float32, that it gives time steps no gradient.

    Every time step that is not nearly 0 then decays the state to zero. The gradient of a step of 0 could
    overflow, and would be NaN if a mask, or a softplus that underflows, has made that step 0.
    """
    return A < finfo(A.dtype).min / 2**28


def log_decay(dt: Tensor, A: Tensor) -> Tensor:
    """``dt * A``, with the lowest finite rate in place of -inf, which times a time step of 0 would be NaN."""
    return torch.where(forgets(A), dt.detach(), dt) * A.clamp(min=finfo(A.dtype).min)
