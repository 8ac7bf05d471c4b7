"""The exchange of sequence parallel calls outside operators: last tokens, sums and logarithms.

Each function takes the result of this rank's own tokens, and the state before the tokens of all ranks. It
returns the state before this rank's tokens, and the state after those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._parallel.ranks import Ranks, of_all, refuse_second_derivatives
from flacompose.ops._tensors.dtensor import by_channels
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import bounds, sequence_of
from flacompose.ops._tensors.sizes import always_true


def last_tokens(
    ranks: Ranks,
    x: Tensor,  # [B, T, ...], this rank's tokens
    before: Tensor | None,  # [N, W, ...], the newest last; None for zeros
    W: int,
    lengths: Tensor | None = None,  # [B], the number of tokens of each row before padding
    cu_seqlens: Tensor | None = None,
) -> Sequence[Tensor]:
    """The last ``W`` tokens of each sequence, ``[N, W, ...]``, from several ranks if one has fewer."""
    if hasattr(x, "device_mesh"):
        return by_channels(partial(_last_tokens, ranks, W), x, before, lengths, cu_seqlens)
    return _last_tokens(ranks, W, x, before, lengths, cu_seqlens)


def _last_tokens(
    ranks: Ranks,
    W: int,
    x: Tensor,
    before: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, T = x.shape[:2]
    of_token, ones = x.shape[2:], [1] * (x.ndim - 2)
    column, t = torch.arange(W, device=x.device), torch.arange(T, device=x.device)
    if cu_seqlens is None:
        count = torch.full((B,), T, device=x.device) if lengths is None else lengths.long()
        row = torch.arange(B, device=x.device)[:, None]
        end, sequence = count, row.expand(-1, T)
    else:
        cu = bounds(cu_seqlens, T)
        count, end, sequence = cu.diff(), cu[1:], sequence_of(t, cu)[None]
        row = torch.zeros_like(end)[:, None]
    if always_true(T == 0):
        # An empty sum, not a constant: a compiler would merge gathers of constants, and the ranks with tokens
        # would have more gathers.
        window = x.sum((0, 1)).expand(len(count), W, *of_token)
    else:
        place = end[:, None] - W + column  # [N, W]
        place = torch.where(count[:, None] + column >= W, place, -1)  # -1 for none
        window = _Window.apply(x, row, place, sequence, t - end[sequence] + W)
    # A sequence that has W tokens here needs none from before them. Counts are sent in the dtype of the
    # tokens: bfloat16 represents all integers up to 256.
    count, sent = count.clamp(max=W), window if W <= 256 else upcast(window)
    rows = of_all(ranks, torch.cat([sent.flatten(1), count[:, None].to(sent.dtype)], 1))
    windows, counts = rows[..., :-1].unflatten(2, (W, *of_token)).to(x.dtype), rows[..., -1].detach().long()
    state = torch.zeros_like(window) if before is None else before.to(x.dtype)
    states = [state]
    for rank in range(ranks.size):
        moved = column + counts[rank][:, None]  # [N, W]
        kept = (moved[:, :, None] == column).view(-1, W, W, *ones)
        state = torch.where(kept, state.unsqueeze(1), 0).sum(2) + windows[rank]
        states.append(state)
    # Selected from the states of all ranks, so that the first rank's graph has the gather too: all ranks run
    # its backward.
    return torch.stack(states)[ranks.rank], state


class _Window(torch.autograd.Function):
    """``x[row, place]``, and zeros where `place` is -1.

    Its gradient is gathered, not added up by ``index_put_``: Inductor of PyTorch 2.13 moved that after its
    readers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, place: Tensor, sequence: Tensor, column: Tensor) -> Tensor:
        ctx.save_for_backward(sequence, column)  # of each token, [B, T]
        ctx.W = place.shape[1]
        return torch.cat([x.new_zeros(x.shape[0], 1, *x.shape[2:]), x], 1)[row, place + 1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivatives()
        sequence, column = ctx.saved_tensors
        dx = grads[0][sequence, column.clamp(0, ctx.W - 1)]
        inside = ((column >= 0) & (column < ctx.W)).view(*column.shape, *[1] * (dx.ndim - 2))
        return torch.where(inside, dx, 0), None, None, None, None


def sums(ranks: Ranks, total: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of numbers, ``[N, ...]``: before this rank, and of all ranks."""
    rows = of_all(ranks, total)
    return before + rows[: ranks.rank].sum(0), before + rows.sum(0)


def logsumexps(ranks: Ranks, total: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The logsumexp of finite logits, ``[N, ...]``: before this rank, and of all ranks."""
    rows = torch.cat([before[None], of_all(ranks, total)])
    return rows[: ranks.rank + 1].logsumexp(0), rows.logsumexp(0)
