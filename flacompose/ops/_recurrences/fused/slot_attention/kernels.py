"""The Triton kernel of one token of slot attention."""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import decayed, in_float32, split_program


@triton.jit(do_not_specialize=["scale"])
def slot_attention_token_kernel(
    q,  # [B, H, G, K]
    k,  # [B, H, K]
    v,  # [B, H, V]
    s,  # [B, H, M]
    g,  # [B, H, M]
    initial_k,  # [B, H, K, M]
    initial_v,  # [B, H, M, V]
    o,  # [B, H, G, V]
    final_k,  # [B, H, K, M]
    final_v,  # [B, H, M, V]
    scale,
    G,
    K,
    M,
    V,
    BK: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    """Both passes, one program per sequence, head, query of its group, and block of the values.

    A program loops over tiles of slots, with an online softmax: it computes the logits of a tile from all keys,
    and reads its block of values with their weights. Programs of a head compute the same logits and states;
    one of them stores each state, and none reads what another has stored.
    """
    scale = in_float32(scale)
    tile, query, bh = split_program(tl.cdiv(V, BV), G)
    dk = tl.arange(0, BK)
    dv = tile * BV + tl.arange(0, BV)
    in_k = dk < K
    in_v = dv < V
    q_ = tl.load(q + (bh * G + query) * K + dk, mask=in_k, other=0.0).to(tl.float32) * scale
    k_ = tl.load(k + bh * K + dk, mask=in_k, other=0.0).to(tl.float32)
    v_ = tl.load(v + bh * V + dv, mask=in_v, other=0.0).to(tl.float32)

    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    read = tl.zeros([BV], tl.float32)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        in_m = m < M
        in_Sk = in_k[:, None] & in_m[None, :]
        in_Sv = in_m[:, None] & in_v[None, :]
        at_Sk = (bh * K + dk[:, None]) * M + m[None, :]
        at_Sv = (bh * M + m[:, None]) * V + dv[None, :]
        s_ = tl.load(s + bh * M + m, mask=in_m, other=0.0).to(tl.float32)
        g_ = tl.load(g + bh * M + m, mask=in_m, other=0.0)
        Sk = tl.zeros([BK, BM], tl.float32)
        Sv = tl.zeros([BM, BV], tl.float32)
        # Issue both loads before the first use.
        if initial_k is not None:
            Sk = tl.load(initial_k + at_Sk, mask=in_Sk, other=0.0).to(tl.float32)
        if initial_v is not None:
            Sv = tl.load(initial_v + at_Sv, mask=in_Sv, other=0.0).to(tl.float32)

        # 1. The logits, from the state of the keys.
        Sk = decayed(Sk, g_[None, :])
        Sk += k_[:, None] * s_[None, :]
        logits = tl.where(in_m, tl.sum(Sk * q_[:, None], 0), float("-inf"))
        # 2. The state of the values, read with the softmax of the logits.
        Sv = decayed(Sv, g_[:, None])
        Sv += s_[:, None] * v_[None, :]
        before = largest
        largest = tl.maximum(before, tl.max(logits, 0))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # no slot has any weight yet
        p = tl.exp(logits - shift)
        kept = tl.exp(before - shift)
        total = total * kept + tl.sum(p, 0)
        read = read * kept + tl.sum(Sv * p[:, None], 0)
        tl.store(final_k + at_Sk, Sk, mask=in_Sk & (tile == 0) & (query == 0))
        tl.store(final_v + at_Sv, Sv, mask=in_Sv & (query == 0))
    tl.store(o + (bh * G + query) * V + dv, (read / total).to(o.dtype.element_ty), mask=in_v)
