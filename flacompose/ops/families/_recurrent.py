"""The token-by-token form of every decayed outer-product recurrence, in Triton: one kernel, all gates optional."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops._varlen import bounds
from flacompose.ops.families._launch import block, given, tile_count


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    read_before: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``.

    The gates are ``g [B, T, HV]``, ``gk [B, T, H, K]`` and ``gv [B, T, HV, V]``.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, gk, gv, initial_state = given(g), given(gk), given(gv), given(initial_state)
    if cu_seqlens is None:
        N, o = B, torch.empty_like(v)
    else:
        cu_seqlens = bounds(cu_seqlens, T)
        # A batch axis of 1 stops Inductor in PyTorch 2.11, where it clones such memory.
        N, o = cu_seqlens.shape[0] - 1, v.new_zeros(T, HV, V)
    final_state = q.new_empty(N, HV, K, V, dtype=torch.float32)
    BK = block(K, 256)
    BV = block(V, 4096 // BK)
    launch(
        recurrent_kernel,
        (N * HV * tile_count(V, BV),),
        q,
        k,
        v,
        g,
        gk,
        gv,
        initial_state,
        o,
        final_state,
        cu_seqlens,
        scale,
        T,
        H,
        HV,
        K,
        V,
        BK,
        BV,
        read_before,
    )
    return o if cu_seqlens is None else o.unsqueeze(0), final_state


@triton.jit
def _expm1(g):
    """``exp(g) - 1``; ``exp(g)`` near 1 is rounded, at every token the same way where gates are constant."""
    g = g.to(tl.float32)
    series = g * (1 + g * (1 / 2 + g * (1 / 6 + g * (1 / 24 + g * (1 / 120)))))
    return tl.where(g > -0.1, series, tl.exp(g) - 1)


@triton.jit(do_not_specialize=["T", "H", "HV", "scale"])
def recurrent_kernel(
    q,
    k,
    v,
    g,
    gk,
    gv,
    initial,
    o,
    final,
    cu_seqlens,
    scale,
    T,
    H,
    HV,
    K,
    V,
    BK: tl.constexpr,
    BV: tl.constexpr,
    READ_BEFORE: tl.constexpr,
):
    """The recurrence as it is written, one program per sequence, head and block of the value axis."""
    blocks = tl.cdiv(V, BV)
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    pid = tl.program_id(0).to(tl.int64)
    nh = pid // blocks
    n = nh // HV
    hv = nh % HV
    h = hv // (HV // H)
    dk = tl.arange(0, BK)
    dv = (pid % blocks) * BV + tl.arange(0, BV)
    in_k = dk < K
    in_v = dv < V
    in_state = in_k[:, None] & in_v[None, :]
    at_state = nh * K * V + dk[:, None] * V + dv[None, :]
    if cu_seqlens is not None:
        lo = tl.load(cu_seqlens + n)
        hi = tl.load(cu_seqlens + n + 1)
    else:
        lo = n * T
        hi = lo + T

    S = tl.zeros([BK, BV], dtype=tl.float32)
    if initial is not None:
        S = tl.load(initial + at_state, mask=in_state, other=0.0).to(tl.float32)
    for token in range(lo, hi):
        at_k = (token * H + h) * K + dk
        at_v = (token * HV + hv) * V + dv
        q_ = tl.load(q + at_k, mask=in_k, other=0.0).to(tl.float32) * scale
        k_ = tl.load(k + at_k, mask=in_k, other=0.0).to(tl.float32)
        v_ = tl.load(v + at_v, mask=in_v, other=0.0).to(tl.float32)
        if READ_BEFORE:
            o_ = tl.sum(S * q_[:, None], 0)
        if g is not None:
            S += S * _expm1(tl.load(g + token * HV + hv))
        if gk is not None:
            S += S * _expm1(tl.load(gk + at_k, mask=in_k, other=0.0))[:, None]
        if gv is not None:
            S += S * _expm1(tl.load(gv + at_v, mask=in_v, other=0.0))[None, :]
        S += k_[:, None] * v_[None, :]
        if not READ_BEFORE:
            o_ = tl.sum(S * q_[:, None], 0)
        tl.store(o + at_v, o_.to(o.dtype.element_ty), mask=in_v)
    tl.store(final + at_state, S, mask=in_state)
