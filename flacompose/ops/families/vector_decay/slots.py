"""Launches for the softmax of slots' logits, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops.families._launch import block, tile_count
from flacompose.ops.families.vector_decay.kernels import softmax_kernel


def softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The softmax of the last axis, computed in float32."""
    p = torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)
    _launch(logits.contiguous(), None, p)
    return p


def softmax_gradient(logits: Tensor, dp: Tensor) -> Tensor:
    """The gradient of `logits` from that of their softmax."""
    d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _launch(logits.contiguous(), dp, d_logits)
    return d_logits


def _launch(logits: Tensor, dp: Tensor | None, out: Tensor) -> None:
    B, T, H, M = logits.shape
    N, BM = B * T * H, block(M, 256)
    ROWS = 4096 // BM
    grid = (tile_count(N, ROWS),)
    launch(softmax_kernel, grid, logits=logits, dp=dp, out=out, N=N, M=M, ROWS=ROWS, BM=BM)
