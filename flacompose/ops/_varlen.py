"""Packed sequences: which chunk of which sequence each row of work is, computed on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ChunkTable(NamedTuple):
    """One row per chunk, in sequence order; rows past the last chunk, one at least, have no tokens."""

    sequence: Tensor  # [R] the sequence a row belongs to, N for unused rows
    start: Tensor  # [R] its first token
    end: Tensor  # [R] the end of its sequence
    first: Tensor  # [N] the first row of each sequence
    last: Tensor  # [N] one past its last row


def bounds(cu_seqlens: Tensor, T: int) -> Tensor:
    """``cu_seqlens`` as int64, made to ascend within ``T``: whatever it holds, no access leaves the tokens."""
    return cu_seqlens.long().clamp(0, T).cummax(0).values


def inside(cu_seqlens: Tensor, T: int) -> Tensor:
    """``[T]``, whether a token is in any sequence."""
    cu = bounds(cu_seqlens, T)
    t = torch.arange(T, device=cu.device)
    return (t >= cu[0]) & (t < cu[-1])


def sequence_of(t: Tensor, cu: Tensor) -> Tensor:
    """Which of the sequences within `bounds` ``cu`` token ``t`` is in; the first or the last, if in none."""
    return (torch.searchsorted(cu, t, right=True) - 1).clamp(0, cu.shape[0] - 2)


def chunk_table(cu_seqlens: Tensor, T: int, C: int) -> ChunkTable:
    """Cut sequences ``cu_seqlens[n] : cu_seqlens[n + 1]`` of ``T`` packed tokens into chunks of ``C``.

    The capacity, ``ceil(T / C) + N`` rows, depends on shapes alone, so nothing is read on the host. It is one more
    than there can be chunks, so that it is never 1, which is a special shape to the compiler.
    """
    N = cu_seqlens.shape[0] - 1
    rows = (T + C - 1) // C + N
    cu = bounds(cu_seqlens, T)
    # Kept N + 1 long, a leading empty sequence included, so that N = 1 is no special shape to the compiler.
    previous = torch.cat([cu[:1], cu])[:-1]
    ends = ((cu - previous + C - 1) // C).cumsum(0)
    row = torch.arange(rows, device=cu.device)
    sequence = torch.searchsorted(ends, row, right=True) - 1
    used = sequence.clamp(max=N - 1)
    start = cu[used] + (row - ends[used]) * C
    return ChunkTable(
        sequence, torch.where(sequence < N, start, cu[used + 1]), cu[used + 1], ends[:-1], ends[1:]
    )
