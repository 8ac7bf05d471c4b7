"""Triton kernels of Mamba-2's time steps and gates, for the scans of head decay, and of their gradients.

Delta_t = clamp(softplus(dt_t + dt_bias))        g_t = Delta_t A
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.gates_of_heads import store_sums
from flacompose.ops._tensors.gate_formulas import lowest
from flacompose.ops._tiles.blocks import (
    DECAYS_TO_ZERO,
    LOWEST_RATE,
    clamp_gate,
    find_chunk,
    finite,
    in_float32,
    softplus,
)

LEAST_GATE = tl.constexpr(lowest(torch.float32))


@triton.jit
def _time_steps(dt, dt_bias, at, h, mask, in_h, least, most, SOFTPLUS: tl.constexpr):
    """The time steps before softplus, after softplus, and clamped."""
    x = tl.load(dt + at, mask=mask, other=0.0).to(tl.float32)
    if dt_bias is not None:
        x += tl.load(dt_bias + h, mask=in_h, other=0.0).to(tl.float32)[None, :]
    free = softplus(x) if SOFTPLUS else x
    delta = tl.where(free < least, least, tl.where(free > most, most, free))
    return x, free, delta


@triton.jit(do_not_specialize=["T", "N", "H", "least", "most"])
def ssd_time_step_kernel(
    dt,  # [tokens, H]
    A,  # [H]
    dt_bias,  # [H]
    delta,  # [tokens, H]
    sums,  # [chunks, H, C], as from `head_gate_sum_kernel` of head decay
    rest,  # [chunks, H, C]
    cu_seqlens,
    T,
    N,
    least,
    most,
    H,
    C: tl.constexpr,
    BH: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """The time steps of a chunk and `BH` heads, and the running sums of their gates."""
    row = tl.program_id(0).to(tl.int64)
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    t, h = tl.arange(0, C), tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = h < H
    mask = (start + t < end)[:, None] & in_h[None, :]
    at = (start + t)[:, None] * H + h[None, :]
    _, _, delta_ = _time_steps(dt, dt_bias, at, h, mask, in_h, in_float32(least), in_float32(most), SOFTPLUS)
    tl.store(delta + at, delta_, mask=mask)
    A_ = finite(tl.load(A + h, mask=in_h, other=0.0).to(tl.float32))
    g = tl.where(mask, clamp_gate(delta_ * A_[None, :]), 0.0)
    store_sums(g, sums, rest, (row * H + h)[None, :] * C + t[:, None], in_h[None, :])


@triton.jit(do_not_specialize=["T", "N", "H", "least", "most"])
def ssd_time_step_gradient_kernel(
    dt,  # [tokens, H]
    A,  # [H]
    dt_bias,  # [H]
    dg,  # [tokens, H], the gradient of gates
    d_delta,  # [tokens, H], the gradient of time steps as strengths of writes
    ddt,  # [tokens, H]
    dA,  # [chunks, H], the sums over each chunk, like `d_bias`
    d_bias,  # [chunks, H]
    cu_seqlens,
    T,
    N,
    least,
    most,
    H,
    C: tl.constexpr,
    BH: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """The gradients of `dt`, `A` and `dt_bias`, of a chunk and `BH` heads.

    A gate below `LEAST_GATE`, whose exponential is 0, has no gradient, nor has a rate of -inf. A rate below
    `DECAYS_TO_ZERO` passes no gradient to time steps.
    """
    row = tl.program_id(0).to(tl.int64)
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    t, h = tl.arange(0, C), tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = h < H
    mask = (start + t < end)[:, None] & in_h[None, :]
    at = (start + t)[:, None] * H + h[None, :]
    least, most = in_float32(least), in_float32(most)
    x, free, delta = _time_steps(dt, dt_bias, at, h, mask, in_h, least, most, SOFTPLUS)
    A_ = finite(tl.load(A + h, mask=in_h, other=0.0).to(tl.float32))
    leaves_nothing = (A_ == LOWEST_RATE)[None, :] | (delta * A_[None, :] < LEAST_GATE)
    dg_ = tl.where(leaves_nothing, 0.0, tl.load(dg + at, mask=mask, other=0.0))
    d_free = (
        tl.load(d_delta + at, mask=mask, other=0.0) + dg_ * tl.where(A_ < DECAYS_TO_ZERO, 0.0, A_)[None, :]
    )
    d_free = tl.where((free < least) | (free > most), 0.0, d_free)
    if SOFTPLUS:
        d_free *= tl.sigmoid(x)
    d_free = tl.where(mask, d_free, 0.0)
    if ddt is not None:
        tl.store(ddt + at, d_free.to(ddt.dtype.element_ty), mask=mask)
    if dA is not None:
        tl.store(dA + row * H + h, tl.sum(tl.where(mask, dg_ * delta, 0.0), 0), mask=in_h)
    if d_bias is not None:
        tl.store(d_bias + row * H + h, tl.sum(d_free, 0), mask=in_h)
