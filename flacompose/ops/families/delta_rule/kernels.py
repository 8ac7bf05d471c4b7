"""Triton kernels for the delta rule: the pairs of each chunk, and a sweep over the chunks in either direction.

Within a chunk that begins with the state S, ``r_t = v_t - S'^T k_t``, what a value differs by from the one that its key
had, solves ``(I + A diag(beta)) r = v - k_read S``, where ``A[t, s]`` is the product of the keys of tokens ``s < t``,
decayed by the gates between them, and `k_read` are the keys, decayed by the gates since the chunk's start.

`pair_kernel` makes, for all chunks at once, the inverse ``Y`` of that matrix, and the products ``P[t, s]`` of queries
and keys. `sweep_kernel` goes from chunk to chunk, the state in registers:

    r = Y (v - k_read S)        o = scale * q_read S + P (beta r)        S <- total S + k_write^T (beta r)

`reverse_kernel` goes backwards in time, dS being the gradient of the state after a chunk:

    du = P^T do + k_write dS        dv = Y^T (beta du)        dS <- total dS + scale * q_read^T do - k_read^T dv

A gate of a head scales whole rows, so it is applied to these products. A gate of a channel is in `k_read`, `q_read` and
`k_write` themselves, which `pair_kernel` then stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import (
    dot,
    dot_split,
    find_chunk,
    find_sequence,
    load_tile,
    split_dot,
    split_program,
    store_tile,
)
from flacompose.ops.families.scalar_decay.kernels import BEGINNING, ENDING, TO_END
from flacompose.ops.families.vector_decay.kernels import (
    MILD_BOUND,
    exact_pairs,
    fine_dot,
    load_gates,
    middle_sums,
    select,
    siblings,
    size_of_gates,
)

TILE = tl.constexpr(32)  # tokens of a tile of the matrix that is inverted; a chunk has one or two


@triton.jit
def _decayed_rows(sums, rest, at, i, C: tl.constexpr):
    """The weights of a chunk's tokens whose running sums of gates lie at `at`: to the start, to the end, of both."""
    sum_i = tl.load(sums + at + i)
    total = tl.load(sums + at + C - 1)
    to_end = total - sum_i
    if rest is not None:
        rest_i = tl.load(rest + at + i)
        rest_total = tl.load(rest + at + C - 1)
        sum_i += rest_i
        to_end += rest_total - rest_i
        total += rest_total
    return tl.exp2(sum_i), tl.exp2(to_end), tl.exp2(total)


@triton.jit
def _decayed_pairs(sums, rest, at, i, j):
    """The weights between tokens ``i >= j``."""
    between = tl.load(sums + at + i) - tl.load(sums + at + j)
    if rest is not None:
        between += tl.load(rest + at + i) - tl.load(rest + at + j)
    return tl.exp2(tl.minimum(between, 0.0))


@triton.jit
def _inverse(B, DOT: tl.constexpr):
    """``(I + B)^-1`` of a strictly lower triangular B, from the inverses of diagonal blocks of 1, 2, 4, ... tokens.

    As in substitution, no intermediate result is larger than the inverses themselves. A power series would lose all
    digits where keys are alike.
    """
    t = tl.arange(0, B.shape[0])[:, None]
    s = tl.arange(0, B.shape[0])[None, :]
    Y = tl.where(t == s, 1.0, 0.0) - tl.where(siblings(t, s, 0), B, 0.0)
    for level in tl.static_range(1, 5):
        between = tl.where(siblings(t, s, level), B, 0.0)
        Y -= fine_dot(fine_dot(Y, between, DOT), Y, DOT)
    return Y


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def pair_kernel(
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C], running sums of the gates of heads, as `gate_kernel` of scalar decay gives them
    rest,  # [chunks, HV, C]
    gk,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C]
    Y,  # [chunks, HV, C, C]
    q_read,  # [tokens, HV, K], as the following three with `gk` alone
    k_read,  # [tokens, HV, K]
    k_write,  # [tokens, HV, K]
    total,  # [chunks, HV, K]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    """``P[t, s] = scale * q_t . k_s`` for ``s <= t``, and ``Y = (I + A diag(beta))^-1``, both decayed."""
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    row, h, _ = split_program(tl.num_programs(0) // HV, HV)
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    if lo >= hi:
        return
    hk = h // (HV // H)
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    token = lo + i
    of_q = tl.zeros([C, C], dtype=tl.float32)
    of_k = tl.zeros([C, C], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        q_ = load_tile(q, token, hi, hk, d, H, K)
        k_ = load_tile(k, token, hi, hk, d, H, K)
        if gk is None:
            of_q += dot(q_, tl.trans(k_), DOT)
            of_k += dot(k_, tl.trans(k_), DOT)
        else:
            g_ = load_gates(gk, token, hi, h, d, HV, K)
            # Writes and reads have one sum, as a read comes after the token's gate.
            middle, middle_ = middle_sums(g_, t, s, False, DOT)
            if tl.max(size_of_gates(g_, middle, middle_, DOT)) < MILD_BOUND:
                written = tl.trans(k_ * tl.exp(-middle))
                of_q += fine_dot(q_ * tl.exp(middle), written, DOT)
                of_k += fine_dot(k_ * tl.exp(middle), written, DOT)
            else:
                of_q += exact_pairs(q_, k_, g_, t, s, False, DOT)
                of_k += exact_pairs(k_, k_, g_, t, s, False, DOT)
            read = tl.exp(select(s <= t, g_, DOT))
            store_tile(q_read, q_ * read, token, hi, h, d, HV, K)
            store_tile(k_read, k_ * read, token, hi, h, d, HV, K)
            store_tile(k_write, k_ * tl.exp(select(s > t, g_, DOT)), token, hi, h, d, HV, K)
            at_total = total + (row * HV + h) * K + d
            tl.store(at_total, tl.exp(tl.sum(g_.to(tl.float32), 0)), mask=d < K)
    if sums is not None:
        between = _decayed_pairs(sums, rest, (row * HV + h) * C, t, s)
        of_q *= between
        of_k *= between
    corner = (row * HV + h) * C * C
    tl.store(P + corner + t * C + s, tl.where(s <= t, of_q * scale, 0.0))
    beta_s = tl.load(beta + (lo + s) * HV + h, mask=lo + s < hi, other=0.0).to(tl.float32)
    tl.store(Y + corner + t * C + s, tl.where(s < t, of_k * beta_s, 0.0))
    # By tiles of 32 tokens, which other threads have stored.
    tl.debug_barrier()
    tile = Y + corner + tl.arange(0, TILE)[:, None] * C + tl.arange(0, TILE)[None, :]
    first = _inverse(tl.load(tile), DOT)
    if C > TILE:
        below = tl.load(tile + TILE * C)
        second = _inverse(tl.load(tile + TILE * C + TILE), DOT)
        tl.store(tile + TILE * C, -fine_dot(fine_dot(second, below, DOT), first, DOT))
        tl.store(tile + TILE * C + TILE, second)
    tl.store(tile, first)


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "scale"])
def sweep_kernel(
    q,  # [tokens, HK, K]: `q_read` and HV heads with gates of channels, as the following two
    k_read,  # [tokens, HK, K]
    k_write,  # [tokens, HK, K]
    v,  # [tokens, HV, V]
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C]
    rest,  # [chunks, HV, C]
    total,  # [chunks, HV, K]
    P,  # [chunks, HV, C, C]
    Y,  # [chunks, HV, C, C]
    initial,  # [N, HV, K, V]
    o,  # [tokens, HV, V]
    r,  # [tokens, HV, V]
    states,  # [chunks, HV, K, V], before each chunk
    final,  # [N, HV, K, V]
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """Forwards in time: fills what is given of `o`, `r`, `states` and `final`."""
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tile, h, n = split_program(tl.cdiv(V, BV), HV)
    nh = n * HV + h
    hk = h // (HV // HK)
    dk = tl.arange(0, BK)
    dv = tile * BV + tl.arange(0, BV)
    in_state = (dk < K)[:, None] & (dv < V)[None, :]
    at_state = dk[:, None] * V + dv[None, :]
    lo, hi, row0 = find_sequence(n, T, cu_seqlens, C)
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if initial is not None:
        S = tl.load(initial + nh * K * V + at_state, mask=in_state, other=0.0).to(tl.float32)
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    for chunk in range(tl.cdiv(hi - lo, C)):
        row = row0 + chunk
        rh = row * HV + h
        token = lo + chunk * C + i
        if states is not None:
            tl.store(states + rh * K * V + at_state, S.to(states.dtype.element_ty), mask=in_state)
        old = dot(load_tile(k_read, token, hi, hk, dk, HK, K), S, DOT)
        if sums is not None:
            near, far, kept = _decayed_rows(sums, rest, rh * C, t, C)
            old *= near
        at = rh * C * C + t * C + s
        r_ = fine_dot(tl.load(Y + at), load_tile(v, token, hi, h, dv, HV, V) - old, DOT)
        if r is not None:
            store_tile(r, r_, token, hi, h, dv, HV, V)
        u = r_ * tl.load(beta + token * HV + h, mask=token < hi, other=0.0).to(tl.float32)[:, None]
        if o is not None:
            read = dot(load_tile(q, token, hi, hk, dk, HK, K), S, DOT) * scale
            if sums is not None:
                read *= near
            store_tile(o, read + fine_dot(tl.load(P + at), u, DOT), token, hi, h, dv, HV, V)
        if sums is not None:
            S *= kept
            u *= far
        if total is not None:
            S *= tl.load(total + rh * K + dk, mask=dk < K, other=0.0)[:, None]
        at_k = k_write + (token * HK + hk)[None, :] * K + dk[:, None]
        k_ = tl.load(at_k, mask=(token < hi)[None, :] & (dk < K)[:, None], other=0.0)
        S = dot_split(k_, u, DOT, S)
    if final is not None:
        tl.store(final + nh * K * V + at_state, S.to(final.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "scale"])
def reverse_kernel(
    q,  # [tokens, HK, K]: `q_read` and HV heads with gates of channels, as the following two
    k_read,  # [tokens, HK, K]
    k_write,  # [tokens, HK, K]
    do,  # [tokens, HV, V]
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C]
    rest,  # [chunks, HV, C]
    total,  # [chunks, HV, K]
    P,  # [chunks, HV, C, C]
    Y,  # [chunks, HV, C, C]
    d_final,  # [N, HV, K, V]
    dv,  # [tokens, HV, V]
    d_states,  # [chunks, HV, K, V], after each chunk
    d_initial,  # [N, HV, K, V]
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """Backwards in time: fills `dv` and what is given of `d_states` and `d_initial`."""
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tile, h, n = split_program(tl.cdiv(V, BV), HV)
    nh = n * HV + h
    hk = h // (HV // HK)
    dk = tl.arange(0, BK)
    d2 = tile * BV + tl.arange(0, BV)
    in_state = (dk < K)[:, None] & (d2 < V)[None, :]
    at_state = dk[:, None] * V + d2[None, :]
    lo, hi, row0 = find_sequence(n, T, cu_seqlens, C)
    dS = tl.zeros([BK, BV], dtype=tl.float32)
    if d_final is not None:
        dS = tl.load(d_final + nh * K * V + at_state, mask=in_state, other=0.0).to(tl.float32)
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    chunks = tl.cdiv(hi - lo, C)
    for from_end in range(chunks):
        chunk = chunks - 1 - from_end
        row = row0 + chunk
        rh = row * HV + h
        token = lo + chunk * C + i
        if d_states is not None:
            tl.store(d_states + rh * K * V + at_state, dS.to(d_states.dtype.element_ty), mask=in_state)
        do_ = load_tile(do, token, hi, h, d2, HV, V)
        transposed = rh * C * C + s * C + t
        du = dot(load_tile(k_write, token, hi, hk, dk, HK, K), dS, DOT)
        if sums is not None:
            near, far, kept = _decayed_rows(sums, rest, rh * C, t, C)
            du *= far
        du += split_dot(tl.load(P + transposed), do_, DOT)
        du *= tl.load(beta + token * HV + h, mask=token < hi, other=0.0).to(tl.float32)[:, None]
        dv_ = fine_dot(tl.load(Y + transposed), du, DOT)
        store_tile(dv, dv_, token, hi, h, d2, HV, V)
        if sums is not None:
            dS *= kept
            do_ = do_ * near
            dv_ *= near
        if total is not None:
            dS *= tl.load(total + rh * K + dk, mask=dk < K, other=0.0)[:, None]
        at_k = (token * HK + hk)[None, :] * K + dk[:, None]
        in_k = (token < hi)[None, :] & (dk < K)[:, None]
        dS += dot(tl.load(q + at_k, mask=in_k, other=0.0), do_, DOT) * scale
        dS = dot_split(tl.load(k_read + at_k, mask=in_k, other=0.0), -dv_, DOT, dS)
    if d_initial is not None:
        tl.store(d_initial + nh * K * V + at_state, dS.to(d_initial.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def gradient_kernel(
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C]
    rest,  # [chunks, HV, C]
    r,  # [tokens, HV, V]
    do,  # [tokens, HV, V]
    dv,  # [tokens, HV, V]
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it
    dq,  # [tokens, HV, K]
    dk,  # [tokens, HV, K]
    dbeta,  # [tokens, tiles of K, HV], to be added up
    d_sums,  # [chunks, 3, tiles of K, HV, C], for `gate_gradient_kernel` of scalar decay
    d_whole,  # [chunks, HV, K]
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
    DOT: tl.constexpr,
):
    """The gradients of queries, keys, `beta` and gates of heads, for a chunk and a tile of the key axis.

    Queries read the state with the gradient do, and keys, before they write, with the gradient -dv.
    """
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tiles = tl.cdiv(K, BK)
    tile, row, h = split_program(tiles, tl.num_programs(0) // (HV * tiles))
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    if lo >= hi:
        return
    hk = h // (HV // H)
    rh = row * HV + h
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    token = lo + i
    d = tile * BK + tl.arange(0, BK)
    by_q = tl.zeros([C, BK], dtype=tl.float32)  # do S^T
    by_k = tl.zeros([C, BK], dtype=tl.float32)  # dv S^T
    written = tl.zeros([C, BK], dtype=tl.float32)  # r dS^T
    d_q = tl.zeros([C, C], dtype=tl.float32)  # do_t . r_s
    d_k = tl.zeros([C, C], dtype=tl.float32)  # dv_t . r_s
    # The last two again, transposed: not every version of Triton transposes the result of a product right.
    d_qT = tl.zeros([C, C], dtype=tl.float32)
    d_kT = tl.zeros([C, C], dtype=tl.float32)
    whole = tl.zeros([BK], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        do_ = load_tile(do, token, hi, h, d2, HV, V)
        dv_ = load_tile(dv, token, hi, h, d2, HV, V)
        r_ = load_tile(r, token, hi, h, d2, HV, V)
        at = rh * K * V + d[None, :] * V + d2[:, None]
        in_state = (d < K)[None, :] & (d2 < V)[:, None]
        S = tl.load(states + at, mask=in_state, other=0.0)
        dS = tl.load(d_states + at, mask=in_state, other=0.0)
        by_q += dot(do_, S, DOT)
        by_k += dot(dv_, S, DOT)
        written += dot(r_, dS, DOT)
        d_q += dot(do_, tl.trans(r_), DOT)
        d_k += dot(dv_, tl.trans(r_), DOT)
        d_qT += dot(r_, tl.trans(do_), DOT)
        d_kT += dot(r_, tl.trans(dv_), DOT)
        if sums is not None:
            whole += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
    q_ = load_tile(q, token, hi, hk, d, H, K)
    k_ = load_tile(k, token, hi, hk, d, H, K)
    beta_t = tl.load(beta + (lo + t) * HV + h, mask=lo + t < hi, other=0.0).to(tl.float32)
    beta_s = tl.load(beta + (lo + s) * HV + h, mask=lo + s < hi, other=0.0).to(tl.float32)
    d_q = tl.where(s <= t, d_q * scale, 0.0)
    d_k = tl.where(s < t, -d_k, 0.0)
    d_qT = tl.where(t <= s, d_qT * scale, 0.0)
    d_kT = tl.where(t < s, -d_kT, 0.0)
    by_q *= scale
    if sums is not None:
        near, far, kept = _decayed_rows(sums, rest, rh * C, t, C)
        between = _decayed_pairs(sums, rest, rh * C, t, s)
        d_q *= between
        d_k *= between
        between = _decayed_pairs(sums, rest, rh * C, s, t)
        d_qT *= between
        d_kT *= between
        by_q *= near
        by_k *= near
        written *= far
    # For each pair, the gradient of the product of its query, or key, with its key.
    pairs = d_q * dot(q_, tl.trans(k_), DOT) + d_k * dot(k_, tl.trans(k_), DOT)
    d_beta = tl.sum(pairs, 0) + tl.sum(written * k_, 1)
    in_tokens = token < hi
    tl.store(dbeta + ((lo + i) * tiles + tile) * HV + h, d_beta, mask=in_tokens)
    written *= beta_t
    if d_sums is not None:
        # No gate decays the pair of a token with itself: its gradient would drown that of the others.
        pairs = tl.where(s < t, pairs * beta_s, 0.0)
        read = tl.sum(by_q * q_ - by_k * k_, 1)
        of_chunk = d_sums + ((row * 3 * tiles + tile) * HV + h) * C + i
        tl.store(of_chunk + ENDING * tiles * HV * C, read + tl.sum(pairs, 1))
        tl.store(of_chunk + BEGINNING * tiles * HV * C, tl.sum(pairs, 0))
        tl.store(of_chunk + TO_END * tiles * HV * C, tl.sum(written * k_, 1))
        tl.store(d_whole + rh * K + d, whole * kept, mask=d < K)
    store_tile(dq, by_q + split_dot(d_q * beta_s, k_, DOT), token, hi, h, d, HV, K)
    # Keys read, and are read by later queries and keys.
    of_keys = split_dot(
        d_k * beta_s + d_kT * beta_t, k_, DOT, split_dot(d_qT * beta_t, q_, DOT, written - by_k)
    )
    store_tile(dk, of_keys, token, hi, h, d, HV, K)
