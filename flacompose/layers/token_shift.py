"""The token shift of RWKV: the previous token of every token."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._parallel.token_shift import token_shift as token_shift  # for the layers
from flacompose.ops._tensors.dtype import autocast_dtype


def as_projected(x: Tensor) -> Tensor:
    """``x`` in the dtype of the projections' outputs, which the last token, a state, shall have."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)
