"""The dtypes of sums of half-precision numbers, and the dtypes that autocast casts to."""

from __future__ import annotations

import torch
from torch import Tensor

AUTOCAST_DEVICES = ("cpu", "cuda")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of states for inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(x: Tensor, *others: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if `x` or one of the `others` is float64."""
    widest = torch.float64 if any(y.dtype == torch.float64 for y in others) else x.dtype
    return x.to(state_dtype(widest))


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x * y`` for `y` of the shape of `x`, rounded once, to the dtype of `x`."""
    if x.dtype == y.dtype:  # PyTorch multiplies in float32, and the backward keeps no wider copies of both
        return x * y
    return (upcast(x, y) * y).to(x.dtype)


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for `device`. PyTorch raises an error for a device without autocast."""
    return device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to, or None if it is off."""
    return torch.get_autocast_dtype(device.type) if autocast_on(device) else None
