"""Packed sequences: the tokens and chunks of each sequence, computed on the device."""

from __future__ import annotations

from reprlib import Repr
from typing import NamedTuple

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._tensors.dtensor import replicated

_SHOWN = Repr()
_SHOWN.maxlist = 32


def sequence_count(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number of sequences ``N`` in ``x [B, T, ...]``: one per row of the batch, or the packed ones."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def check_bounds(cu_seqlens: Tensor, T: int) -> None:
    """Check the values of `cu_seqlens` for ``T`` packed tokens. Reading them waits for a GPU."""
    values = cu_seqlens.tolist()
    if values[0] == 0 and values[-1] <= T and values == sorted(values):
        return
    got = f"got {_SHOWN.repr(values)}"
    if values[0] != 0:
        raise ValueError(
            f"cu_seqlens must begin with 0, {got}; the bounds of sequences of given lengths are "
            "F.pad(lengths.cumsum(0), (1, 0))"
        )
    for i, (start, end) in enumerate(zip(values, values[1:])):
        if end < start:
            raise ValueError(f"cu_seqlens must ascend, {got}, where {end} follows {start} at index {i + 1}")
    raise ValueError(f"cu_seqlens must end at the number of tokens T = {T} at most, {got}")


def bounds(cu_seqlens: Tensor, T: int) -> Tensor:
    """``cu_seqlens`` as int64, made to ascend within ``T``: with any values, no access leaves the tokens."""
    return cu_seqlens.long().clamp(0, T).cummax(0).values


def scaled_bounds(cu_seqlens: Tensor | None, factor: int) -> Tensor | None:
    """`cu_seqlens` of sequences with `factor` tokens in place of each."""
    return None if cu_seqlens is None else cu_seqlens.long() * factor


def inside(cu_seqlens: Tensor, T: int) -> Tensor:
    """``[T]``, whether a token is in any sequence."""
    cu = bounds(cu_seqlens, T)
    t = replicated(torch.arange(T, device=cu.device), cu)
    return (t >= cu[0]) & (t < cu[-1])


def without_tail(cu_seqlens: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each ``x [1, T, ...]`` with zeros for the tokens in no sequence; unchanged without `cu_seqlens`.

    It is for PyTorch code in front of an op. Such a token may hold any numbers, and if they are not finite, 0
    times these is NaN. The gradient of a parameter, a sum over all tokens, would then be NaN.
    """
    if cu_seqlens is None:
        return tensors
    tokens = inside(cu_seqlens, tensors[0].shape[1])
    return tuple(x.where(tokens.view(-1, *[1] * (x.ndim - 2)), 0) for x in tensors)


def sequence_of(t: Tensor, cu: Tensor) -> Tensor:
    """The sequence of token ``t``, by `bounds` ``cu``; for a token in no sequence, the first or the last."""
    return (torch.searchsorted(cu, t, right=True) - 1).clamp(0, cu.shape[0] - 2)


def summed(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """``[N, ...]``, the sum of ``x [B, T, ...]`` over the tokens of each sequence."""
    if cu_seqlens is None:
        return x.sum(1)
    (x,) = without_tail(cu_seqlens, x)
    T, cu = x.shape[1], bounds(cu_seqlens, x.shape[1])
    sums = x.new_zeros(cu.shape[0] - 1, *x.shape[2:])
    return sums.index_add(0, sequence_of(torch.arange(T, device=cu.device), cu), x[0])


def of_tokens(x: Tensor, T: int, cu_seqlens: Tensor | None) -> Tensor:
    """``[B, T, ...]``: for each token the row of ``x [N, ...]`` of its sequence, and 0 if it is in none."""
    if cu_seqlens is None:
        return x.unsqueeze(1).expand(-1, T, *[-1] * (x.ndim - 1))
    cu = bounds(cu_seqlens, T)
    n = sequence_of(torch.arange(T, device=cu.device), cu)
    return without_tail(cu_seqlens, x[n].unsqueeze(0))[0]


def shifted(x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """``x_{t-1}`` for every token of ``x [B, T, ...]``; ``before [N, ...]``, or 0, for the first."""
    T, first = x.shape[1], torch.zeros_like(x[:, :1])
    before = None if before is None else before.to(x.dtype)
    if cu_seqlens is None:
        return torch.cat([first if before is None else before.unsqueeze(1), x], 1)[:, :T]
    # Gathered, not scattered: Inductor of PyTorch 2.13 reads scattered places before they are written.
    cu, t = bounds(cu_seqlens, T), torch.arange(T, device=x.device)
    n = sequence_of(t, cu)
    is_first = ((t == cu[n]) & (t < cu[n + 1])).view(-1, *[1] * (x.ndim - 2))
    own = 0 if before is None else before.index_select(0, n).unsqueeze(0)
    return torch.where(is_first, own, torch.cat([first, x], 1)[:, :T])


def last_token(x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """``[N, ...]``, the last token of each sequence of ``x [B, T, ...]``; without tokens ``before``, or 0."""
    if cu_seqlens is None:
        return x.select(1, -1).clone(memory_format=torch.contiguous_format)
    cu = bounds(cu_seqlens, x.shape[1])
    filled = (cu.diff() > 0).view(-1, *[1] * (x.ndim - 2))
    return torch.where(filled, x[0, (cu[1:] - 1).clamp(min=0)], 0 if before is None else before.to(x.dtype))


def last_of_rows(x: Tensor, n: int) -> Tensor:
    """The last ``n`` tokens of ``x [B, T, ...]``, ``[B, n, ...]``, in memory of their own.

    It is not a slice: a compiler would add a guard on whether the slice is all of `x`.
    """
    return torch.stack([x[:, i - n] for i in range(n)], 1)


class ChunkTable(NamedTuple):
    """The chunks of packed sequences, in the order of their tokens; some of them have no tokens."""

    sequence: Tensor  # [R] the sequence that a chunk belongs to
    token: Tensor  # [R, C] its tokens, some of which may not exist
    exists: Tensor  # [R, C] whether such a token is one of the sequence
    first: Tensor  # [N] the first chunk of each sequence
    last: Tensor  # [N] one past its last chunk


def chunk_table(cu_seqlens: Tensor, T: int, C: int, one_each: bool = False) -> ChunkTable:
    """Cut sequences ``cu_seqlens[n] : cu_seqlens[n + 1]`` of ``T`` packed tokens into chunks of ``C``.

    The first chunk of sequence ``n`` has the number ``cu_seqlens[n] // C + n``, which leaves room for all chunks of the
    sequences before it. The capacity, ``ceil(T / C) + N`` chunks, follows from shapes alone: nothing is read on the
    host. With `one_each`, no sequence is longer than a chunk, and a chunk has the number of its sequence.
    """
    N = cu_seqlens.shape[0] - 1
    cu = bounds(cu_seqlens, T)
    begin, end = cu[:-1], cu[1:]
    n = torch.arange(N, device=cu.device)
    first = n if one_each else begin // C + n
    chunk = torch.arange(N if one_each else (T + C - 1) // C + N, device=cu.device)
    sequence = (torch.searchsorted(first, chunk, right=True) - 1).clamp(min=0)
    start = begin[sequence] + (chunk - first[sequence]) * C
    token = start[:, None] + torch.arange(C, device=cu.device)
    exists = (token >= begin[sequence, None]) & (token < end[sequence, None])
    return ChunkTable(sequence, token, exists, first, first + (end - begin + C - 1) // C)
