"""Where sums of half-precision numbers are taken."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it already is."""
    return x if x.dtype == torch.float64 else x.float()
