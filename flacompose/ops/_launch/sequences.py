"""The layout of the tokens of one call, in sequences, chunks and segments, and memory for each of these."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flacompose.ops._launch.chip import chip_of
from flacompose.ops._launch.launch import launches_into_graph
from flacompose.ops._tensors.packed import bounds


class Axes(NamedTuple):
    """Sizes of the contracted axis and of the written axis of a state, and their strides in it."""

    D1: int
    D2: int
    stride1: int
    stride2: int


class Sequences:
    """The sequences of ``x [B, T, ...]``: its rows, or with `cu_seqlens` the parts of its one row.

    Each is cut into chunks of `C` tokens. Kernels number the chunks of all sequences as in `find_chunk`.
    `chunks` is the capacity: it depends on shapes only, so that nothing is read on the host.
    """

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, C: int = 1) -> None:
        self.B, self.T = x.shape[:2]
        self.C = C
        # PyTorch 2.11's Inductor clones memory that a kernel in its graph fills, and fails if the batch axis
        # of that memory is 1. So `batched` adds the batch axis last.
        self.tokens = (self.B * self.T,) if launches_into_graph() else (self.B, self.T)
        self.device = x.device
        self.chip = chip_of(x.device)
        self.chunks_of_row = (self.T + C - 1) // C
        if cu_seqlens is None:
            self.cu_seqlens, self.N = None, self.B
            self.chunks = self.B * self.chunks_of_row
        else:
            self.cu_seqlens, self.N = bounds(cu_seqlens, self.T), cu_seqlens.shape[0] - 1
            self.chunks = self.chunks_of_row + self.N
        # Kernels find sequences and chunks from `positions`. `arguments` are common to all launches of a
        # call; subclasses add theirs.
        self.positions: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "T": self.T, "N": self.N}
        self.arguments = dict(self.positions)

    def per_token(self, *shape: int, dtype: torch.dtype, every: bool = False) -> Tensor:
        """Memory for an output of each token, ``[B, T, *shape]`` after `batched`.

        With packed sequences it is filled with zeros, since kernels do not visit the tokens outside them.
        With `every` they do.
        """
        new = torch.empty if every or self.cu_seqlens is None else torch.zeros
        return new(*self.tokens, *shape, dtype=dtype, device=self.device)

    def batched(self, x: Tensor) -> Tensor:
        """``[B, T, ...]``, a view of memory from `per_token`."""
        return x if len(self.tokens) == 2 else x.view(self.B, self.T, *x.shape[1:])

    def per_chunk(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for ``[chunks, *shape]``.

        One more chunk is allocated than is used: PyTorch would guard on whether a leading symbolic dimension
        is 1.
        """
        return torch.empty(self.chunks + 1, *shape, dtype=dtype, device=self.device)

    def per_sequence(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.N, *shape, dtype=dtype, device=self.device)

    def per_segment(self, segments: int, *shape: int) -> Tensor:
        """`per_segment` of this module, for these sequences."""
        return per_segment(segments, self.N, *shape, device=self.device)

    def segments(self, units: int, programs: int, least: int = 1) -> tuple[int, bool]:
        """`segment_count` of a row of `units`, with `programs` per sequence, and whether it may exceed 1."""
        count = segment_count(units, programs if self.cu_seqlens is None else programs * self.N, least)
        return count, not (isinstance(count, int) and count == 1)


class MatrixSequences(Sequences):
    """The sequences of ``q [B, T, H, K]`` and ``v [B, T, HV, V]``, with a matrix state per head of `v`."""

    def __init__(self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, C: int) -> None:
        super().__init__(q, cu_seqlens, C)
        self.K, (self.H, self.V) = q.shape[3], v.shape[2:]
        self.bfloat16 = q.dtype == torch.bfloat16
        # The dtype of factors of products. Float16 inputs are float32 here.
        self.dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        self.arguments |= {"H": self.H, "scale": scale, "DOT": tl.bfloat16 if self.bfloat16 else tl.float32}

    def state(self, dtype: torch.dtype) -> Tensor:
        return self.per_sequence(self.H, self.K, self.V, dtype=dtype)

    def per_chunk_state(self) -> Tensor:
        """Memory for a state of each chunk."""
        return self.per_chunk(self.H, self.K, self.V, dtype=self.dtype)

    def axes(self, transpose: bool) -> Axes:
        return Axes(self.V, self.K, 1, self.V) if transpose else Axes(self.K, self.V, self.V, 1)


def per_segment(segments: int, N: int, *shape: int, device: torch.device) -> Tensor:
    """Memory for ``[segments, N, *shape]``, and one segment more, as in `Sequences.per_chunk`."""
    return torch.empty(segments + 1, N, *shape, dtype=torch.float32, device=device)


def segment_count(units: int, programs: int, least: int = 1) -> int:
    """The number of segments of `units` (mostly chunks), with `programs` each, that fill a large chip.

    Fewer than `least` segments would not be faster than one, so it is 1 or a multiple of `least`. It depends
    on the shape of one row only, so that the bits of a row do not depend on the batch size.
    """
    # `max` and `min` would add a guard on a symbolic length.
    return torch.sym_max(1, torch.sym_min(units // (64 * least), 512 // (programs * least)) * least)
