"""The dtypes in which sums of half-precision numbers are taken."""

from __future__ import annotations

import torch
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of states for inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(x: Tensor, *others: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if `x` or one of the `others` is float64."""
    widest = torch.float64 if any(y.dtype == torch.float64 for y in others) else x.dtype
    return x.to(state_dtype(widest))
