"""Chunks in PyTorch: how sequences are cut into chunks, and state passing from one chunk to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._tensors.dtype import state_dtype
from flacompose.ops._tensors.packed import ChunkTable, chunk_table, sequence_count

CHUNK = 64  # tokens of a chunk, at most; a power of two
CACHE_BLOCK = 1 << 18  # elements of the largest tensor of a cache block


class Chunks:
    """``[B, T, H, ...]`` cut into ``[B, H, R, C, ...]``, padded with zeros, and joined again.

    `at` are the numbers of these R chunks: all, or those of a cache block of the tokens. Packed sequences that
    have `one_each` are rows of a batch, ``[N, H, 1, C, ...]``.
    """

    def __init__(self, q: Tensor, cu_seqlens: Tensor | None) -> None:
        self.B, self.T = q.shape[:2]
        self.N = sequence_count(q, cu_seqlens)
        self.dtype = state_dtype(q.dtype)
        self.size = min(CHUNK, 1 << (self.T - 1).bit_length())
        self.one_each = self.T <= self.size  # whether every sequence is one chunk
        self.table: ChunkTable | None = None
        if cu_seqlens is not None:
            self.table = chunk_table(cu_seqlens, self.T, self.size, self.one_each)
            # T stands for a place of a chunk without a token.
            self.token = torch.where(self.table.exists, self.table.token, self.T)  # [R, C]
        packed = self.table is not None and not self.one_each
        self.at = range(len(self.token) if packed else -(-self.T // self.size))

    def cache_blocks(self, elements: int) -> list[Chunks]:
        """These chunks in cache blocks; the largest tensor has `elements` for each chunk.

        The blocks are computed one after the other, so their tensors reuse the same memory, which stays in
        the cache.
        """
        length, blocks = max(1, CACHE_BLOCK // max(1, elements)), []
        for begin in self.at[::length]:
            block = copy(self)
            block.at = self.at[begin : begin + length]
            blocks.append(block)
        return blocks

    def split(self, x: Tensor) -> Tensor:
        first, last = self.at.start, self.at.stop
        if self.table is not None:
            rows = slice(None) if self.one_each else slice(first, last)
            token, exists = self.token[rows], self.table.exists[rows, :, None]
            # Contiguous first: products would inherit the strides of `x` from indexing, and their bits depend
            # on them.
            x = x.contiguous().transpose(1, 2)[:, :, token.clamp(max=self.T - 1)]
            x = torch.where(exists, x, 0).to(self.dtype)
            return x.transpose(0, 2).contiguous() if self.one_each else x
        x = x[:, first * self.size : last * self.size].to(self.dtype).transpose(1, 2).contiguous()
        if padding := -x.shape[2] % self.size:
            x = F.pad(x, (0, 0, 0, padding))
        return x.unflatten(2, (-1, self.size))

    def join(self, *blocks: Tensor) -> Tensor:
        """``[B, T, H, ...]`` from the chunks of all tokens, given whole or by cache blocks."""
        if self.table is not None:
            x = self.tokens(torch.cat(blocks, 2)).transpose(1, 2)
            return x.clone(memory_format=torch.contiguous_format)
        tokens = [x.flatten(2, 3).transpose(1, 2) for x in blocks]
        tokens[-1] = tokens[-1][:, : self.T - sum(x.shape[1] for x in tokens[:-1])]
        x = torch.cat(tokens, 1)
        # `contiguous` keeps any stride of an axis of size 1, such as that of a single token; `clone` does
        # not.
        return x.clone(memory_format=torch.contiguous_format) if self.one_each else x.contiguous()

    def tokens(self, x: Tensor) -> Tensor:
        """``[B, H, T, ...]`` from chunks; it may be a view."""
        if self.table is None:
            return x.flatten(2, 3)[:, :, : self.T]
        x = x.transpose(0, 2) if self.one_each else x
        x = torch.where(self.table.exists[:, :, None], x, 0).flatten(2, 3)
        x = x.new_zeros(*x.shape[:2], self.T + 1, x.shape[-1]).index_add(2, self.token.flatten(), x)
        return x[:, :, : self.T]

    def pass_decayed(
        self, ends: Tensor, decays: Sequence[Tensor], start: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`pass_states` of ``S <- S * decays + ends``, all ``[B, H, R, K, V]`` or broadcast to it."""
        _, H, R, K, V = ends.shape

        def step(i: int, S: Tensor) -> Tensor:
            for decay in decays:
                S = S * decay[:, :, i]
            return S + ends[:, :, i]

        start = ends.new_zeros(self.N, H, K, V) if start is None else start.to(ends.dtype)
        return self.pass_states(step, R, start, reverse)

    def pass_states(
        self, step: Callable[[int, Tensor], Tensor], R: int, start: Tensor, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """State passing over all ``R`` chunks: the state before each, and after the last of each sequence."""
        passing = StatePassing(self, start, reverse)
        return passing.over(range(R), step), passing.end()


class StatePassing:
    """State passing over the chunks, from the states `start`, ``[N, H, K, V]``, before the sequences.

    With `reverse` the gradient of the state goes backwards in time, from its values after the sequences.
    """

    def __init__(self, chunks: Chunks, start: Tensor, reverse: bool = False) -> None:
        self.table = None if chunks.one_each else chunks.table
        self.start, self.reverse = start, reverse
        self.S = start
        if self.table is not None:
            self.S = torch.zeros_like(start[:1])
            first, last, sequence = self.table.first, self.table.last, self.table.sequence
            number = torch.arange(len(sequence), device=sequence.device)
            self.begins = (last - 1 if reverse else first)[sequence] == number
            self.after = [self.S] * len(sequence)

    def over(self, at: range, step: Callable[[int, Tensor], Tensor]) -> Tensor:
        """``S <- step(i, S)`` for each of the chunks `at`; `i` counts them from 0.

        Returns the state before every chunk, ``[B, H, R, K, V]``. With `reverse`, the gradient of the state
        after every chunk.
        """
        before = [self.S] * len(at)
        for i in reversed(range(len(at))) if self.reverse else range(len(at)):
            number = at[i]
            if self.table is not None:
                sequence = self.table.sequence[number : number + 1]
                self.S = torch.where(self.begins[number], self.start[sequence], self.S)
            before[i] = self.S
            self.S = step(i, self.S)
            if self.table is not None:
                self.after[number] = self.S
        return torch.stack(before, 2) if len(at) > 1 else before[0].unsqueeze(2)

    def end(self) -> Tensor:
        """The state after the last chunk of each sequence, ``[N, H, K, V]``, or its gradient before the first."""
        if self.table is None:
            return self.S.contiguous()
        first, last = self.table.first, self.table.last
        end = (first if self.reverse else last - 1).clamp(0, len(self.after) - 1)
        ended = torch.cat(self.after)[end]
        return torch.where((first == last)[:, None, None, None], self.start, ended).contiguous()
