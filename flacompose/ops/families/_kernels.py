"""What the Triton kernels of all families are made of, and the token-by-token kernel of all."""

from __future__ import annotations

import triton
import triton.language as tl

# exp of it is 0 in float32, so a sum that includes a gate at this bound weighs nothing, as -inf would.
LOWEST_GATE = tl.constexpr(-128.0)


@triton.jit
def load_tile(x, token, end, h, d, H, D):
    """Rows `token` of head `h` of ``x [tokens, H, D]``, zero from `end` on."""
    at = x + (token * H + h)[:, None] * D + d[None, :]
    return tl.load(at, mask=(token < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, token, end, h, d, H, D):
    at = x + (token * H + h)[:, None] * D + d[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(token < end)[:, None] & (d < D)[None, :])


@triton.jit
def dot(a, b, DOT: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="tf32x3")


@triton.jit
def split_dot(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for float32 `a`, in two parts, and `b`, rounded to the dtype of products."""
    if DOT == tl.float32:
        out = tl.dot(a, b.to(tl.float32), acc=acc, input_precision="tf32x3")
    else:
        high = a.to(DOT)
        rest = (a - high.to(tl.float32)).to(DOT)
        out = tl.dot(high, b.to(DOT), acc=tl.dot(rest, b.to(DOT), acc=acc))
    return out


@triton.jit
def dot_split(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for `a` of the inputs' dtype and float32 `b`, in two parts."""
    if DOT == tl.float32:
        out = tl.dot(a.to(tl.float32), b, acc=acc, input_precision="tf32x3")
    else:
        high = b.to(DOT)
        out = tl.dot(a.to(DOT), high, acc=tl.dot(a.to(DOT), (b - high.to(tl.float32)).to(DOT), acc=acc))
    return out


@triton.jit
def decayed(h, g):
    """``exp(g) * h``. ``exp(g)`` near 1 is rounded, at every token the same way where gates are constant."""
    g = g.to(tl.float32)
    expm1 = g * (1 + g * (1 / 2 + g * (1 / 6 + g * (1 / 24 + g * (1 / 120)))))
    return tl.where(g > -0.1, h + h * expm1, h * tl.exp(g))


@triton.jit(do_not_specialize=["T", "H", "HV", "scale", "stride_g"])
def recurrent_kernel(
    q,
    k,
    v,
    g,
    gk,
    gv,
    u,
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
    stride_g,  # from token to token, 0 where all have the same
    BK: tl.constexpr,
    BV: tl.constexpr,
    SOFTMAX: tl.constexpr,
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
    if u is not None:
        u_ = tl.load(u + h * K + dk, mask=in_k, other=0.0).to(tl.float32)
    for token in range(lo, hi):
        at_k = (token * H + h) * K + dk
        at_v = (token * HV + hv) * V + dv
        q_ = tl.load(q + at_k, mask=in_k, other=0.0).to(tl.float32)
        if SOFTMAX:
            q_ = tl.where(in_k, q_, float("-inf"))
            q_ = tl.exp(q_ - tl.max(q_, 0))
            q_ /= tl.sum(q_, 0)
        q_ *= scale
        k_ = tl.load(k + at_k, mask=in_k, other=0.0).to(tl.float32)
        v_ = tl.load(v + at_v, mask=in_v, other=0.0).to(tl.float32)
        if u is not None:
            o_ = tl.sum(S * q_[:, None], 0) + tl.sum(q_ * u_ * k_, 0) * v_
        if g is not None:
            S = decayed(S, tl.load(g + token * stride_g + hv))
        if gk is not None:
            S = decayed(S, tl.load(gk + at_k, mask=in_k, other=0.0)[:, None])
        if gv is not None:
            S = decayed(S, tl.load(gv + at_v, mask=in_v, other=0.0)[None, :])
        S += k_[:, None] * v_[None, :]
        if u is None:
            o_ = tl.sum(S * q_[:, None], 0)
        tl.store(o + at_v, o_.to(o.dtype.element_ty), mask=in_v)
    tl.store(final + at_state, S, mask=in_state)
    if cu_seqlens is not None:
        # Tokens of no sequence, before the first and after the last, are shared out among the programs.
        N = tl.num_programs(0) // (HV * blocks)
        first = tl.load(cu_seqlens)
        end = tl.load(cu_seqlens + N)
        for i in range(n, first + T - end, N):
            token = tl.where(i < first, i, end + i - first)
            tl.store(o + (token * HV + hv) * V + dv, tl.zeros([BV], o.dtype.element_ty), mask=in_v)
