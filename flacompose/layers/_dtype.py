"""Where sums of half-precision numbers are taken, and whether autocast picks the precision of products."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it already is."""
    return x if x.dtype == torch.float64 else x.float()


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is on; a device that has none, as meta, may not be asked."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
