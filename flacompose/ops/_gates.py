"""The bound of gates that are made of rates and time steps."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor, finfo

# Less by 1 than the logarithm of the least number above 0, so that the exponential is 0.
_LOWEST = {
    dtype: log(finfo(dtype).smallest_normal * finfo(dtype).eps) - 1
    for dtype in (torch.float32, torch.float64)
}


def bounded(g: Tensor) -> Tensor:
    """`g`, clamped from below at a bound whose exponential underflows to 0.

    Below it the true gradient is 0. Kernels would give a rounding error, which a huge rate would multiply; the clamp
    gives exactly 0.
    """
    return g.clamp(min=_LOWEST[g.dtype])
