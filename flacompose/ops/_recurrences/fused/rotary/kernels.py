"""Triton kernels of the rotary embedding. A program rotates the pairs of a few tokens of one head.

With the rotation ``w`` by ``angle``, and the gradient ``d = w^-1 dq`` rotated back:

    q_turned = w (q + q_bias)        d_angle = pi (cross product of q + q_bias and d, of each pair)

Keys likewise, but they are stored at the place of the next token. Pairs without an angle are not rotated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import find_sequence, sequence_of_chunk, split_program

PI = tl.constexpr(3.141592653589793)


class Vectors(NamedTuple):
    q: Any  # [tokens, R, H, S]; q_token elements separate its tokens
    k: Any  # [tokens, R, H, S], likewise
    q_bias: Any  # [HV, R, S]
    k_bias: Any  # [HV, R, S]
    angle: Any  # [tokens, HV, A]
    q_token: Any
    k_token: Any


class Gradients(NamedTuple):
    q: Any  # [tokens, R, H, S]
    k: Any  # [tokens, R, H, S]
    v: Any  # [tokens, HV, P]
    q_bias: Any  # [chunks, HV, R, S], the sum over the tokens of each chunk
    k_bias: Any  # [chunks, HV, R, S], likewise
    angle: Any  # [tokens, R, HV, A], of each rank
    initial_k: Any  # [N, R, HV, S]
    initial_v: Any  # [N, HV, P]


@triton.jit
def cos_sin(x):
    """``cos(pi x)`` and ``sin(pi x)``, to the precision of float32, reduced to the nearest multiple of 1/2."""
    quarters = tl.floor(2 * x + 0.5)
    t = (x - 0.5 * quarters) * PI
    z = t * t
    c = 1 + z * (-0.5 + z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5)))
    s = t + t * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    quarters -= 4 * tl.floor(0.25 * quarters)
    odd = (quarters == 1) | (quarters == 3)
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where((quarters == 1) | (quarters == 2), -cos, cos), tl.where(quarters >= 2, -sin, sin)


@triton.jit
def _cos_sin_of_tile(angle, at, exists, i, A):
    mask = exists[:, None] & (i < A)[None, :]
    return cos_sin(tl.load(angle + at[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32))


@triton.jit
def _load(x, at, exists, i, S: tl.constexpr, HALVES: tl.constexpr):
    """The first and the second number of the pairs `i` of the vectors of ``S`` numbers that begin at `at`."""
    if HALVES:
        at = x + at[:, None] + i[None, :]
        mask = exists[:, None] & (i < S // 2)[None, :]
        a, b = tl.load(at, mask=mask, other=0.0), tl.load(at + S // 2, mask=mask, other=0.0)
    else:
        d = tl.arange(0, 2 * i.shape[0])
        mask = exists[:, None] & (d < S)[None, :]
        tile = tl.load(x + at[:, None] + d[None, :], mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(tile, (at.shape[0], i.shape[0], 2)))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store(x, at, exists, i, a, b, S: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        at = x + at[:, None] + i[None, :]
        mask = exists[:, None] & (i < S // 2)[None, :]
        tl.store(at, a.to(x.dtype.element_ty), mask=mask)
        tl.store(at + S // 2, b.to(x.dtype.element_ty), mask=mask)
    else:
        d = tl.arange(0, 2 * i.shape[0])
        tile = tl.reshape(
            tl.join(a.to(x.dtype.element_ty), b.to(x.dtype.element_ty)), (at.shape[0], d.shape[0])
        )
        tl.store(x + at[:, None] + d[None, :], tile, mask=exists[:, None] & (d < S)[None, :])


@triton.jit
def _load_biased(x, at, exists, bias, at_bias, i, S: tl.constexpr, HALVES: tl.constexpr):
    """The pairs of `x`, as `_load` returns them, plus the bias at `at_bias`."""
    a, b = _load(x, at, exists, i, S, HALVES)
    bias_a, bias_b = _load(bias, _one(at_bias), _one(0) == 0, i, S, HALVES)
    return a + bias_a, b + bias_b


@triton.jit
def _load_optional(x, at, exists, i, S: tl.constexpr, HALVES: tl.constexpr):
    if x is None:
        a = tl.zeros([at.shape[0], i.shape[0]], tl.float32)
        b = a
    else:
        a, b = _load(x, at, exists, i, S, HALVES)
    return a, b


@triton.jit
def _one(at):
    """A tensor of one number."""
    return tl.zeros([1], tl.int64) + at


@triton.jit
def _place(T, N, HEADS, R, cu_seqlens, C: tl.constexpr):
    """The head, rank, row of chunks and sequence of this program, the bounds of the sequence, and the tokens."""
    h, r, row = split_program(HEADS, R)
    n = sequence_of_chunk(row, T, N, cu_seqlens, C)
    begin, end, first_row = find_sequence(n, T, cu_seqlens, C)
    t = begin + (row - first_row) * C + tl.arange(0, C)
    # A row of chunks before the first sequence has no tokens.
    return h, r, row, n, begin, end, t, (t >= begin) & (t < end), row == first_row


@triton.jit
def _load_values(x, at, exists, d, D: tl.constexpr):
    return tl.load(x + at[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _store_values(x, at, exists, d, value, D: tl.constexpr):
    mask = exists[:, None] & (d < D)[None, :]
    tl.store(x + at[:, None] + d[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def rotary_kernel(
    vectors,  # `Vectors`
    v,  # [tokens, HV, P]; v_token elements separate its tokens
    initial_k,  # [N, R, HV, S]
    initial_v,  # [N, HV, P]
    made,  # the results, `Outputs` of `inputs.py`
    cu_seqlens,
    T,
    N,
    H,
    HV,
    v_token,
    A: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    HALVES: tl.constexpr,
    C: tl.constexpr,
    BI: tl.constexpr,
    BP: tl.constexpr,
):
    """One program per chunk of `C` tokens, value head and rank."""
    q, k, q_bias, k_bias, angle, q_token, k_token = vectors
    q_turned, k_before, v_before, products, last_k, last_v = made
    h, r, _, n, begin, end, t, exists, is_first = _place(T, N, HV, R, cu_seqlens, C)
    i = tl.arange(0, BI)
    has_next, is_last = exists & (t + 1 < end), exists & (t + 1 == end)
    of_group = h // (HV // H) * S
    at, at_bias, at_state = ((t * R + r) * HV + h) * S, (h * R + r) * S, ((n * R + r) * HV + h) * S

    # 1. Queries, keys and their products
    cos, sin = _cos_sin_of_tile(angle, (t * HV + h) * A, exists, i, A)
    q_a, q_b = _load_biased(q, t * q_token + r * H * S + of_group, exists, q_bias, at_bias, i, S, HALVES)
    k_a, k_b = _load_biased(k, t * k_token + r * H * S + of_group, exists, k_bias, at_bias, i, S, HALVES)
    in_key = (i < S // 2)[None, :]
    for s in tl.static_range(R):
        x_a, x_b = k_a, k_b
        if R > 1:
            at_k = t * k_token + s * H * S + of_group
            x_a, x_b = _load_biased(k, at_k, exists, k_bias, (h * R + s) * S, i, S, HALVES)
        product = tl.sum(tl.where(in_key, q_a * x_a + q_b * x_b, 0.0), 1)
        tl.store(products + ((t * HV + h) * R + r) * R + s, product, mask=exists)
    _store(q_turned, at, exists, i, q_a * cos - q_b * sin, q_a * sin + q_b * cos, S, HALVES)

    # 2. Store each key at the place of the next token, and the last key in the state.
    a, b = k_a * cos - k_b * sin, k_a * sin + k_b * cos
    _store(k_before, at + R * HV * S, has_next, i, a, b, S, HALVES)
    _store(last_k, at_state + t * 0, is_last, i, a, b, S, HALVES)
    if is_first:
        first_a, first_b = _load_optional(initial_k, _one(at_state), _one(n) < N, i, S, HALVES)
        at_first = _one(((begin * R + r) * HV + h) * S)
        _store(k_before, at_first, _one(begin) < end, i, first_a, first_b, S, HALVES)
        _store(last_k, _one(at_state), _one(begin) >= end, i, first_a, first_b, S, HALVES)

    # 3. Store values likewise.
    if r == 0:
        d = tl.arange(0, BP)
        at_state = (n * HV + h) * P
        x = _load_values(v, t * v_token + h * P, exists, d, P)
        _store_values(v_before, ((t + 1) * HV + h) * P, has_next, d, x, P)
        _store_values(last_v, at_state + t * 0, is_last, d, x, P)
        if is_first:
            first = tl.zeros([1, BP], tl.float32)
            if initial_v is not None:
                first = _load_values(initial_v, _one(at_state), _one(n) < N, d, P)
            _store_values(v_before, _one((begin * HV + h) * P), _one(begin) < end, d, first, P)
            _store_values(last_v, _one(at_state), _one(begin) >= end, d, first, P)


@triton.jit
def _load_next(
    d_before, d_last, at_next, has_next, at_state, is_last, i, S: tl.constexpr, HALVES: tl.constexpr
):
    """The gradients of shifted tokens, from the place of the next token or, for the last token, of the state."""
    a, b = _load_optional(d_before, at_next, has_next, i, S, HALVES)
    if d_last is not None:
        last_a, last_b = _load(d_last, at_state + at_next * 0, is_last, i, S, HALVES)
        a += last_a
        b += last_b
    return a, b


@triton.jit
def _load_next_values(d_before, d_last, at_next, has_next, at_state, is_last, d, P: tl.constexpr):
    x = tl.zeros([at_next.shape[0], d.shape[0]], tl.float32)
    if d_before is not None:
        x += _load_values(d_before, at_next, has_next, d, P)
    if d_last is not None:
        x += _load_values(d_last, at_state + at_next * 0, is_last, d, P)
    return x


@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def rotary_gradient_kernel(
    vectors,  # `Vectors`
    arriving,  # the gradients of `Outputs`, each of which may be None
    wanted,  # `Gradients`
    cu_seqlens,
    T,
    N,
    H,
    HV,
    A: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    HALVES: tl.constexpr,
    C: tl.constexpr,
    BI: tl.constexpr,
    BP: tl.constexpr,
):
    """One program per chunk of `C` tokens, group of value heads and rank. It sums over the heads of the group."""
    q, k, q_bias, k_bias, angle, q_token, k_token = vectors
    d_q_turned, d_k_before, d_v_before, d_products, d_last_k, d_last_v = arriving
    dq, dk, dv, d_q_bias, d_k_bias, dangle, d_initial_k, d_initial_v = wanted
    g, r, row, n, begin, end, t, exists, is_first = _place(T, N, H, R, cu_seqlens, C)
    i = tl.arange(0, BI)
    has_next, is_last = exists & (t + 1 < end), exists & (t + 1 == end)
    at_q, at_k = t * q_token + g * S, t * k_token + g * S
    dq_a = tl.zeros([C, BI], tl.float32)
    dq_b, dk_a, dk_b = dq_a, dq_a, dq_a
    for of_group in range(HV // H):
        h = g * (HV // H) + of_group
        at, at_bias, at_state = ((t * R + r) * HV + h) * S, (h * R + r) * S, ((n * R + r) * HV + h) * S

        # 1. The gradients of queries and keys, rotated back, and of the angles
        cos, sin = _cos_sin_of_tile(angle, (t * HV + h) * A, exists, i, A)
        q_a, q_b = _load_biased(q, at_q + r * H * S, exists, q_bias, at_bias, i, S, HALVES)
        k_a, k_b = _load_biased(k, at_k + r * H * S, exists, k_bias, at_bias, i, S, HALVES)
        x_a, x_b = _load_optional(d_q_turned, at, exists, i, S, HALVES)
        y_a, y_b = _load_next(
            d_k_before, d_last_k, at + R * HV * S, has_next, at_state, is_last, i, S, HALVES
        )
        x_a, x_b = x_a * cos + x_b * sin, x_b * cos - x_a * sin
        y_a, y_b = y_a * cos + y_b * sin, y_b * cos - y_a * sin
        if dangle is not None:
            cross = q_a * x_b - q_b * x_a + k_a * y_b - k_b * y_a
            at_angle = dangle + (((t * R + r) * HV + h) * A)[:, None] + i[None, :]
            tl.store(at_angle, cross * PI, mask=exists[:, None] & (i < A)[None, :])

        # 2. The gradients through the products
        if d_products is not None:
            for s in tl.static_range(R):
                at_products = d_products + (t * HV + h) * R * R
                of_q = tl.load(at_products + r * R + s, mask=exists, other=0.0)[:, None]
                of_k = tl.load(at_products + s * R + r, mask=exists, other=0.0)[:, None]
                if R > 1:
                    at_bias_s = (h * R + s) * S
                    q_a, q_b = _load_biased(q, at_q + s * H * S, exists, q_bias, at_bias_s, i, S, HALVES)
                    k_a, k_b = _load_biased(k, at_k + s * H * S, exists, k_bias, at_bias_s, i, S, HALVES)
                x_a += of_q * k_a
                x_b += of_q * k_b
                y_a += of_k * q_a
                y_b += of_k * q_b
        dq_a += x_a
        dq_b += x_b
        dk_a += y_a
        dk_b += y_b
        at_sum = _one(((row * HV + h) * R + r) * S)
        if d_q_bias is not None:
            a, b = tl.sum(x_a, 0)[None, :], tl.sum(x_b, 0)[None, :]
            _store(d_q_bias, at_sum, _one(0) == 0, i, a, b, S, HALVES)
        if d_k_bias is not None:
            a, b = tl.sum(y_a, 0)[None, :], tl.sum(y_b, 0)[None, :]
            _store(d_k_bias, at_sum, _one(0) == 0, i, a, b, S, HALVES)

        # 3. The gradients of values and of the states before the first token
        if d_initial_k is not None:
            if is_first:
                at_first = _one(((begin * R + r) * HV + h) * S)
                is_empty = _one(begin) >= end
                first_a, first_b = _load_next(
                    d_k_before, d_last_k, at_first, is_empty == 0, at_state, is_empty, i, S, HALVES
                )
                _store(d_initial_k, _one(at_state), _one(n) < N, i, first_a, first_b, S, HALVES)
        if r == 0:
            d = tl.arange(0, BP)
            at_state = (n * HV + h) * P
            if dv is not None:
                at_next = ((t + 1) * HV + h) * P
                x = _load_next_values(d_v_before, d_last_v, at_next, has_next, at_state, is_last, d, P)
                _store_values(dv, (t * HV + h) * P, exists, d, x, P)
            if d_initial_v is not None:
                if is_first:
                    at_first = _one((begin * HV + h) * P)
                    is_empty = _one(begin) >= end
                    first = _load_next_values(
                        d_v_before, d_last_v, at_first, is_empty == 0, at_state, is_empty, d, P
                    )
                    _store_values(d_initial_v, _one(at_state), _one(n) < N, d, first, P)

    # 4. The sums over the heads
    at = ((t * R + r) * H + g) * S
    if dq is not None:
        _store(dq, at, exists, i, dq_a, dq_b, S, HALVES)
    if dk is not None:
        _store(dk, at, exists, i, dk_a, dk_b, S, HALVES)
