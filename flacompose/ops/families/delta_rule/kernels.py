"""Triton kernels for the delta rule: the pairs of each chunk, and a sweep over the chunks in either direction.

Within a chunk that begins with the state S, ``r_t = v_t - S'^T k_t``, what a value differs by from the one that its
key had, solves ``(I + A diag(beta)) r = e`` with ``e = v - k_read S``. Here ``A[t, s]`` is the product of the keys of
tokens ``s < t``, decayed by the gates between them, and `k_read` are the keys, decayed by the gates since the chunk's
start. So what the chunk adds to the state and to the outputs is linear in ``e``:

    r = Y e, with Y = (I + A diag(beta))^-1        W = Y^T diag(beta) k_write        P = scale * (q . k) diag(beta) Y

`pair_kernel` makes these matrices for all chunks at once. Then both sweeps have two products one after the other in a
chunk. `sweep_kernel` goes from chunk to chunk, the state in registers:

    e = v - k_read S          o = scale * q_read S + P e          S <- total S + W^T e

`reverse_kernel` goes backwards in time, dS being the gradient of the state after a chunk:

    dv = P^T do + W dS        dS <- total dS + scale * q_read^T do - k_read^T dv

Both hold the state transposed, `[V, K]`, and all that they compute: the result of each product is then the left factor
of the next, and stays in registers.

A long row is cut into segments, which are swept at the same time. One sweep before that begins every segment at zero,
and another one at the identity matrix, which shows what the segment does to any state. From the two, `join_kernel`
computes the state that each segment begins at.

A gate of a head scales whole rows, so it is applied to the products with the state. A gate of a channel is in `k_read`
and `q_read` themselves, which `channel_pair_kernel` stores: it takes the place of `pair_kernel` there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import (
    dot,
    dot_of_parts,
    find_chunk,
    find_segment,
    find_sequence,
    fine_dot,
    in_parts,
    load_tile,
    split_dot,
    split_program,
    store_tile,
)
from flacompose.ops.families.scalar_decay.kernels import BEGINNING, ENDING, TO_END
from flacompose.ops.families.vector_decay.kernels import siblings

BLOCK = tl.constexpr(16)  # tokens of the blocks that are inverted side by side, each by one warp


@triton.jit
def _decayed_rows(sums, rest, C: tl.constexpr):
    """The weights ``[C]`` of a chunk's tokens with these running sums of gates: to the start, to the end, of both."""
    sum_i = tl.load(sums + tl.arange(0, C))
    total = tl.load(sums + C - 1)
    to_end = total - sum_i
    if rest is not None:
        rest_i = tl.load(rest + tl.arange(0, C))
        rest_total = tl.load(rest + C - 1)
        sum_i += rest_i
        to_end += rest_total - rest_i
        total += rest_total
    return tl.exp2(sum_i), tl.exp2(to_end), tl.exp2(total)


@triton.jit
def _decayed_pairs(sums, rest, C: tl.constexpr):
    """The weights ``[C, C]`` between tokens, whichever is the later one."""
    sum_i = tl.load(sums + tl.arange(0, C))
    between = sum_i[:, None] - sum_i[None, :]
    if rest is not None:
        rest_i = tl.load(rest + tl.arange(0, C))
        between += rest_i[:, None] - rest_i[None, :]
    return tl.exp2(-tl.abs(between))


@triton.jit
def inverse(upper, DOT: tl.constexpr):
    """``(I + upper)^-1``, where only the part of `upper` above the diagonal counts.

    From the inverses of diagonal blocks of 1, 2, 4, ... tokens. As in substitution, no intermediate result is larger
    than the inverses themselves. A power series would lose all digits where keys are alike.
    """
    C: tl.constexpr = upper.shape[0]
    N: tl.constexpr = C // BLOCK
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    between_16 = in_parts(tl.where(siblings(i, j, 4) & (i < j), upper, 0.0), DOT)
    between_32 = in_parts(tl.where(siblings(i, j, 5) & (i < j), upper, 0.0), DOT)
    # Up to blocks of 16 tokens, one such product for each is enough.
    own = (tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(own, tl.reshape(upper, [N, BLOCK, N, BLOCK]), 0.0), 2)
    s = tl.arange(0, BLOCK)[None, :, None]
    t = tl.arange(0, BLOCK)[None, None, :]
    Y = tl.where(s == t, 1.0, 0.0) - tl.where(siblings(s, t, 0) & (s < t), blocks, 0.0)
    for level in range(1, 4):
        between = tl.where(siblings(s, t, level) & (s < t), blocks, 0.0)
        Y -= fine_dot(fine_dot(Y, between, DOT), Y, DOT)
    Y = tl.reshape(tl.where(own, Y[:, :, None, :], 0.0), [C, C])
    Y -= fine_dot(dot_of_parts(Y, between_16, DOT), Y, DOT)
    if C > 32:
        Y -= fine_dot(dot_of_parts(Y, between_32, DOT), Y, DOT)
    return Y


@triton.jit
def solve(of_q, of_k, beta, P, Y, DOT: tl.constexpr):
    """``diag(beta) Y``, transposed, of products whose rows write and columns read. Fills `P` and, if given, `Y`."""
    C: tl.constexpr = of_k.shape[0]
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    of_q = in_parts(of_q, DOT)
    solved = inverse(of_k * beta[:, None], DOT)
    if Y is not None:
        tl.store(Y + at, solved.to(Y.dtype.element_ty))
    solved *= beta[None, :]
    tl.store(P + at, dot_of_parts(solved, of_q, DOT).to(P.dtype.element_ty))
    return solved


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def pair_kernel(
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C], running sums of the gates of heads, as `gate_kernel` of scalar decay gives them
    rest,  # [chunks, HV, C]
    W,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C], transposed
    Y,  # [chunks, HV, C, C], transposed
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
    """Fills `W`, `P` and, if given, `Y`."""
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    row, h, _ = split_program(tl.num_programs(0) // HV, HV)
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    if lo >= hi:
        return
    # Tokens are counted from the chunk's first, so that offsets in the chunk need 32 bits and not 64.
    rh = row * HV + h
    first = lo * HV + h
    at_q = (lo * H + h // (HV // H)) * K
    i = tl.arange(0, C)
    s = i[:, None]
    t = i[None, :]
    size = tl.minimum(hi - lo, C).to(tl.int32)
    beta_i = tl.load(beta + first + i * HV, mask=i < size, other=0.0).to(tl.float32)
    # Rows write, columns read.
    of_q = tl.zeros([C, C], dtype=tl.float32)
    of_k = tl.zeros([C, C], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        q_ = load_tile(q + at_q, i, size, 0, d, H, K)
        k_ = load_tile(k + at_q, i, size, 0, d, H, K)
        of_q += dot(k_, tl.trans(q_), DOT)
        of_k += dot(k_, tl.trans(k_), DOT)
    of_q = tl.where(s <= t, of_q * scale, 0.0)
    if sums is not None:
        sums += rh * C
        if rest is not None:
            rest += rh * C
        between = _decayed_pairs(sums, rest, C)
        of_q *= between
        of_k *= between
    weighted = solve(of_q, of_k, beta_i, P + rh * C * C, None if Y is None else Y + rh * C * C, DOT)
    if sums is not None:
        near, far, kept = _decayed_rows(sums, rest, C)
        weighted *= far[None, :]
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        written = split_dot(weighted, load_tile(k + at_q, i, size, 0, d, H, K), DOT)
        store_tile(W + first * K, written, i, size, 0, d, HV, K)


@triton.jit
def _load_transposed(x, token, end, h, d, H, D):
    """``[d, token]`` of ``x [tokens, H, D]``, in float32."""
    at = x + (token * H + h)[None, :] * D + d[:, None]
    return tl.load(at, mask=(token < end)[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _store_transposed(x, value, token, end, h, d, H, D):
    at = x + (token * H + h)[None, :] * D + d[:, None]
    tl.store(at, value.to(x.dtype.element_ty), mask=(token < end)[None, :] & (d < D)[:, None])


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "SEGMENTS", "scale"])
def sweep_kernel(
    q,  # [tokens, HK, K]: `q_read` and HV heads with gates of channels, as the following
    k,  # [tokens, HK, K]
    v,  # [tokens, HV, V], zeros if there is none
    sums,  # [chunks, HV, C]
    rest,  # [chunks, HV, C]
    total,  # [chunks, HV, K]
    W,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C], transposed
    Y,  # [chunks, HV, C, C], transposed
    initial,  # [SEGMENTS, N, HV, K, V], before each segment
    o,  # [tokens, HV, V]
    r,  # [tokens, HV, V]
    states,  # [chunks, HV, K, V], before each chunk
    ends,  # [SEGMENTS, N, HV, K, V], after each segment
    final,  # [N, HV, K, V]
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    SEGMENTS,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IDENTITY: tl.constexpr,
    DOT: tl.constexpr,
):
    """Forwards in time: fills what is given of `o`, `r`, `states`, `ends` and `final`.

    One program sweeps one segment of one sequence. Without `initial` it begins at zero or, with `IDENTITY`, at the
    identity matrix.
    """
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tile, h, ns = split_program(tl.cdiv(V, BV), HV)
    segment = ns // N
    nh = ns % N * HV + h
    at_end = (ns * HV + h) * K * V
    hk = h // (HV // HK)
    dk = tl.arange(0, BK)
    dv = tile * BV + tl.arange(0, BV)
    in_state = (dv < V)[:, None] & (dk < K)[None, :]
    at_state = dv[:, None] + dk[None, :] * V
    lo, hi, row0 = find_sequence(ns % N, T, cu_seqlens, C)
    begin, stop = find_segment(segment, SEGMENTS, tl.cdiv(hi - lo, C))
    S = tl.zeros([BV, BK], dtype=tl.float32)
    if initial is not None:
        S = tl.load(initial + at_end + at_state, mask=in_state, other=0.0).to(tl.float32)
    if IDENTITY:
        S = tl.where(dv[:, None] == dk[None, :], 1.0, 0.0)
    i = tl.arange(0, C)
    at_pair = i[:, None] * C + i[None, :]
    for chunk in range(begin, stop):
        rh = (row0 + chunk) * HV + h
        start = lo + chunk * C
        size = tl.minimum(hi - start, C).to(tl.int32)
        at_k = (start * HK + hk) * K
        first = start * HV + h
        if states is not None:
            tl.store(states + rh * K * V + at_state, S.to(states.dtype.element_ty), mask=in_state)
        e = -dot(S, tl.trans(load_tile(k + at_k, i, size, 0, dk, HK, K)), DOT)
        if sums is not None:
            rest_ = None if rest is None else rest + rh * C
            near, far, kept = _decayed_rows(sums + rh * C, rest_, C)
            e *= near[None, :]
        if v is not None:
            e += _load_transposed(v + first * V, i, size, 0, dv, HV, V)
        if r is not None:
            _store_transposed(
                r + first * V, split_dot(e, tl.load(Y + rh * C * C + at_pair), DOT), i, size, 0, dv, HV, V
            )
        if o is not None:
            read = dot(S, tl.trans(load_tile(q + at_k, i, size, 0, dk, HK, K)), DOT) * scale
            if sums is not None:
                read *= near[None, :]
            o_ = read + dot(e, tl.load(P + rh * C * C + at_pair), DOT)
            _store_transposed(o + first * V, o_, i, size, 0, dv, HV, V)
        if sums is not None:
            S *= kept
        if total is not None:
            S *= tl.load(total + rh * K + dk, mask=dk < K, other=0.0)[None, :]
        S = split_dot(e, load_tile(W + first * K, i, size, 0, dk, HV, K), DOT, S)
    if ends is not None:
        tl.store(ends + at_end + at_state, S, mask=in_state)
    if final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + nh * K * V + at_state, S.to(final.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "SEGMENTS", "scale"])
def reverse_kernel(
    q,  # [tokens, HK, K]: `q_read` and HV heads with gates of channels, as the following
    k,  # [tokens, HK, K]
    do,  # [tokens, HV, V]
    sums,  # [chunks, HV, C]
    rest,  # [chunks, HV, C]
    total,  # [chunks, HV, K]
    W,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C], transposed
    d_final,  # [SEGMENTS, N, HV, K, V], after each segment
    dv,  # [tokens, HV, V]
    d_states,  # [chunks, HV, K, V], after each chunk
    d_ends,  # [SEGMENTS, N, HV, K, V], before each segment
    d_initial,  # [N, HV, K, V]
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    SEGMENTS,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """Backwards in time: fills what is given of `dv`, `d_states`, `d_ends` and `d_initial`."""
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tile, h, ns = split_program(tl.cdiv(V, BV), HV)
    segment = ns // N
    nh = ns % N * HV + h
    at_end = (ns * HV + h) * K * V
    hk = h // (HV // HK)
    dk = tl.arange(0, BK)
    d2 = tile * BV + tl.arange(0, BV)
    in_state = (d2 < V)[:, None] & (dk < K)[None, :]
    at_state = d2[:, None] + dk[None, :] * V
    lo, hi, row0 = find_sequence(ns % N, T, cu_seqlens, C)
    begin, stop = find_segment(segment, SEGMENTS, tl.cdiv(hi - lo, C))
    dS = tl.zeros([BV, BK], dtype=tl.float32)
    if d_final is not None:
        dS = tl.load(d_final + at_end + at_state, mask=in_state, other=0.0).to(tl.float32)
    i = tl.arange(0, C)
    at_pair = i[:, None] * C + i[None, :]
    for before in range(begin, stop):
        chunk = begin + stop - 1 - before
        rh = (row0 + chunk) * HV + h
        start = lo + chunk * C
        size = tl.minimum(hi - start, C).to(tl.int32)
        at_k = (start * HK + hk) * K
        first = start * HV + h
        if d_states is not None:
            tl.store(d_states + rh * K * V + at_state, dS.to(d_states.dtype.element_ty), mask=in_state)
        do_ = _load_transposed(do + first * V, i, size, 0, d2, HV, V)
        dv_ = dot(do_, tl.trans(tl.load(P + rh * C * C + at_pair)), DOT)
        dv_ += dot(dS, tl.trans(load_tile(W + first * K, i, size, 0, dk, HV, K)), DOT)
        if dv is not None:
            _store_transposed(dv + first * V, dv_, i, size, 0, d2, HV, V)
        do_ *= scale
        dv_ = -dv_
        if sums is not None:
            rest_ = None if rest is None else rest + rh * C
            near, far, kept = _decayed_rows(sums + rh * C, rest_, C)
            dS *= kept
            do_ *= near[None, :]
            dv_ *= near[None, :]
        if total is not None:
            dS *= tl.load(total + rh * K + dk, mask=dk < K, other=0.0)[None, :]
        dS += dot(do_, load_tile(q + at_k, i, size, 0, dk, HK, K), DOT)
        dS = split_dot(dv_, load_tile(k + at_k, i, size, 0, dk, HK, K), DOT, dS)
    if d_ends is not None:
        tl.store(d_ends + at_end + at_state, dS, mask=in_state)
    if d_initial is not None:
        if segment == 0:
            tl.store(d_initial + nh * K * V + at_state, dS.to(d_initial.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["N", "HV", "SEGMENTS"])
def join_kernel(
    transitions,  # [SEGMENTS, N, HV, K, K]: each segment takes a state S to ``transition S + end``
    ends,  # [SEGMENTS, N, HV, K, V]
    initial,  # [N, HV, K, V]
    starts,  # [SEGMENTS, N, HV, K, V]
    N,
    HV,
    SEGMENTS,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The state before each segment, from what segments that begin at zero end with. `REVERSE`: gradients, after it."""
    tile, nh, _ = split_program(tl.cdiv(V, BV), N * HV)
    dk = tl.arange(0, BK)
    dv = tile * BV + tl.arange(0, BV)
    in_state = (dv < V)[:, None] & (dk < K)[None, :]
    at_state = dv[:, None] + dk[None, :] * V
    S = tl.zeros([BV, BK], dtype=tl.float32)
    if initial is not None:
        S = tl.load(initial + nh * K * V + at_state, mask=in_state, other=0.0).to(tl.float32)
    for i in range(SEGMENTS):
        row = (SEGMENTS - 1 - i if REVERSE else i) * N * HV + nh
        start = starts + row * K * V
        tl.store(start + at_state, S, mask=in_state)
        # By blocks of the contracted axis, which other threads have stored.
        tl.debug_barrier()
        S = tl.load(ends + row * K * V + at_state, mask=in_state, other=0.0)
        for d0 in range(0, K, BD):
            d = d0 + tl.arange(0, BD)
            S_ = tl.load(
                start + dv[:, None] + d[None, :] * V, mask=(dv < V)[:, None] & (d < K)[None, :], other=0.0
            )
            at = d[:, None] * K + dk[None, :] if REVERSE else d[:, None] + dk[None, :] * K
            M = tl.load(transitions + row * K * K + at, mask=(d < K)[:, None] & (dk < K)[None, :], other=0.0)
            S += fine_dot(S_, M, DOT)


@triton.jit
def _products(
    a, b, states, size, d, HV, K, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr
):
    """``a_t . b_s`` of a chunk's tokens and, if `states` are given, ``a S^T``, for channels `d` of the keys."""
    i = tl.arange(0, C)
    pairs = tl.zeros([C, C], dtype=tl.float32)
    of_state = tl.zeros([C, d.shape[0]], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        a_ = load_tile(a, i, size, 0, d2, HV, V)
        pairs += dot(a_, tl.trans(load_tile(b, i, size, 0, d2, HV, V)), DOT)
        if states is not None:
            of_state += dot(a_, load_state(states, d, d2, K, V), DOT)
    return pairs, of_state


@triton.jit
def load_state(state, d, d2, K, V):
    """``[d2, d]`` of ``state [K, V]``."""
    at = state + d[None, :] * V + d2[:, None]
    return tl.load(at, mask=(d < K)[None, :] & (d2 < V)[:, None], other=0.0)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def query_gradient_kernel(
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C]
    rest,  # [chunks, HV, C]
    r,  # [tokens, HV, V]
    do,  # [tokens, HV, V]
    states,  # [chunks, HV, K, V], before each chunk
    dq,  # [tokens, HV, K]
    d_sums,  # [chunks, 3, PARTS, HV, C], for `gate_gradient_kernel` of scalar decay
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
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradient of the queries of a chunk, for a tile of the key axis, and what gates of heads have from it."""
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tiles = tl.cdiv(K, BK)
    tile, row, h = split_program(tiles, tl.num_programs(0) // (HV * tiles))
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    first = lo * HV + h
    at_q = (lo * H + h // (HV // H)) * K
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    d = tile.to(tl.int32) * BK + tl.arange(0, BK)
    size = tl.minimum(hi - lo, C).to(tl.int32)
    beta_i = tl.load(beta + first + i * HV, mask=i < size, other=0.0).to(tl.float32)
    if sums is not None:
        sums += rh * C
        if rest is not None:
            rest += rh * C
        near, far, kept = _decayed_rows(sums, rest, C)
    # Rows read, columns write. Queries read with the gradient do.
    pairs, by_q = _products(do + first * V, r + first * V, states + rh * K * V, size, d, HV, K, V, C, BV, DOT)
    # No gate decays the pair of a token with itself: its gradient would drown that of the others.
    itself = tl.sum(tl.where(s == t, pairs, 0.0), 1)[:, None]
    pairs = tl.where(s < t, pairs * beta_i[None, :], 0.0)
    if sums is not None:
        pairs *= _decayed_pairs(sums, rest, C)
        by_q *= near[:, None]
    k_ = load_tile(k + at_q, i, size, 0, d, H, K)
    by_q = split_dot(pairs, k_, DOT, by_q) * scale
    if d_sums is not None:
        at = d_sums + ((row * 3 * PARTS + tile) * HV + h) * C + i
        ending = tl.sum(by_q * load_tile(q + at_q, i, size, 0, d, H, K), 1)
        tl.store(at + ENDING * PARTS * HV * C, ending)
        tl.store(at + BEGINNING * PARTS * HV * C, tl.zeros_like(ending))
        tl.store(at + TO_END * PARTS * HV * C, tl.zeros_like(ending))
    store_tile(dq + first * K, by_q + itself * beta_i[:, None] * scale * k_, i, size, 0, d, HV, K)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def key_gradient_kernel(
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
    dk,  # [tokens, HV, K]
    dbeta,  # [tokens, tiles of K, HV], to be added up
    d_sums,  # [chunks, 3, PARTS, HV, C], for `gate_gradient_kernel` of scalar decay
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
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradients of the keys and of `beta`, as `query_gradient_kernel`. Keys write, and before that they read."""
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tiles = tl.cdiv(K, BK)
    tile, row, h = split_program(tiles, tl.num_programs(0) // (HV * tiles))
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    first = lo * HV + h
    at_q = (lo * H + h // (HV // H)) * K
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    d = tile.to(tl.int32) * BK + tl.arange(0, BK)
    size = tl.minimum(hi - lo, C).to(tl.int32)
    beta_i = tl.load(beta + first + i * HV, mask=i < size, other=0.0).to(tl.float32)
    if sums is not None:
        sums += rh * C
        if rest is not None:
            rest += rh * C
        near, far, kept = _decayed_rows(sums, rest, C)
    # Rows write, columns read: not every version of Triton transposes the result of a product right.
    pairs, by_states = _products(
        r + first * V, do + first * V, d_states + rh * K * V, size, d, HV, K, V, C, BV, DOT
    )
    itself = tl.sum(tl.where(s == t, pairs, 0.0), 1)[:, None] * scale
    pairs = tl.where(t < s, pairs * scale, 0.0)
    if sums is not None:
        pairs *= _decayed_pairs(sums, rest, C)
        by_states *= far[:, None]
    in_chunk = split_dot(pairs, load_tile(q + at_q, i, size, 0, d, H, K), DOT)
    pairs, _ = _products(r + first * V, dv + first * V, None, size, d, HV, K, V, C, BV, DOT)
    pairs = tl.where(t < s, -pairs, 0.0)
    if sums is not None:
        pairs *= _decayed_pairs(sums, rest, C)
    k_ = load_tile(k + at_q, i, size, 0, d, H, K)
    in_chunk = split_dot(pairs, k_, DOT, in_chunk)
    at = ((row * 3 * PARTS + PARTS - tiles + tile) * HV + h) * C + i
    if d_sums is not None:
        tl.store(d_sums + at + BEGINNING * PARTS * HV * C, tl.sum(in_chunk * k_, 1) * beta_i)
        tl.store(d_sums + at + TO_END * PARTS * HV * C, tl.sum(by_states * k_, 1) * beta_i)
    # No gate decays the pair of a token with itself: its gradient would drown that of the others.
    written = in_chunk + by_states + itself * load_tile(q + at_q, i, size, 0, d, H, K)
    tl.store(dbeta + (lo * tiles + tile) * HV + h + i * tiles * HV, tl.sum(written * k_, 1), mask=i < size)
    written *= beta_i[:, None]

    # Rows read, columns write. Keys read with the gradient -dv.
    pairs, by_states = _products(
        dv + first * V, r + first * V, states + rh * K * V, size, d, HV, K, V, C, BV, DOT
    )
    pairs = tl.where(s < t, pairs * beta_i[None, :], 0.0)
    if sums is not None:
        pairs *= _decayed_pairs(sums, rest, C)
        by_states *= near[:, None]
    k_ = load_tile(k + at_q, i, size, 0, d, H, K)
    by_states = split_dot(pairs, k_, DOT, by_states)
    if d_sums is not None:
        tl.store(d_sums + at + ENDING * PARTS * HV * C, -tl.sum(by_states * k_, 1))
    store_tile(dk + first * K, written - by_states, i, size, 0, d, HV, K)
    if d_sums is not None:
        whole = tl.zeros([BK], dtype=tl.float32)
        for v0 in range(0, V, BV):
            d2 = v0 + tl.arange(0, BV)
            S = load_state(states + rh * K * V, d, d2, K, V).to(tl.float32)
            whole += tl.sum(S * load_state(d_states + rh * K * V, d, d2, K, V), 0)
        tl.store(d_whole + rh * K + d, whole * kept, mask=d < K)
