"""Triton kernel of the gated skip. It reads and writes each number once.

v = y + (D + w) x        o = v * silu(z)
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import split_program


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, at, value, mask):
    tl.store(x + at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "N", "H"])
def gated_skip_kernel(
    y,  # [tokens, H, P]; y_token elements separate its tokens
    x,  # [tokens, H, P], likewise
    D,  # [H, E]
    w,  # [tokens, H]
    z,  # [tokens, H, P], likewise
    o,  # [tokens, H, P]
    do,  # [tokens, H, P], likewise; if it is given, the gradients below are computed instead of `o`
    dy,  # [tokens, H, P]
    dx,  # [tokens, H, P]
    dD,  # [chunks, H, E], the sums over each chunk
    dw,  # [tokens, H]
    dz,  # [tokens, H, P]
    cu_seqlens,
    tokens,
    N,
    H,
    y_token,
    x_token,
    z_token,
    do_token,
    P: tl.constexpr,
    E: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
):
    """The output of `BT` tokens of a head or, with `do`, their gradients. Absent gradients are not computed.

    The inputs of tokens in no sequence are not read: they may be NaN. Their results are zeros.
    """
    h, chunk, _ = split_program(H, tl.cdiv(tokens, BT))
    first = chunk * BT
    t, p = tl.arange(0, BT), tl.arange(0, BP)[None, :]
    stored = t < tokens - first
    read = stored
    if cu_seqlens is not None:
        read = stored & (first + t >= tl.load(cu_seqlens)) & (first + t < tl.load(cu_seqlens + N))
    numbers, t = (first * H + h) + t * H, t[:, None]
    in_p = p < P
    at, to_store, to_read = numbers[:, None] * P + p, stored[:, None] & in_p, read[:, None] & in_p

    weight = tl.zeros([1, 1], dtype=tl.float32)
    if D is not None:
        weight += _load(D + h * E, p if E == P else p * 0, in_p)
    if w is not None:
        weight += _load(w, numbers, read)[:, None]
    x_ = tl.zeros([1, 1], dtype=tl.float32)
    if D is not None or w is not None:
        x_ = _load(x + first * x_token + h * P, t * x_token + p, to_read)
    if do is None or dz is not None:
        v = _load(y + first * y_token + h * P, t * y_token + p, to_read) + weight * x_
    if z is not None:
        z_ = _load(z + first * z_token + h * P, t * z_token + p, to_read)
        s = tl.sigmoid(z_)
    if do is None:
        _store(o, at, v if z is None else v * (z_ * s), to_store)
    else:
        dv = _load(do + first * do_token + h * P, t * do_token + p, to_read)
        if dz is not None:
            _store(dz, at, dv * v * (s * (1 + z_ * (1 - s))), to_store)
        if z is not None:
            dv *= z_ * s
        if dy is not None:
            _store(dy, at, dv, to_store)
        if dx is not None:
            _store(dx, at, dv * weight, to_store)
        if dw is not None:
            _store(dw, numbers, tl.sum(dv * x_, 1), stored)
        if dD is not None:
            sums = tl.sum(dv * x_, 0)[None, :]
            if E == P:
                _store(dD + (chunk * H + h) * E, p, sums, in_p)
            else:
                tl.store(dD + chunk * H + h, tl.sum(tl.sum(sums, 1), 0))
