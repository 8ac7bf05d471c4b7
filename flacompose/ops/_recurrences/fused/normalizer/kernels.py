"""Triton kernels of the denominator of mLSTM and its gradients.

    n_t = exp(g_t) n_{t-1} + beta_t k_t        z_t = scale * n_t^T q_t
    o_t = x_t / (max(|z_t|, floor_t) + eps)

`normalizer_state_passing_kernel` stores the state ``n`` before each chunk. Then all chunks are computed in
parallel, from `n`, from the gradient `dn` of the state after the chunk, and from the decays ``w``:

    z_i = scale * (sum over j <= i of w_ij beta_j (q_i . k_j) + w_i n . q_i)       w_i from the chunk's start
    dq_i = scale dz_i (sum over j <= i of w_ij beta_j k_j + w_i n)
    dk_j = beta_j (sum over i >= j of w_ij scale dz_i q_i + w_j dn)                w_j to the chunk's end

A small `z` is a difference of large terms, so rounded weights would lose it. Only queries and
keys enter products in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    chunk_of_program,
    chunks_of_segment,
    clamp_gate,
    decayed,
    dot,
    find_sequence,
    in_float32,
    is_idle,
    load_numbers,
    load_tile,
    numbers_of_tile,
    size_of_chunk,
    split_dot,
    split_program,
    state_number,
    store_tile,
)


@triton.jit
def _sums(g, first, t, size, H):
    """The running sums of the gates of a chunk, and the sum of all its gates, each in two parts to be added.

    The first parts are multiples of 2^-9, whose sums are exact. So the difference of two running sums is
    as accurate as a sum of the gates between them, even after strong gates.
    """
    gates = clamp_gate(load_numbers(g, first, t, size, H))
    high = tl.floor(gates * 512.0) / 512.0
    low = gates - high
    return tl.cumsum(high, 0), tl.cumsum(low, 0), tl.sum(high, 0), tl.sum(low, 0)


@triton.jit
def _between(high, low, t):
    """The decays ``[C, C]`` from a token (second axis) to a later token (first axis), 1 elsewhere."""
    sums = high[:, None] - high[None, :] + (low[:, None] - low[None, :])
    return tl.exp(tl.where(t[:, None] > t[None, :], sums, 0.0))


@triton.jit
def _load_state(states, row, d, K):
    return tl.load(states + row * K + d, mask=d < K, other=0.0)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "SEGMENTS"])
def normalizer_state_passing_kernel(
    x,  # [tokens, H, K]
    strength,  # [tokens, HV]
    g,  # [tokens, HV]
    initial,  # [SEGMENTS, N, HV, K], before each segment
    states,  # [chunks, HV, K]: the state before each chunk, or with `REVERSE` after it
    ends,  # [SEGMENTS, N, HV, K], after each segment but the last
    sum_g,  # [SEGMENTS, N, HV], the sum of each segment's gates
    final,  # [N, HV, K]
    cu_seqlens,
    T,
    N,
    H,
    HV,
    SEGMENTS,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``n <- exp(g_t) n + strength_t x_t`` or, with `REVERSE`, ``dn <- exp(g_t) (dn + strength_t x_t)`` backwards.

    One program per segment of a sequence and tile of the state. Without `initial` it starts at zero. It
    stores `states`, `ends` and `final`, if given.
    """
    tile, segment, nh = split_program(tl.cdiv(K, BK), SEGMENTS)
    if is_idle(segment, SEGMENTS, ends, states is not None):
        return
    hv = nh % HV
    h = hv // (HV // H)
    d = numbers_of_tile(tile, BK)
    lo, hi, row0, _, begin, stop = chunks_of_segment(nh // HV, segment, SEGMENTS, T, cu_seqlens, C, REVERSE)
    S = tl.zeros([BK], dtype=tl.float32)
    if initial is not None:
        S += _load_state(initial, segment * N * HV + nh, d, K).to(tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    t = tl.arange(0, C)
    # The number of stages of a launch holds for loads that feed products only, so the loop states it too.
    for i in tl.range(begin, stop, num_stages=STAGES):
        chunk = begin + stop - 1 - i if REVERSE else i
        start = lo + chunk * C
        size = size_of_chunk(start, hi, C)
        x_ = load_tile(x + (start * H + h) * K, t, size, 0, d, H, K)
        weight = load_numbers(strength, start * HV + hv, t, size, HV)
        high, low, all_high, all_low = _sums(g, start * HV + hv, t, size, HV)
        weight *= tl.exp(high + low) if REVERSE else tl.exp(all_high - high + (all_low - low))
        if states is not None:
            tl.store(states + ((row0 + chunk) * HV + hv) * K + d, S, mask=d < K)
        S = decayed(S, all_high + all_low) + tl.sum(x_.to(tl.float32) * weight[:, None], 0)
        total += all_high + all_low
    if sum_g is not None:
        tl.store(sum_g + segment * N * HV + nh, total)
    if ends is not None:
        tl.store(ends + (segment * N * HV + nh) * K + d, S, mask=d < K)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + nh * K + d, S.to(final.dtype.element_ty), mask=d < K)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale", "eps"])
def normalizer_division_kernel(
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    x,  # [tokens, HV, V]
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    floor,  # [tokens, HV]
    states,  # [chunks, HV, K], before each chunk
    do,  # [tokens, HV, V]
    o,  # [tokens, HV, V]
    dx,  # [tokens, HV, V]; like `dz` and `d_floor`, computed from `do`
    dz,  # [tokens, HV], times `scale`
    d_floor,  # [tokens, HV]
    cu_seqlens,
    T,
    N,
    scale,
    eps,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """The output of a chunk or, with `do`, the gradients of `x`, `z` and `floor`."""
    scale, eps = in_float32(scale), in_float32(eps)
    row, hv, lo, hi = chunk_of_program(T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    h = hv // (HV // H)
    size = size_of_chunk(lo, hi, C)
    t = tl.arange(0, C)
    at = lo * HV + hv

    # 1. Queries read the keys of the chunk and the state before it.
    scores = tl.zeros([C, C], dtype=tl.float32)
    before = tl.zeros([C], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        q_ = load_tile(q + (lo * H + h) * K, t, size, 0, d, H, K)
        k_ = load_tile(k + (lo * H + h) * K, t, size, 0, d, H, K)
        scores += dot(q_, tl.trans(k_), DOT)
        before += tl.sum(q_.to(tl.float32) * _load_state(states, row * HV + hv, d, K)[None, :], 1)
    high, low, _, _ = _sums(g, at, t, size, HV)
    scores *= _between(high, low, t) * load_numbers(beta, at, t, size, HV)[None, :]
    z = tl.sum(tl.where(t[:, None] >= t[None, :], scores, 0.0), 1)
    z = scale * (z + tl.exp(high + low) * before)

    # 2. The denominator. It is 1 beyond the end of the sequence.
    floor_ = tl.load(floor + at + t * HV, mask=t < size, other=1.0).to(tl.float32)
    weight = tl.maximum(tl.abs(z), floor_, propagate_nan=tl.PropagateNan.ALL) + eps
    d_weight = tl.zeros([C], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        o_ = load_tile(x + at * V, t, size, 0, d2, HV, V).to(tl.float32) / weight[:, None]
        if do is None:
            store_tile(o + at * V, o_, t, size, 0, d2, HV, V)
        else:
            do_ = load_tile(do + at * V, t, size, 0, d2, HV, V).to(tl.float32)
            d_weight -= tl.sum(do_ * o_, 1)
            if dx is not None:
                store_tile(dx + at * V, do_ / weight[:, None], t, size, 0, d2, HV, V)
    if do is not None:
        d_weight /= weight
        is_floor = tl.abs(z) <= floor_
        dz_ = tl.where(is_floor, 0.0, tl.where(z < 0.0, -d_weight, d_weight))
        tl.store(dz + at + t * HV, scale * dz_, mask=t < size)
        if d_floor is not None:
            d_floor_ = tl.where(is_floor, d_weight, 0.0).to(d_floor.dtype.element_ty)
            tl.store(d_floor + at + t * HV, d_floor_, mask=t < size)


@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def normalizer_gradient_kernel(
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    dz,  # [tokens, HV], times `scale`
    states,  # [chunks, HV, K], before each chunk
    d_states,  # [chunks, HV, K], the gradient of the state after it
    dq,  # [tokens, HV, K], for each value head, like `dk`
    dk,  # [tokens, HV, K]
    dg,  # [tokens, HV]
    dbeta,  # [tokens, HV]
    cu_seqlens,
    T,
    N,
    H,
    HV,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradients of queries, keys, gates and `beta`, of a chunk and a head."""
    row, hv, lo, hi = chunk_of_program(T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    h = hv // (HV // H)
    size = size_of_chunk(lo, hi, C)
    t = tl.arange(0, C)
    at, state = lo * HV + hv, row * HV + hv
    q += (lo * H + h) * K
    k += (lo * H + h) * K

    # 1. The products of queries and keys, with each other and with the states.
    scores = tl.zeros([C, C], dtype=tl.float32)
    read = tl.zeros([C], dtype=tl.float32)
    left = tl.zeros([C], dtype=tl.float32)
    both = tl.zeros([], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        q_, k_ = load_tile(q, t, size, 0, d, H, K), load_tile(k, t, size, 0, d, H, K)
        n, dn = _load_state(states, state, d, K), _load_state(d_states, state, d, K)
        scores += dot(q_, tl.trans(k_), DOT)
        read += tl.sum(q_.to(tl.float32) * n[None, :], 1)
        left += tl.sum(k_.to(tl.float32) * dn[None, :], 1)
        both += tl.sum(n * dn, 0)

    # 2. The gradient of a gate is summed over all sums of gates that contain it: between two tokens of the
    # chunk, from its start to a token, from a token to its end, and over the whole chunk.
    high, low, all_high, all_low = _sums(g, at, t, size, HV)
    beta_ = load_numbers(beta, at, t, size, HV)
    from_start = tl.exp(high + low) * load_numbers(dz, at, t, size, HV)
    to_end = tl.exp(all_high - high + (all_low - low))
    pairs = _between(high, low, t) * load_numbers(dz, at, t, size, HV)[:, None]
    pairs = tl.where(t[:, None] >= t[None, :], pairs, 0.0)
    d_pairs = tl.where(t[:, None] >= t[None, :], pairs * scores, 0.0)
    left *= to_end
    if dbeta is not None:
        dbeta_ = tl.sum(d_pairs, 0) + left
        tl.store(dbeta + at + t * HV, dbeta_.to(dbeta.dtype.element_ty), mask=t < size)
    if dg is not None:
        d_pairs = tl.where(t[:, None] > t[None, :], d_pairs * beta_[None, :], 0.0)
        ending = tl.sum(d_pairs, 1) - tl.sum(d_pairs, 0) + from_start * read
        leaving = tl.sum(tl.where(t[:, None] > t[None, :], (left * beta_)[None, :], 0.0), 1)
        dg_ = tl.cumsum(ending, 0, reverse=True) + leaving + both * tl.exp(all_high + all_low)
        tl.store(dg + at + t * HV, dg_.to(dg.dtype.element_ty), mask=t < size)

    # 3. The gradients of queries and keys.
    pairs *= beta_[None, :]
    to_end *= beta_
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        if dq is not None:
            n = _load_state(states, state, d, K)
            acc = split_dot(pairs, load_tile(k, t, size, 0, d, H, K), DOT, from_start[:, None] * n[None, :])
            store_tile(dq + at * K, acc, t, size, 0, d, HV, K)
        if dk is not None:
            dn = _load_state(d_states, state, d, K)
            acc = to_end[:, None] * dn[None, :]
            acc = split_dot(tl.trans(pairs), load_tile(q, t, size, 0, d, H, K), DOT, acc)
            store_tile(dk + at * K, acc, t, size, 0, d, HV, K)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale", "eps"])
def normalizer_token_kernel(
    q,  # [tokens, H, K]; q_token elements separate its tokens
    k,  # [tokens, H, K], likewise
    x,  # [tokens, HV, V], likewise
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    floor,  # [tokens, HV]
    initial,  # [N, HV, K]
    o,  # [tokens, HV, V]
    final,  # [N, HV, K], or [N, count, HV, K]
    cu_seqlens,
    T,
    N,
    scale,
    eps,
    H,
    HV,
    K,
    V,
    q_token,
    k_token,
    x_token,
    count,  # the number of stored states, see `state_number`; None for the final one alone
    stride,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The recurrence token by token, one program per sequence and head."""
    scale, eps = in_float32(scale), in_float32(eps)
    hv, n, _ = split_program(HV, N)
    h = hv // (HV // H)
    d, d2 = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = d < K, d2 < V
    start, end, _ = find_sequence(n, T, cu_seqlens, 1)
    S = tl.zeros([BK], dtype=tl.float32)
    if initial is not None:
        S += _load_state(initial, n * HV + hv, d, K).to(tl.float32)
    for token in range(start, end):
        at = token * HV + hv
        q_ = tl.load(q + token * q_token + h * K + d, mask=in_k, other=0.0).to(tl.float32)
        k_ = tl.load(k + token * k_token + h * K + d, mask=in_k, other=0.0).to(tl.float32)
        x_ = tl.load(x + token * x_token + hv * V + d2, mask=in_v, other=0.0).to(tl.float32)
        S = decayed(S, tl.load(g + at)) + tl.load(beta + at).to(tl.float32) * k_
        z = scale * tl.sum(S * q_, 0)
        floor_ = tl.load(floor + at).to(tl.float32)
        weight = tl.maximum(tl.abs(z), floor_, propagate_nan=tl.PropagateNan.ALL) + eps
        tl.store(o + at * V + d2, (x_ / weight).to(o.dtype.element_ty), mask=in_v)
        if count is not None:
            i = state_number(end - 1 - token, count, stride)
            if i >= 0:
                tl.store(final + ((n * count + i) * HV + hv) * K + d, S, mask=in_k)
    if count is None:
        tl.store(final + (n * HV + hv) * K + d, S, mask=in_k)
