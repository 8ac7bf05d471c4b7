"""Launches of the softmax of slots' logits, and of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._recurrences.matrix.channel_decay.kernels import slot_softmax_kernel
from flacompose.ops._tensors.sizes import MAX_HEAD_SIZE


def softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The softmax of the last axis, computed in float32."""
    return _launch(logits, None, dtype)


def softmax_gradient(logits: Tensor, dp: Tensor) -> Tensor:
    """The gradient of `logits` from the gradient of their softmax."""
    return _launch(logits, dp, logits.dtype)


def _launch(logits: Tensor, dp: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)
    B, T, H, M = logits.shape
    # A program has whole rows.
    N, BM = B * T * H, block(M, MAX_HEAD_SIZE)
    ROWS = 4096 // BM
    grid = (tile_count(N, ROWS),)
    launch(slot_softmax_kernel, grid, logits.contiguous(), dp, out, N=N, M=M, ROWS=ROWS, BM=BM)
    return out
