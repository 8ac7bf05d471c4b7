"""Where sums of half-precision numbers are taken."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor, *others: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it or one of the others is."""
    return x.to(torch.float64 if torch.float64 in (x.dtype, *(y.dtype for y in others)) else torch.float32)
