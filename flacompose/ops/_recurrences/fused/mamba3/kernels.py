"""The Triton kernel of one token of Mamba-3."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._recurrences.elementwise.cumulative_angle.kernels import tanh
from flacompose.ops._recurrences.fused.rotary.kernels import PI, cos_sin
from flacompose.ops._tiles.blocks import split_program


@triton.jit
def _load(x, at, mask=None):
    return tl.load(x + at, mask=mask, other=None if mask is None else 0.0).to(tl.float32)


class Strides(NamedTuple):
    """The numbers of elements that separate tokens, which may be slices of a layer's projection."""

    V_token: Any
    Trap_token: Any
    Angles_token: Any
    Z_token: Any


@triton.jit(do_not_specialize=["HV", "H_Q", "H_ANGLES"])
def mamba3_token_kernel(
    inputs,  # `Inputs`, with None in place of `values_first`, which is a constant
    strides,  # `Strides`
    outputs,  # `Outputs`
    HV,
    H_Q,
    H_ANGLES,
    S,
    P,
    A,
    VALUES_FIRST: tl.constexpr,
    BS: tl.constexpr,
    BP: tl.constexpr,
):
    """One program per sequence, head and block of values. The first block of a head also stores keys and angles."""
    (
        Q,
        K,
        V,
        ADT,
        DT,
        Trap,
        Q_bias,
        K_bias,
        Angles,
        initial_angle,
        initial_state,
        initial_k,
        initial_v,
        D,
        Z,
        _,
    ) = inputs
    V_token, Trap_token, Angles_token, Z_token = strides
    o, final_angle, final_state, final_k, final_v = outputs
    tiles = tl.cdiv(P, BP)
    tile, h, n = split_program(tiles, HV)
    bh = n * HV + h
    s, p = tl.arange(0, BS), tile * BP + tl.arange(0, BP)
    in_s, in_p = s < S, p < P
    in_state = in_s[:, None] & in_p[None, :]
    if VALUES_FIRST:
        at_state = bh * S * P + p[None, :] * S + s[:, None]
    else:
        at_state = bh * S * P + s[:, None] * P + p[None, :]
    other, pair = s ^ 1, s // 2
    in_a = in_s & (pair < A)
    at_q = (n * H_Q + h // (HV // H_Q)) * S
    # 1. Issue all loads before the first use, so that the program waits once.
    state = _load(initial_state, at_state, in_state)
    k_0, v_0 = _load(initial_k, bh * S + s, in_s), _load(initial_v, bh * P + p, in_p)
    v = _load(V, n * V_token + h * P + p, in_p)
    q = _load(Q, at_q + s, in_s) + _load(Q_bias, h * S + s, in_s)
    k = _load(K, at_q + s, in_s) + _load(K_bias, h * S + s, in_s)
    other_q = _load(Q, at_q + other, in_s) + _load(Q_bias, h * S + other, in_s)
    other_k = _load(K, at_q + other, in_s) + _load(K_bias, h * S + other, in_s)
    x = _load(Angles, n * Angles_token + h // (HV // H_ANGLES) * A + pair, in_a)
    angle = tl.load(initial_angle + bh * A + pair, mask=in_a, other=0.0).to(tl.float64) / PI
    g, dt, trap = _load(ADT, bh), _load(DT, bh), _load(Trap, n * Trap_token + h)

    # 2. Rotate each number of a key together with its partner in the pair. Angles are summed in float64, as in
    # the chunked form.
    angle += (tanh(x) * dt).to(tl.float64)
    angle -= 2 * tl.floor(0.5 * angle + 0.5)
    cos, sin = cos_sin(angle.to(tl.float32))
    sin = tl.where(s % 2 == 0, -sin, sin)
    q, k = q * cos + other_q * sin, k * cos + other_k * sin
    # 3. Decay the state, write the previous token, read the state, and add the current token's contribution.
    c, decay = tl.sigmoid(trap) * dt, tl.exp(g)
    state = decay * state + (decay * (dt - c) * k_0)[:, None] * v_0[None, :]
    weight = c * tl.sum(q * k, 0)
    if D is not None:
        weight += _load(D, h)
    y = tl.sum(state * q[:, None], 0) + weight * v
    if Z is not None:
        z = _load(Z, n * Z_token + h * P + p, in_p)
        y *= z * tl.sigmoid(z)
    # 4. Write the token.
    k_rounded = k.to(final_k.dtype.element_ty)
    state += k_rounded.to(tl.float32)[:, None] * (c * v)[None, :]
    tl.store(o + bh * P + p, y.to(o.dtype.element_ty), mask=in_p)
    tl.store(final_state + at_state, state, mask=in_state)
    tl.store(final_v + bh * P + p, v.to(final_v.dtype.element_ty), mask=in_p)
    tl.store(final_k + bh * S + s, k_rounded, mask=in_s & (tile == 0))
    tl.store(final_angle + bh * A + pair, (angle * PI).to(tl.float32), mask=in_a & (s % 2 == 0) & (tile == 0))
