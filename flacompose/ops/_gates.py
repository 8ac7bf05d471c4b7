"""Gates as logarithms: of a sigmoid, and the bound of those that are made of rates and time steps."""

from __future__ import annotations

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, finfo

# Less by 1 than the logarithm of the least number above 0, so that the exponential is 0.
LOWEST = {
    dtype: log(finfo(dtype).smallest_normal * finfo(dtype).eps) - 1
    for dtype in (torch.float32, torch.float64)
}


def log_sigmoid(x: Tensor) -> Tensor:
    """``log(sigmoid(x))``, made of a function whose gradient DTensor has, unlike that of `F.logsigmoid`."""
    # Above its threshold `softplus` returns its argument, which from 40 on is exact even in float64.
    return -F.softplus(-x, threshold=40)


def bounded(g: Tensor) -> Tensor:
    """`g`, clamped from below at a bound whose exponential underflows to 0.

    Below it the true gradient is 0. Kernels would give a rounding error, which a huge rate would multiply; the clamp
    gives exactly 0.
    """
    return g.clamp(min=LOWEST[g.dtype])
