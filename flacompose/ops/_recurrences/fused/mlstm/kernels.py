"""The Triton kernel of one token of mLSTM."""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.elementwise.stabilizer.kernels import larger
from flacompose.ops._recurrences.fused.mlstm import inputs
from flacompose.ops._tiles.blocks import in_float32, split_program

LOWEST = tl.constexpr(inputs.LOWEST)


@triton.jit(do_not_specialize=["scale", "eps"])
def mlstm_token_kernel(
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, HV, V]
    i,  # [B, HV]
    f,  # [B, HV]
    initial_C,  # [B, HV, K, V]
    initial_n,  # [B, HV, K]
    initial_m,  # [B, HV]
    o,  # [B, HV, V]
    final_C,  # [B, HV, K, V]
    final_n,  # [B, HV, K]
    final_m,  # [B, HV]
    scale,
    eps,
    GROUP,
    K,
    V,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per sequence, head and block of the values. The first block of a head also stores `n` and `m`."""
    scale, eps = in_float32(scale), in_float32(eps)
    tiles = tl.cdiv(V, BV)
    tile, bh, _ = split_program(tiles, tl.num_programs(0) // tiles)
    dk, dv = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = dk < K, dv < V
    in_C = in_k[:, None] & in_v[None, :]
    at_C = (bh * K + dk[:, None]) * V + dv[None, :]
    at_k = bh // GROUP * K + dk
    # 1. Issue all loads before the first use, so that the program waits once.
    C = tl.zeros([BK, BV], tl.float32)
    n = tl.zeros([BK], tl.float32)
    m_0 = tl.zeros([], tl.float32)
    if initial_C is not None:
        C += tl.load(initial_C + at_C, mask=in_C, other=0.0).to(tl.float32)
    if initial_n is not None:
        n += tl.load(initial_n + bh * K + dk, mask=in_k, other=0.0).to(tl.float32)
    if initial_m is not None:
        m_0 += tl.load(initial_m + bh).to(tl.float32)
    q_ = tl.load(q + at_k, mask=in_k, other=0.0).to(tl.float32) * scale
    k_ = tl.load(k + at_k, mask=in_k, other=0.0).to(tl.float32)
    v_ = tl.load(v + bh * V + dv, mask=in_v, other=0.0).to(tl.float32)
    i_, f_ = tl.load(i + bh).to(tl.float32), tl.load(f + bh).to(tl.float32)

    # 2. The gates. Every exponential is at most 1.
    decay = tl.minimum(f_, 0.0, propagate_nan=tl.PropagateNan.ALL) - tl.log(1.0 + tl.exp(-tl.abs(f_)))
    m = larger(decay + m_0, larger(i_, LOWEST))
    forget, write = tl.exp(decay + (m_0 - m)), tl.exp(i_ - m)
    # 3. Update the state and read it.
    C = forget * C + (write * k_)[:, None] * v_[None, :]
    n = forget * n + write * k_
    weight = larger(tl.abs(tl.sum(n * q_, 0)), tl.exp(-m)) + eps
    read = tl.sum(C * q_[:, None], 0) / weight
    tl.store(o + bh * V + dv, read.to(o.dtype.element_ty), mask=in_v)
    tl.store(final_C + at_C, C, mask=in_C)
    tl.store(final_n + bh * K + dk, n, mask=in_k & (tile == 0))
    tl.store(final_m + bh, m, mask=tile == 0)
