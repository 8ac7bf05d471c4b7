"""The softmax of slots' logits, and its gradient, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops.families._launch import block, tile_count


def softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """That of the last axis, computed in float32."""
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
    BM = block(M, 256)
    rows = 4096 // BM
    launch(softmax_kernel, (tile_count(B * T * H, rows),), logits, dp, out, B * T * H, M, ROWS=rows, BM=BM)


@triton.jit(do_not_specialize=["N"])
def softmax_kernel(
    logits,  # [N, M]
    dp,
    out,
    N,
    M,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
):
    """The softmax of `logits` or, with `dp`, the gradient of `logits` from that of their softmax."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    m = tl.arange(0, BM)[None, :]
    at = row * M + m
    mask = (row < N) & (m < M)
    x = tl.where(m < M, tl.load(logits + at, mask=mask, other=0.0), float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    if dp is not None:
        p_dp = p * tl.load(dp + at, mask=mask, other=0.0).to(tl.float32)
        p = p_dp - p * tl.sum(p_dp, 1)[:, None]
    tl.store(out + at, p.to(out.dtype.element_ty), mask=mask)
