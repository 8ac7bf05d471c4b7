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
    """The gate `g`, raised to a bound whose exponential is 0 as well, and below it without a gradient.

    There the gradient is 0, but kernels compute it with rounding errors, and a rate may be so large that its product
    with them is anything.
    """
    return g.clamp(min=_LOWEST[g.dtype])
