"""Chunks in PyTorch: how sequences are cut into them, how a state goes on, and what a backward returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import ChunkTable, chunk_table, sequence_count

CHUNK = 64  # tokens of a chunk, at most; a power of two


class Chunks:
    """``[B, T, H, ...]`` cut into ``[B, H, R, C, ...]``, padded with zeros that do nothing, and put together again."""

    def __init__(self, q: Tensor, cu_seqlens: Tensor | None) -> None:
        self.B, self.T = q.shape[:2]
        self.N = sequence_count(q, cu_seqlens)
        self.dtype = state_dtype(q.dtype)
        self.size = min(CHUNK, 1 << (self.T - 1).bit_length())
        self.one_each = self.T <= self.size  # whether every sequence is one chunk
        self.table: ChunkTable | None = None
        if cu_seqlens is not None:
            self.table = chunk_table(cu_seqlens, self.T, self.size, self.one_each)
            # Token T stands for all that do not exist.
            self.token = torch.where(self.table.exists, self.table.token, self.T)  # [R, C]

    def split(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype).transpose(1, 2)
        if self.table is None:
            return F.pad(x, (0, 0, 0, -self.T % self.size)).unflatten(2, (-1, self.size))
        return F.pad(x, (0, 0, 0, 1))[:, :, self.token]

    def join(self, x: Tensor) -> Tensor:
        return self.tokens(x).transpose(1, 2).clone(memory_format=torch.contiguous_format)

    def tokens(self, x: Tensor) -> Tensor:
        """``[B, H, T, ...]`` of what lies in chunks; it may be a view."""
        if self.table is None:
            return x.flatten(2, 3)[:, :, : self.T]
        x = torch.where(self.table.exists[:, :, None], x, 0).flatten(2, 3)
        x = x.new_zeros(*x.shape[:2], self.T + 1, x.shape[-1]).index_add(2, self.token.flatten(), x)
        return x[:, :, : self.T]

    def decaying_sweep(
        self, writes: Tensor, decays: Sequence[Tensor], start: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`sweep` of ``S <- S * decays + writes``, all ``[B, H, R, K, V]`` or broadcast to it.

        The states before the chunks may be one matrix of zeros, ``[K, V]``.
        """
        _, H, R, K, V = writes.shape

        def decayed(S: Tensor, at: slice | int) -> Tensor:
            for decay in decays:
                S = S * decay[:, :, at]
            return S

        if self.one_each:  # all at once
            if start is None:
                before, after = writes.new_zeros(K, V), writes
            else:
                before = start.to(writes.dtype).contiguous()
                before = before.unsqueeze(2) if self.table is None else before.transpose(0, 1).unsqueeze(0)
                after = decayed(before, slice(None)) + writes
            end = after[:, :, 0] if self.table is None else after[0].transpose(0, 1)
            return before, end.clone(memory_format=torch.contiguous_format)
        start = writes.new_zeros(self.N, H, K, V) if start is None else start.to(writes.dtype)
        return self.sweep(lambda i, S: decayed(S, i) + writes[:, :, i], R, start, reverse)

    def sweep(
        self, step: Callable[[int, Tensor], Tensor], R: int, start: Tensor, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``S <- step(i, S)`` over the ``R`` chunks, from the states `start`, ``[N, H, K, V]``.

        Returns the state before every chunk, ``[B, H, R, K, V]``, and after the last chunk of each sequence,
        ``[N, H, K, V]``. With `reverse`, backwards in time: the gradient of the state after every chunk, and before
        the first.
        """
        if self.table is None:
            S = start
        else:
            S = torch.zeros_like(start[:1])
            first, last, sequence = self.table.first, self.table.last, self.table.sequence
            begins = (last - 1 if reverse else first)[sequence] == torch.arange(R, device=sequence.device)
        before, after = [S] * R, [S] * R
        for i in reversed(range(R)) if reverse else range(R):
            if self.table is not None:
                S = torch.where(begins[i], start[sequence[i : i + 1]], S)
            before[i] = S
            after[i] = S = step(i, S)
        states = torch.stack(before, 2)
        if self.table is None:
            return states, S.contiguous()
        end = (first if reverse else last - 1).clamp(0, R - 1)
        ended = torch.where((first == last)[:, None, None, None], start, torch.cat(after)[end])
        return states, ended.contiguous()


def gradients(
    inputs: Sequence[Any], output_mask: Sequence[bool], *made: Callable[[], Tensor]
) -> tuple[Tensor, ...]:
    """What a backward returns. Each of `made` gives the gradient of the input in its place, whose dtype it then gets.

    Where the input is absent, or `output_mask` does not want its gradient, it is a tensor without elements.
    """
    return tuple(
        make().to(x.dtype) if wanted and x is not None else inputs[0].new_empty(0)
        for x, wanted, make in zip(inputs, output_mask, made)
    )
