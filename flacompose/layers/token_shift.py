"""The token shift of RWKV: for every token, the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._parallel.token_shift import token_shift as token_shift  # for the layers
from flacompose.ops._tensors.dtype import autocast_dtype


def as_projected(x: Tensor) -> Tensor:
    """``x`` in the dtype that projections give, so that the last token, which is a state, has it too."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)
