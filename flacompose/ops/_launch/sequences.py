"""How the tokens of one call lie: in sequences, these in chunks and segments, with memory for each of them."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flacompose.ops._launch.chip import chip_of
from flacompose.ops._launch.launch import launches_into_graph
from flacompose.ops._tensors.packed import bounds


class Sequences:
    """The sequences of ``x [B, T, ...]``: its rows, or with `cu_seqlens` the parts of its one row.

    Each is cut into chunks of `C` tokens. Kernels number the chunks of all sequences as `find_chunk` says; `chunks` is
    the capacity, which depends on shapes alone, so that nothing is read on the host.
    """

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, C: int = 1) -> None:
        self.B, self.T = x.shape[:2]
        self.C = C
        # PyTorch 2.11's Inductor clones memory that a kernel in its graph fills, and fails to where the batch axis is
        # 1. So that memory gets its batch axis last, from `batched`.
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
        # From `positions`, kernels find sequences and chunks. `arguments` are those of all launches of a family, which
        # adds its own.
        self.positions: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "T": self.T, "N": self.N}
        self.arguments = dict(self.positions)

    def per_token(self, *shape: int, dtype: torch.dtype, every: bool = False) -> Tensor:
        """Memory for an output of each token, which is ``[B, T, *shape]`` after `batched`.

        It is filled with zeros if there are packed sequences, since kernels do not visit the tokens outside of them.
        With `every` they do.
        """
        new = torch.empty if every or self.cu_seqlens is None else torch.zeros
        return new(*self.tokens, *shape, dtype=dtype, device=self.device)

    def batched(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` of what `per_token` gave."""
        return x if len(self.tokens) == 2 else x.view(self.B, self.T, *x.shape[1:])

    def per_chunk(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for ``[chunks, *shape]``.

        One more is allocated than is used: PyTorch would guard on whether a leading symbolic dimension is 1.
        """
        return torch.empty(self.chunks + 1, *shape, dtype=dtype, device=self.device)

    def per_sequence(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.N, *shape, dtype=dtype, device=self.device)

    def per_segment(self, segments: int, *shape: int) -> Tensor:
        """As `per_segment` of this module, for these sequences."""
        return per_segment(segments, self.N, *shape, device=self.device)

    def segments(self, units: int, programs: int, least: int = 1) -> tuple[int, bool]:
        """`segment_count` of a row of `units`, if `programs` sweep a sequence, and whether it may be more than 1."""
        count = segment_count(units, programs if self.cu_seqlens is None else programs * self.N, least)
        return count, not (isinstance(count, int) and count == 1)


class MatrixSequences(Sequences):
    """The sequences of ``q [B, T, H, K]`` and ``v [B, T, HV, V]``, whose states are a matrix for each head of `v`."""

    def __init__(self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, C: int) -> None:
        super().__init__(q, cu_seqlens, C)
        self.K, (self.H, self.V) = q.shape[3], v.shape[2:]
        self.bfloat16 = q.dtype == torch.bfloat16
        # Of the factors of products. Those in float16 are float32 here.
        self.dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        self.arguments |= {"H": self.H, "scale": scale, "DOT": tl.bfloat16 if self.bfloat16 else tl.float32}

    def state(self, dtype: torch.dtype) -> Tensor:
        return self.per_sequence(self.H, self.K, self.V, dtype=dtype)

    def per_chunk_state(self) -> Tensor:
        """Memory for a state of each chunk."""
        return self.per_chunk(self.H, self.K, self.V, dtype=self.dtype)

    def axes(self, transpose: bool) -> dict[str, int]:
        """Sizes and strides in a state of the axis that is contracted and of the one that is written."""
        K, V = self.K, self.V
        D1, D2, stride1, stride2 = (V, K, 1, V) if transpose else (K, V, V, 1)
        return {"D1": D1, "D2": D2, "stride1": stride1, "stride2": stride2}


def per_segment(segments: int, N: int, *shape: int, device: torch.device) -> Tensor:
    """Memory for ``[segments, N, *shape]``, and one segment more, as in `Sequences.per_chunk`."""
    return torch.empty(segments + 1, N, *shape, dtype=torch.float32, device=device)


def segment_count(units: int, programs: int, least: int = 1) -> int:
    """Parts in which to sweep a sequence of `units` (chunks, mostly), `programs` to a part: enough for a large chip.

    Fewer than `least` parts would not be faster than one, so it is 1 or a multiple of `least`. It depends
    on the shape of one row alone, so that the bits of a row do not depend on the batch size.
    """
    # Not `max` and `min`, which would add a guard on a symbolic length.
    return torch.sym_max(1, torch.sym_min(units // (64 * least), 512 // (programs * least)) * least)
