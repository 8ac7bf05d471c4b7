"""Chunks of 64 tokens in PyTorch: how sequences are cut into them, and the sweep of a state over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import ChunkTable, chunk_table

CHUNK = 64  # at most; a power of two


class Chunks:
    """``[B, T, H, ...]`` cut into ``[B, H, R, C, ...]``, padded with zeros that do nothing, and put together again."""

    def __init__(self, q: Tensor, cu_seqlens: Tensor | None) -> None:
        self.B, self.T = q.shape[:2]
        self.dtype = state_dtype(q.dtype)
        self.size = CHUNK if cu_seqlens is not None else min(CHUNK, 1 << (self.T - 1).bit_length())
        self.table: ChunkTable | None = None
        self.N = self.B
        if cu_seqlens is not None:
            self.N = cu_seqlens.shape[0] - 1
            self.table = chunk_table(cu_seqlens, self.T, CHUNK)
            token = self.table.start[:, None] + torch.arange(CHUNK, device=q.device)
            self.real = token < self.table.end[:, None]  # [R, C]
            self.token = torch.where(self.real, token, self.T)

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
        # Every token has one real place; padding, and tokens in no sequence, meet at T + 1.
        x = torch.where(self.real[:, :, None], x, 0).flatten(2, 3)
        x = x.new_zeros(*x.shape[:2], self.T + 1, x.shape[-1]).index_add(2, self.token.flatten(), x)
        return x[:, :, : self.T]

    def sweep(
        self, writes: Tensor, decays: Sequence[Tensor], start: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``S <- S * decays + writes`` from chunk to chunk, all ``[B, H, R, K, V]`` or broadcast to it.

        Returns the state before every chunk, ``[B, H, R, K, V]``, and after the last chunk of each sequence,
        ``[N, H, K, V]``. With `reverse`, backwards in time: the gradient of the state after every chunk, and before
        the first.
        """
        _, H, R, K, V = writes.shape
        start = writes.new_zeros(self.N, H, K, V) if start is None else start.to(writes.dtype)
        by_chunk = [x.unbind(2) for x in (*decays, writes)]
        table = self.table
        if table is None:
            S = start
        else:
            S = torch.zeros_like(start[:1])
            first, last = (table.last - 1, table.first) if reverse else (table.first, table.last - 1)
        entering, leaving = [], []
        for i in reversed(range(R)) if reverse else range(R):
            if table is not None:
                n = table.sequence[i : i + 1].clamp(max=self.N - 1)
                S = torch.where((first[n] == i)[:, None, None, None], start[n], S)
            entering.append(S)
            *factors, write = (x[i] for x in by_chunk)
            for factor in factors:
                S = S * factor
            S = S + write
            leaving.append(S)
        if reverse:
            entering, leaving = entering[::-1], leaving[::-1]
        if table is not None:
            empty = (table.first == table.last)[:, None, None, None]
            S = torch.where(empty, start, torch.cat(leaving)[last.clamp(0, R - 1)])
        return torch.stack(entering, 2), S.contiguous()
