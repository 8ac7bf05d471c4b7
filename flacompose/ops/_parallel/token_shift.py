"""The token shift of RWKV and of every recurrence that reads the token before."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._operators.bounds import verified
from flacompose.ops._parallel.exchange import last_tokens
from flacompose.ops._parallel.ranks import Ranks, sharing
from flacompose.ops._tensors.packed import last_of_rows, last_token, shifted
from flacompose.ops._tensors.sizes import always_true


def token_shift(
    x: Tensor,  # [B, T, ...]
    last: Tensor | None = None,  # [N, ...], the token before the first of each sequence; None for zeros
    lengths: Tensor | None = None,  # [B], the number of tokens of each row before padding
    cu_seqlens: Tensor | None = None,  # [N + 1]
    num_states: int | None = None,  # n, without lengths and cu_seqlens
) -> tuple[Tensor, Tensor]:
    """``x_{t-1}`` for every ``x_t``, like ``x``, and the last token of each sequence, ``[N, ...]``, a new tensor.

    With `num_states` it is the last ``n`` tokens, ``[N, n, ...]``.
    """
    ranks = sharing()
    if ranks is None:
        cu_seqlens = verified(cu_seqlens, x.shape[1])
        before = None if last is None else last.to(x.dtype)
        return shifted(x, before, cu_seqlens), last_of(x, last, lengths, cu_seqlens, num_states)
    before, after = _neighbours(ranks, x, last, lengths, cu_seqlens)
    if always_true(x.shape[1] == 0):  # this rank takes part in the others' backward
        return before[:, None][: x.shape[0], :0], after
    return shifted(x, before, cu_seqlens), after


def last_of(
    x: Tensor,
    before: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    num_states: int | None,
) -> Tensor:
    """The second result of `token_shift`; for a sequence without tokens, the token before it."""
    ranks = sharing()
    if ranks is not None:
        return _neighbours(ranks, x, before, lengths, cu_seqlens)[1]
    if num_states is not None:
        return last_of_rows(x, num_states)
    before = None if before is None else before.to(x.dtype)
    if lengths is None:
        return last_token(x, before, cu_seqlens)
    history = torch.cat([torch.zeros_like(x[:, :1]) if before is None else before.unsqueeze(1), x], 1)
    index = lengths.view(-1, *[1] * (x.ndim - 1)).expand(-1, -1, *x.shape[2:])
    return history.gather(1, index).squeeze(1)


def _neighbours(
    ranks: Ranks, x: Tensor, last: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """The token before this rank's tokens in each sequence, and the last token of all ranks."""
    start = None if last is None else last.unsqueeze(1)
    return [y.squeeze(1) for y in last_tokens(ranks, x, start, 1, lengths, cu_seqlens)]
