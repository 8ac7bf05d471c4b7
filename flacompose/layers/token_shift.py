"""The token shift of RWKV: for every token, the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.layers.layout import take
from flacompose.ops import _states
from flacompose.ops._carry import last_tokens
from flacompose.ops._dtype import autocast_dtype
from flacompose.ops._ranks import shared, sharing
from flacompose.ops._sizes import always_true
from flacompose.ops._varlen import bounds, sequence_count, sequence_of


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
    B, T, D = x.shape
    N = sequence_count(x, cu_seqlens)
    last = x.new_zeros(N, D) if last is None else last.to(x.dtype)
    ranks = sharing()
    if ranks is not None:
        start, after = last_tokens(ranks, x, last[:, None], 1, lengths, cu_seqlens)
        if always_true(T == 0):
            return start[:B, :0], after[:, 0]
        with shared(None):
            return token_shift(x, start[:, 0], lengths, cu_seqlens)[0], after[:, 0]
    if cu_seqlens is not None:
        return _packed(x, last, cu_seqlens)
    history = torch.cat([last.unsqueeze(1), x], dim=1)
    if num_states is not None:
        return history[:, :T], _states.last(x, num_states)
    if lengths is None:
        last = history[:, -1]
    else:
        last = take(history, lengths[:, None]).squeeze(1)
    return history[:, :T], last.clone(memory_format=torch.contiguous_format)


def _packed(x: Tensor, last: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    T = x.shape[1]
    cu = bounds(cu_seqlens, T)
    begin, end = cu[:-1], cu[1:]
    t = torch.arange(T, device=x.device)
    sequence = sequence_of(t, cu)
    is_first = (t == begin[sequence])[:, None]
    shifted = torch.where(is_first, last[sequence], x[0, (t - 1).clamp(min=0)])
    return shifted[None], torch.where((begin < end)[:, None], x[0, (end - 1).clamp(min=0)], last)
