"""Triton kernels of the gradients of `head_gradients` for a key axis of many tiles, from stored pairs.

The kernel of `head_gradients` computes the gradients of a chunk's pairs of tokens again for each tile of the key
axis, although they do not depend on the tile. Here one kernel stores them, and another computes the gradients
of queries, keys, `beta` and gates of heads from them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.delta_rule.head_gradients import load_before, of_next
from flacompose.ops._recurrences.matrix.gates_of_heads import (
    BEGINNING,
    ENDING,
    LEAVING,
    decayed_pairs,
    decayed_pairs_before,
    decayed_rows,
    decays_of_reads,
)
from flacompose.ops._tiles.blocks import (
    chunk_of_program,
    dot,
    dot_in_parts,
    in_float32,
    in_parts,
    load_numbers,
    load_state,
    load_tile,
    numbers_of_tile,
    size_of_chunk,
    store_tile,
    tile_of_program,
)


@triton.jit(do_not_specialize=["T", "N", "HV", "scale"])
def delta_stored_product_kernel(
    gates,  # `GateSums`
    values,  # `ValueVectors`
    stored,  # `StoredPairs`
    cu_seqlens,
    T,
    N,
    scale,
    HV,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``of_q[t, s] = scale * do_t . r_s`` and ``of_k[t, s] = -dv_t . r_s``, decayed by the gates between the tokens.

    They are the gradients of the products of queries and reading keys with the writing keys, without the
    factor beta. In bfloat16 they are stored in two parts, one after the other.
    """
    do, r, dv = values
    pairs, diagonal, of_before = stored
    scale = in_float32(scale)
    row, h, lo, hi = chunk_of_program(T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    first = (lo * HV + h) * V
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    of_q = tl.zeros([C, C], dtype=tl.float32)
    of_k = tl.zeros([C, C], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d = v0 + tl.arange(0, BV)
        r_ = tl.trans(load_tile(r + first, i, size, 0, d, HV, V))
        of_q += dot(load_tile(do + first, i, size, 0, d, HV, V), r_, DOT)
        if dv is not None:
            of_k += dot(load_tile(dv + first, i, size, 0, d, HV, V), r_, DOT)
    of_q *= scale
    # No gate decays the pair of a token with itself.
    tl.store(diagonal + rh * C + i, tl.sum(tl.where(s == t, of_q, 0.0), 1))
    of_q = tl.where(s < t, of_q, 0.0)
    of_k = tl.where(s < t, -of_k, 0.0)
    sums, rest = gates
    if sums is not None:
        sums += rh * C
        if rest is not None:
            rest += rh * C
        weights = decayed_pairs(sums, rest, C)
        of_q *= weights
        if READ_BEFORE:
            tl.store(of_before + rh * C + i, tl.sum(tl.where(s == t - 1, of_k, 0.0), 1))
            of_k = tl.where(s == t - 1, 0.0, of_k)
            weights = decayed_pairs_before(sums, rest, C, 0)
        of_k *= weights
    PARTS: tl.constexpr = 1 if DOT == tl.float32 else 2
    _store_in_parts(pairs + rh * 2 * (PARTS * C * C), of_q, DOT)
    if dv is not None:
        _store_in_parts(pairs + (rh * 2 + 1) * (PARTS * C * C), of_k, DOT)


@triton.jit
def _store_in_parts(at, x, DOT: tl.constexpr):
    """Stores ``x [C, C]`` for `_dot_with_stored`: in its parts, one after the other."""
    C: tl.constexpr = x.shape[0]
    at += tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    high, low = in_parts(x, DOT)
    tl.store(at, high)
    if DOT != tl.float32:
        tl.store(at + C * C, low)


@triton.jit
def _dot_with_stored(at, parts, acc, TRANSPOSED: tl.constexpr, DOT: tl.constexpr):
    """``acc + x @ b``, or ``acc + x^T @ b``, for the stored ``x [C, C]``. `parts` is ``(b,)``, or b `in_parts`."""
    C: tl.constexpr = acc.shape[0]
    at += tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    high = tl.load(at)
    if TRANSPOSED:
        high = tl.trans(high)
    low = high
    if DOT != tl.float32:
        low = tl.load(at + C * C)
        if TRANSPOSED:
            low = tl.trans(low)
    return dot_in_parts((high, low), parts, DOT, acc)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def delta_stored_product_gradient_kernel(
    # The parameters of `delta_head_gradient_kernel` of `head_gradients`, and the stored gradients of pairs.
    vectors,  # `KeyVectors`
    gates,  # `GateSums`
    values,  # `ValueVectors`
    stored,  # `StoredPairs`, from `delta_stored_product_kernel`
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it
    made,  # `KeyGradients`
    d_sums,  # [chunks, 3 * tiles of K, HV, C], for `head_gate_gradient_kernel`, like `d_total`
    d_total,  # [chunks, HV, K]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradients of queries, keys, `beta` and sums of gates, for a chunk and a tile of the key axis.

    Fills `dq` and, if given, `dk` and `dbeta`, and with these `da`, `d_sums` and `d_total`.
    """
    beta = vectors.beta
    do, r, dv = values
    dq, dk, da, dbeta = made
    pairs, diagonal, of_before = stored
    scale = in_float32(scale)
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    first = lo * HV + h
    i = tl.arange(0, C)
    d = numbers_of_tile(tile, BK)
    size = size_of_chunk(lo, hi, C)
    q, k, a, _ = vectors
    of_keys = (lo * H + h // (HV // H)) * K
    q += of_keys
    k += of_keys
    if a is not None:
        a += of_keys
    r += first * V
    do += first * V
    states += rh * K * V
    PARTS: tl.constexpr = 1 if DOT == tl.float32 else 2
    pairs += rh * 2 * (PARTS * C * C)
    sums, rest = gates
    if sums is not None:
        sums += rh * C
        if rest is not None:
            rest += rh * C
        from_start, to_end, of_chunk = decayed_rows(sums, rest, C)
    # 1. Through the states: the reads of queries and of keys, or `a`, and the writes of keys.
    dq_read = tl.zeros([C, BK], dtype=tl.float32)
    dk_read = tl.zeros([C, BK], dtype=tl.float32)
    written = tl.zeros([C, BK], dtype=tl.float32)
    d_total_ = tl.zeros([BK, BK], dtype=tl.float32)
    if dk is not None:
        dv += first * V
        d_states += rh * K * V
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        S = load_state(states, d, d2, K, V)
        dq_read += dot(load_tile(do, i, size, 0, d2, HV, V), S, DOT)
        if dk is not None:
            dk_read += dot(load_tile(dv, i, size, 0, d2, HV, V), S, DOT)
            dS = load_state(d_states, d, d2, K, V)
            written += dot(load_tile(r, i, size, 0, d2, HV, V), dS, DOT)
            if d_total is not None:  # the sums of S dS are the diagonal of a product
                d_total_ += dot(tl.trans(S), dS, DOT)
    if d_total is not None:
        j = tl.arange(0, BK)
        d_total_ = tl.sum(tl.where(j[:, None] == j[None, :], d_total_, 0.0), 1)
        tl.store(d_total + rh * K + d, d_total_ * of_chunk, mask=d < K)
    dq_read *= scale
    if sums is not None:
        dq_read *= from_start[:, None]
        dk_read *= decays_of_reads(sums, rest, from_start, READ_BEFORE, C)[:, None]
        written *= to_end[:, None]
    # 2. Through the pairs: the reads.
    beta_i = load_numbers(beta, first, i, size, HV)
    diagonal_t = tl.load(diagonal + rh * C + i)[:, None]
    k_ = load_tile(k, i, size, 0, d, H, K)
    writer = in_parts(k_ * beta_i[:, None], DOT)
    dq_read = _dot_with_stored(pairs, writer, dq_read, False, DOT)
    store_tile(dq + first * K, dq_read + diagonal_t * beta_i[:, None] * k_, i, size, 0, d, HV, K)
    if dk is not None:
        of_k = pairs + PARTS * C * C
        dk_read = _dot_with_stored(of_k, writer, -dk_read, False, DOT)
        q_ = load_tile(q, i, size, 0, d, H, K)
        a_ = k_ if a is None else load_tile(a, i, size, 0, d, H, K)
        if d_sums is not None:
            at = d_sums + ((row * 3 * tiles + tile) * HV + h) * C + i
            ending = tl.sum(dq_read * q_, 1)
            if READ_BEFORE:
                ending += of_next(tl.sum(dk_read * a_, 1))
            else:
                ending += tl.sum(dk_read * a_, 1)
            tl.store(at + ENDING * tiles * HV * C, ending)
            tl.store(at + LEAVING * tiles * HV * C, tl.sum(written * k_, 1) * beta_i)
        # 3. The writes of keys, and the gradients of `beta` and of keys.
        in_chunk = tl.zeros([C, BK], dtype=tl.float32)
        in_chunk = _dot_with_stored(pairs, (q_,), in_chunk, True, DOT)
        in_chunk = _dot_with_stored(of_k, (a_,), in_chunk, True, DOT)
        if d_sums is not None:
            tl.store(at + BEGINNING * tiles * HV * C, tl.sum(in_chunk * k_, 1) * beta_i)
        # The pair of a token with itself is added last, since it would drown the others in the gate's
        # gradient.
        written += in_chunk + diagonal_t * q_
        if READ_BEFORE:  # The pair with the token before is added last, too.
            of_before += rh * C
            by_next = tl.load(of_before + i + 1, mask=i < C - 1, other=0.0)[:, None]
            written += by_next * load_tile(k if a is None else a, i + 1, size, 0, d, H, K)
            beta_before = load_numbers(beta, first, tl.maximum(i - 1, 0), size, HV)
            weight = tl.load(of_before + i) * beta_before
            dk_read += weight[:, None] * load_before(k, i, size, d, H, K)
        d_beta = tl.sum(written * k_, 1)
        tl.store(dbeta + (lo * tiles + tile) * HV + h + i * tiles * HV, d_beta, mask=i < size)
        if a is None:
            store_tile(dk + first * K, dk_read + written * beta_i[:, None], i, size, 0, d, HV, K)
        else:
            store_tile(da + first * K, dk_read, i, size, 0, d, HV, K)
            store_tile(dk + first * K, written * beta_i[:, None], i, size, 0, d, HV, K)
