"""The Triton kernel of the delta rule's gradients of queries, keys, `beta` and gates of heads.

With the names of `kernels`, S being the state before a chunk and dS the gradient of the state after it,
without gates:

    d(q . k) = scale * do r^T     d(k . k) = -dv r^T     the pairs of reading and writing tokens
    dq = d(q . k) diag(beta) k + scale * do S^T
    dk = d(k . k) diag(beta) k - dv S^T + diag(beta) (d(q . k)^T q + d(k . k)^T k + r dS^T)

The last term is `beta` times the gradient of the written keys. Its product with the keys is the gradient of
`beta`. Where ``a`` replaces the reading keys, ``d(a . k)`` replaces ``d(k . k)``, and the terms before the
last are the gradient of ``a``.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    dot,
    in_float32,
    load_numbers,
    load_state,
    load_tile,
    numbers_of_tile,
    size_of_chunk,
    split_dot,
    store_tile,
    tile_of_program,
)


@triton.jit
def _reads(
    x, r, state, size, d, HV, K, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr
):
    """``x_t . r_s``, its transpose, and ``x S^T`` for channels `d`, `x` being gradients of reads.

    The transpose is a product of its own: Triton before 3.7 transposes the result of a product wrongly on
    Hopper.
    """
    i = tl.arange(0, C)
    pairs = tl.zeros([C, C], dtype=tl.float32)
    transposed = tl.zeros([C, C], dtype=tl.float32)
    of_state = tl.zeros([C, d.shape[0]], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        x_ = load_tile(x, i, size, 0, d2, HV, V)
        r_ = load_tile(r, i, size, 0, d2, HV, V)
        pairs += dot(x_, tl.trans(r_), DOT)
        transposed += dot(r_, tl.trans(x_), DOT)
        of_state += dot(x_, load_state(state, d, d2, K, V), DOT)
    return pairs, transposed, of_state


@triton.jit
def _of_next(x):
    """``x [C]`` shifted by one token: each token has the number of the next one, and the last has 0."""
    i = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(i[None, :] == i[:, None] + 1, x[None, :], 0.0), 1)


@triton.jit
def _load_before(x, token, end, d, H, D):
    """The vectors of the tokens before `token` of one head of ``x [tokens, H, D]``; zero before the chunk."""
    tile = load_tile(x, tl.maximum(token - 1, 0), end, 0, d, H, D)
    return tl.where((token > 0)[:, None], tile, 0.0)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def delta_head_gradient_kernel(
    # One kernel computes the gradients of queries and of keys, because both need the same vectors and states.
    vectors,  # `KeyVectors`
    gates,  # `GateSums`
    values,  # `ValueVectors`
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

    Fills `dq` and, if given, `dk` and `dbeta`, and with these `da`, `d_sums` and `d_total`. Registers are
    scarce, so queries and keys are processed one after the other, and inputs and weights are loaded again
    rather than kept.
    """
    beta = vectors.beta
    do, r, dv = values
    dq, dk, da, dbeta = made
    scale = in_float32(scale)
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    first = lo * HV + h
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    d = numbers_of_tile(tile, BK)
    size = size_of_chunk(lo, hi, C)
    q, k, a, _ = vectors
    of_keys = (lo * H + h // (HV // H)) * K
    q += of_keys
    k += of_keys
    if a is not None:
        a += of_keys
    r += first * V
    states += rh * K * V
    beta_i = load_numbers(beta, first, i, size, HV)
    beta_t = beta_i[:, None]
    sums, rest = gates
    if sums is not None:
        sums += rh * C
        if rest is not None:
            rest += rh * C
        from_start, to_end, of_chunk = decayed_rows(sums, rest, C)

    # 1. The reads of queries, with the gradient do.
    pairs, transposed, dq_read = _reads(do + first * V, r, states, size, d, HV, K, V, C, BV, DOT)
    # No gate decays the pair of a token with itself. It is added last, since it would drown the others in the
    # gate's gradient.
    diagonal = tl.sum(tl.where(s == t, pairs, 0.0), 1)[:, None] * scale
    pairs = tl.where(s < t, pairs * (scale * beta_i)[None, :], 0.0)
    transposed = tl.where(t < s, transposed * scale, 0.0)
    dq_read *= scale
    if sums is not None:
        weights = decayed_pairs(sums, rest, C)
        pairs *= weights
        transposed *= weights
        dq_read *= from_start[:, None]
    q_ = load_tile(q, i, size, 0, d, H, K)
    k_ = load_tile(k, i, size, 0, d, H, K)
    dq_read = split_dot(pairs, k_, DOT, dq_read)
    store_tile(dq + first * K, dq_read + diagonal * beta_t * k_, i, size, 0, d, HV, K)

    if dk is not None:
        in_chunk = split_dot(transposed, q_, DOT)
        ending = tl.sum(dq_read * q_, 1)

        # 2. The reads of keys, or of `a`, with the gradient -dv.
        pairs, transposed, dk_read = _reads(dv + first * V, r, states, size, d, HV, K, V, C, BV, DOT)
        pairs = tl.where(s < t, pairs * -beta_i[None, :], 0.0)
        transposed = tl.where(t < s, -transposed, 0.0)
        dk_read = -dk_read
        if READ_BEFORE:
            # No gate decays the pair of a token with the one before it. It is added last, too.
            of_before = tl.sum(tl.where(s == t - 1, pairs, 0.0), 1)[:, None]
            by_next = tl.sum(tl.where(s == t + 1, transposed, 0.0), 1)[:, None]
            pairs = tl.where(s == t - 1, 0.0, pairs) * decayed_pairs_before(sums, rest, C, 0)
            transposed = tl.where(s == t + 1, 0.0, transposed) * decayed_pairs_before(sums, rest, C, 1)
            dk_read *= decays_of_reads(sums, rest, from_start, True, C)[:, None]
        elif sums is not None:
            weights = decayed_pairs(sums, rest, C)
            pairs *= weights
            transposed *= weights
            dk_read *= from_start[:, None]
        k_ = load_tile(k, i, size, 0, d, H, K)
        a_ = k_ if a is None else load_tile(a, i, size, 0, d, H, K)
        dk_read = split_dot(pairs, k_, DOT, dk_read)
        in_chunk = split_dot(transposed, a_, DOT, in_chunk)
        if READ_BEFORE:
            ending += _of_next(tl.sum(dk_read * a_, 1))
            dk_read += of_before * _load_before(k, i, size, d, H, K)
        else:
            ending += tl.sum(dk_read * a_, 1)
        if a is not None:
            store_tile(da + first * K, dk_read, i, size, 0, d, HV, K)

        # 3. The writes of keys, through the state after the chunk.
        d_states += rh * K * V
        written = tl.zeros([C, BK], dtype=tl.float32)
        for v0 in range(0, V, BV):
            d2 = v0 + tl.arange(0, BV)
            written += dot(load_tile(r, i, size, 0, d2, HV, V), load_state(d_states, d, d2, K, V), DOT)
        if sums is not None:
            written *= to_end[:, None]
        q_ = load_tile(q, i, size, 0, d, H, K)
        k_ = load_tile(k, i, size, 0, d, H, K)
        # 4. The gradients of sums of gates, of `beta` and of keys.
        if d_sums is not None:
            of_state = tl.zeros([BK], dtype=tl.float32)
            # Not in the loop of the product: Triton 3.6 overwrites an operand that a product still reads if it is
            # read twice.
            for v0 in range(0, V, BV):
                d2 = v0 + tl.arange(0, BV)
                S = load_state(states, d, d2, K, V).to(tl.float32)
                of_state += tl.sum(S * load_state(d_states, d, d2, K, V), 0)
            tl.store(d_total + rh * K + d, of_state * of_chunk, mask=d < K)
            at = d_sums + ((row * 3 * tiles + tile) * HV + h) * C + i
            tl.store(at + ENDING * tiles * HV * C, ending)
            tl.store(at + BEGINNING * tiles * HV * C, tl.sum(in_chunk * k_, 1) * beta_i)
            tl.store(at + LEAVING * tiles * HV * C, tl.sum(written * k_, 1) * beta_i)
        written += in_chunk + diagonal * q_
        if READ_BEFORE:
            written += by_next * load_tile(k if a is None else a, i + 1, size, 0, d, H, K)
        d_beta = tl.sum(written * k_, 1)
        tl.store(dbeta + (lo * tiles + tile) * HV + h + i * tiles * HV, d_beta, mask=i < size)
        if a is None:
            store_tile(dk + first * K, dk_read + written * beta_t, i, size, 0, d, HV, K)
        else:
            store_tile(dk + first * K, written * beta_t, i, size, 0, d, HV, K)


@triton.jit(do_not_specialize=["size"])
def delta_add_heads_kernel(
    x,  # [tokens, H, GROUP, K]
    sums,  # [tokens, H, K]
    size,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The `size` sums of `x` over the heads of values that share keys, rounded after each addition."""
    size = size // K * K  # tells Triton that a thread may load and store 16 bytes at a time
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x += i // K * (GROUP * K) + i % K
    total = tl.load(x, mask=i < size, other=0.0)
    for head in tl.static_range(1, GROUP):
        added = tl.load(x + head * K, mask=i < size, other=0.0)
        total = (total.to(tl.float32) + added.to(tl.float32)).to(total.dtype)
    tl.store(sums + i, total, mask=i < size)
