"""The token shift of RWKV: for every token, the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.layers.layout import take
from flacompose.ops import _states
from flacompose.ops._dtype import autocast_dtype
from flacompose.ops._varlen import last_token, shifted


def as_projected(x: Tensor) -> Tensor:
    """``x`` in the dtype that projections give, so that the last token, which is a state, has it too."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def token_shift(
    x: Tensor,  # [B, T, D]
    last: Tensor | None = None,  # [N, D], the token before the first of each sequence; None for zeros
    lengths: Tensor | None = None,  # [B], how many tokens of each row count
    cu_seqlens: Tensor | None = None,  # [N + 1]
    num_states: int | None = None,  # n, without lengths and cu_seqlens
) -> tuple[Tensor, Tensor]:
    """``x_{t-1}`` for every ``x_t``, ``[B, T, D]``, and the last token of each sequence, ``[N, D]``, a new tensor.

    With `num_states` it is the last ``n`` tokens, ``[N, n, D]``.
    """
    before = None if last is None else last.to(x.dtype)
    y = shifted(x, before, cu_seqlens)
    if num_states is not None:
        return y, _states.last(x, num_states)
    if lengths is None:
        return y, last_token(x, before, cu_seqlens)
    history = torch.cat([torch.zeros_like(x[:, :1]) if before is None else before.unsqueeze(1), x], 1)
    return y, take(history, lengths[:, None]).squeeze(1)
