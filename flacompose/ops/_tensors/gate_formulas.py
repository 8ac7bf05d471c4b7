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


def clamped(g: Tensor) -> Tensor:
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
    # At its bounds, PyTorch 2.14 gives `clamp` no gradient. Earlier versions and the kernels give one.
    least, most = limit
    outside = dt < least if most == inf else (dt < least) | (dt > most)
    return torch.where(outside, dt.detach().clamp(least, most), dt)


def decays_to_zero(A: Tensor) -> Tensor:
    """Where a rate is so low that every time step above 1e-29 decays the state to zero.

    Such a rate passes no gradient to time steps. Only a step near 0 would have one. It could overflow, and would
    be NaN after the product with 0 that a mask or a softplus that underflows takes.
    """
    return A < (-1e300 if A.dtype == torch.float64 else -1e31)


def log_decay_of_step(dt: Tensor, A: Tensor) -> Tensor:
    """``dt * A``, with the lowest finite rate in place of -inf, which times a time step of 0 would be NaN."""
    return torch.where(decays_to_zero(A), dt.detach(), dt) * A.clamp(min=finfo(A.dtype).min)
