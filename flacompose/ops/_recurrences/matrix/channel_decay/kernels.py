"""Triton kernels of channel decay: state passing over chunks, and the pairs of tokens within a chunk.

The module `eager` explains the chunked algorithm. Here a chunk is one tile, and a mask selects the pairs of a level
of blocks. At each level a token is a reader if its block is odd, or a writer if its block is even, and has one row of
one matrix product, with one weight. `gates_of_channels` computes the sums of gates for this weight. Where the gates of
a chunk are factorisable, one product contains all pairs.

Output and gradients within a chunk are one computation. The vectors `a` and `b` of two tokens are contracted
along one axis, D1. Their product is the weight of the pair, ``P[t, s]``, which multiplies a third vector, `x` or `y`,
along the other axis, D2:

    result                         a   b   x   y   D1  D2   kernel, where the gates `gk` and `gv` are given or not
    o_t  = sum over s of P v_s     q   k   v       K   V    plain without gv, gated with it (`read`)
    dv_s = sum over t of P do_t    q   k       do  K   V    gated with gv (`write`)
                                   k   q   do      K   V    plain, `REVERSE`, without gv
    dq_t = sum over s of P k_s     do  v   k       V   K    plain without gk, gated with it (`read`)
    dk_s = sum over t of P q_t     do  v       q   V   K    gated with gk (`write`)
                                   v   do  q       V   K    plain, `REVERSE`, without gk

So `channel_decay_plain_axis_kernel` writes along an axis that no gate decays, and computes P itself.
`channel_decay_gated_axis_kernel` writes along an axis that a gate decays, and computes the gradient of this gate too.
It computes P itself only if it computes reads alone and its axis is one tile. Otherwise its registers do not suffice,
so `channel_decay_score_kernel` computes P. The contributions of other chunks come from the states `S` before each chunk
and the gradients `dS` of the states after it. `channel_decay_state_passing_kernel` stores both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.gates_of_channels import (
    FACTORISABLE_BOUND,
    LEVELS,
    C,
    exact_pairs,
    factorisable_for_gradient,
    from_middle,
    has_bounded_means,
    in_local_sum,
    load_clamped_gates,
    middle_sums,
    reads_gate,
    rounded_dot,
    scaled_gate_size,
    select,
    siblings,
    size_of_sums,
    tf32_rounded,
)
from flacompose.ops._tiles.blocks import (
    chunk_of_program,
    chunks_of_segment,
    clamp_gate,
    dot,
    fine_dot,
    in_float32,
    is_idle,
    load_tile,
    split_dot,
    split_program,
    store_tile,
    tile_of_program,
)


@triton.jit(do_not_specialize=["T", "N", "H", "SEGMENTS", "scale"])
def channel_decay_state_passing_kernel(
    a,  # [tokens, H, K]
    x,  # [tokens, H, V]
    gk,  # [tokens, H, K]
    gv,  # [tokens, H, V]
    initial,  # [SEGMENTS, N, H, K, V], before each segment
    states,  # [chunks, H, K, V], before each chunk
    ends,  # [SEGMENTS, N, H, K, V], after each segment but the last
    sum_gk,  # [SEGMENTS, N, H, K], the sums of each segment's gates
    sum_gv,  # [SEGMENTS, N, H, V]
    final,  # [N, H, K, V]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    K,
    V,
    SEGMENTS,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``S <- diag(exp sum gk) S diag(exp sum gv) + a^T x``, with `a` and `x` decayed to a chunk's end.

    One program passes the state through one segment of one sequence. It starts at zero if `initial` is
    absent, and stores `states`, `ends` and `final`, if given. With `REVERSE` it goes backwards in time.
    """
    tiles_v = tl.cdiv(V, BV)
    scale = in_float32(scale)
    tile, segment, nh = split_program(tl.cdiv(K, BK) * tiles_v, SEGMENTS)
    if is_idle(segment, SEGMENTS, ends, states is not None):
        return
    at_end = segment * N * H + nh
    n = nh // H
    h = nh % H
    dk = (tile // tiles_v) * BK + tl.arange(0, BK)
    dv = (tile % tiles_v) * BV + tl.arange(0, BV)
    in_state = (dk < K)[:, None] & (dv < V)[None, :]
    at_state = dk[:, None] * V + dv[None, :]
    lo, hi, row0, chunks, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C)

    # 1. The state before the segment.
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if initial is not None:
        S += tl.load(initial + at_end * K * V + at_state, mask=in_state, other=0.0)
    gates_k = tl.zeros([BK], dtype=tl.float32)
    gates_v = tl.zeros([BV], dtype=tl.float32)

    t = tl.arange(0, C)
    for i in range(begin, stop):
        chunk = chunks - 1 - i if REVERSE else i
        if states is not None:
            at = states + ((row0 + chunk) * H + h) * K * V + at_state
            tl.store(at, S.to(states.dtype.element_ty), mask=in_state)
        # 2. The chunk's vectors, decayed to its end or, backwards, to its start; and the decayed state.
        token = lo + chunk * C + t
        at_k = (token * H + h)[None, :] * K + dk[:, None]
        in_k = (token < hi)[None, :] & (dk < K)[:, None]
        a_ = tl.load(a + at_k, mask=in_k, other=0.0)  # [BK, C]
        x_ = load_tile(x, token, hi, h, dv, H, V)  # [C, BV]
        if REVERSE:
            a_ = a_ * scale
        if gk is not None:
            g = clamp_gate(tl.load(gk + at_k, mask=in_k, other=0.0)).to(gk.dtype.element_ty)
            to_edge = reads_gate(t[:, None], t[None, :], READ_BEFORE) if REVERSE else t[None, :] > t[:, None]
            a_ = a_ * tl.exp(tl.trans(select(to_edge, tl.trans(g), DOT)))
            total = tl.sum(g.to(tl.float32), 1)
            S *= tl.exp(total)[:, None]
            if sum_gk is not None:
                gates_k += total
        if gv is not None:
            g = load_clamped_gates(gv, token, hi, h, dv, H, V)
            to_edge = reads_gate(t[:, None], t[None, :], READ_BEFORE) if REVERSE else t[None, :] > t[:, None]
            x_ = x_ * tl.exp(select(to_edge, g, DOT))
            total = tl.sum(g.to(tl.float32), 0)
            S *= tl.exp(total)[None, :]
            if sum_gv is not None:
                gates_v += total
        # 3. The update by the chunk.
        S += dot(a_, x_, DOT)

    # 4. The results of the segment.
    if sum_gk is not None:
        tl.store(sum_gk + at_end * K + dk, gates_k, mask=dk < K)
    if sum_gv is not None:
        tl.store(sum_gv + at_end * V + dv, gates_v, mask=dv < V)
    if ends is not None:
        tl.store(ends + at_end * K * V + at_state, S, mask=in_state)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + nh * K * V + at_state, S.to(final.dtype.element_ty), mask=in_state)


@triton.jit
def _diagonal(a, b, u, h, d, D):
    """``a_t . b_t``, weighted by the bonus ``u [H, D]`` if there is one."""
    product = a.to(tl.float32) * b.to(tl.float32)
    if u is not None:
        product *= tl.load(u + h * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return tl.sum(product, 1)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def channel_decay_score_kernel(
    a,  # [tokens, H, D]
    b,  # [tokens, H, D]
    g,  # [tokens, H, D]
    u,  # [H, D]
    P,  # [chunks, H, C, C]
    factorisable_chunks,  # [chunks, H], whether gates are factorisable: chunks to leave out
    cu_seqlens,
    T,
    N,
    scale,
    H,
    D,
    BD: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``P[t, s] = scale * a_t . b_s`` within a chunk, decayed by `g`, for ``s <= t``, with `u` for ``s = t``.

    Chunks that are marked as factorisable in `factorisable_chunks`, if given, are left out.
    """
    scale = in_float32(scale)
    row, h, lo, hi = chunk_of_program(T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    if factorisable_chunks is not None:
        if tl.load(factorisable_chunks + row * H + h) != 0:
            return
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    token = lo + i

    # 1. The products of pairs, decayed by the gates between them.
    lower = tl.zeros([C, C], dtype=tl.float32)
    diagonal = tl.zeros([C], dtype=tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        a_ = load_tile(a, token, hi, h, d, H, D)
        b_ = load_tile(b, token, hi, h, d, H, D)
        if g is None:
            lower += dot(a_, tl.trans(b_), DOT)
        else:
            g_ = load_clamped_gates(g, token, hi, h, d, H, D)
            write, read = middle_sums(g_, t, s, READ_BEFORE, DOT)
            if tl.max(size_of_sums(write, read)) < FACTORISABLE_BOUND:
                lower += fine_dot(a_ * tl.exp(read), tl.trans(b_ * tl.exp(-write)), DOT)
            else:
                lower += exact_pairs(a_, b_, g_, t, s, READ_BEFORE, DOT)
        if READ_BEFORE and (g is not None or u is not None):
            diagonal += _diagonal(a_, b_, u, h, d, D)

    # 2. A token's product with itself.
    lower = tl.where(s <= t, lower, 0.0)
    if READ_BEFORE and (g is not None or u is not None):
        # No gate lies between a read before the decay and the write of the same token.
        lower = tl.where(t == s, diagonal[:, None], lower)
    at = P + (row * H + h) * C * C + t * C + s
    tl.store(at, lower * scale)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def channel_decay_plain_axis_kernel(
    a,  # [tokens, H, D1]
    b,  # [tokens, H, D1]
    x,  # [tokens, H, D2]
    g,  # [tokens, H, D1]
    u,  # [H, D1]
    S,  # [chunks, H, D1, D2], with the strides of states
    out,  # [tokens, H, D2]
    factorisable_chunks,  # [chunks, H], whether gates are factorisable
    cu_seqlens,
    T,
    N,
    scale,
    H,
    axes,  # `Axes`
    BD1: tl.constexpr,
    BD2: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    REVERSE: tl.constexpr,
    FOR_GRADIENT: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``out_t = sum over s of (scale * a_t . b_s) x_s + scale * S^T a_t``, along an axis that no gate decays.

    `g` decays the products `a_t . b_s` and the read of `S`, the state before the chunk; `u` weights ``a_t .
    b_t``. With `REVERSE` time runs backwards: `s` are later tokens, and `S` is the gradient of the state
    after the chunk, which contains `scale` already.

    With `g` it is launched twice: with `FACTORISABLE` for the chunks whose gates are factorisable, which it marks in
    `factorisable_chunks`, and then for the others, because one kernel for both would need twice the registers. With
    `FOR_GRADIENT` the marks hold for the gradient of `g` too.
    """
    D1, D2, stride1, stride2 = axes
    tiles = tl.cdiv(D2, BD2)
    scale = in_float32(scale)
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    if not FACTORISABLE:
        if tl.load(factorisable_chunks + row * H + h) != 0:
            return
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    token = lo + i
    d2 = tile * BD2 + tl.arange(0, BD2)

    # 1. In blocks of the contracted axis: the products of pairs of tokens, and the reads of the state.
    acc = tl.zeros([C, BD2], dtype=tl.float32)
    pairs = tl.zeros([C, C], dtype=tl.float32)
    diagonal = tl.zeros([C], dtype=tl.float32)
    sizes = tl.zeros([C, BD1], dtype=tl.float32)
    for d in range(0, D1, BD1):
        d1 = d + tl.arange(0, BD1)
        a_ = load_tile(a, token, hi, h, d1, H, D1)
        b_ = load_tile(b, token, hi, h, d1, H, D1)
        if g is None:
            pairs += dot(a_, tl.trans(b_), DOT)
        else:
            g_ = load_clamped_gates(g, token, hi, h, d1, H, D1)
            if FACTORISABLE:
                write, read = middle_sums(g_, t, s, READ_BEFORE, DOT)
                sizes = tl.maximum(sizes, size_of_sums(write, read))
                if FOR_GRADIENT:
                    sizes = tl.maximum(sizes, scaled_gate_size(g_, DOT))
                if REVERSE:
                    pairs += fine_dot(a_ * tl.exp(-write), tl.trans(b_ * tl.exp(read)), DOT)
                else:
                    pairs += fine_dot(a_ * tl.exp(read), tl.trans(b_ * tl.exp(-write)), DOT)
            elif REVERSE:
                pairs += exact_pairs(b_, a_, g_, t, s, READ_BEFORE, DOT)
            else:
                pairs += exact_pairs(a_, b_, g_, t, s, READ_BEFORE, DOT)
        if u is not None:
            diagonal += _diagonal(a_, b_, u, h, d1, D1)
        if g is not None:
            a_ = a_ * tl.exp(select(s > t if REVERSE else reads_gate(t, s, READ_BEFORE), g_, DOT))
        at = (row * H + h) * D1 * D2 + d1[:, None] * stride1 + d2[None, :] * stride2
        acc += dot(a_, tl.load(S + at, mask=(d1 < D1)[:, None] & (d2 < D2)[None, :], other=0.0), DOT)
    if not REVERSE:
        acc *= scale

    # 2. Whether the gates were factorisable. If not, the second launch computes the chunk.
    if FACTORISABLE and g is not None:
        is_factorisable = tl.max(sizes) < FACTORISABLE_BOUND
        if FOR_GRADIENT and DOT != tl.float32:
            if not is_factorisable:
                is_factorisable = factorisable_for_gradient(g, token, hi, h, H, D1, BD1, READ_BEFORE, DOT)
        tl.store(factorisable_chunks + row * H + h, is_factorisable.to(tl.int8))
        if not is_factorisable:
            return
    # 3. The pairs in causal order multiply `x`.
    pairs = tl.where(
        reads_gate(s, t, READ_BEFORE) if REVERSE else reads_gate(t, s, READ_BEFORE), pairs * scale, 0.0
    )
    if u is not None:
        pairs = tl.where(t == s, diagonal[:, None] * scale, pairs)
    acc += split_dot(pairs, load_tile(x, token, hi, h, d2, H, D2), DOT)
    store_tile(out, acc, token, hi, h, d2, H, D2)


class Vectors(NamedTuple):
    a: Any  # [tokens, H, D1]
    b: Any  # [tokens, H, D1]
    x: Any  # [tokens, H, D2]
    y: Any  # [tokens, H, D2]


class Results(NamedTuple):
    read: Any = None  # [tokens, H, D2]
    write: Any = None  # [tokens, H, D2]
    dg2: Any = None  # [tokens, H, D2]
    du: Any = None  # [chunks, H, D2], the sums over chunks


@triton.jit
def _other_chunks(
    P, a, b, g1, S, dS, tile, D1, state, BD1: tl.constexpr, READ_BEFORE: tl.constexpr, DOT: tl.constexpr
):
    """The contributions of other chunks to a `tile` of `channel_decay_gated_axis_kernel`, before `g2` decays them.

    Returns ``S^T a_t``, ``dS^T b_s`` and the gradient of the sum of `g2` over the chunk, ``sum over D1 of S
    dS``; and if `P` is absent, the products ``a_t . b_s``.
    """
    token, end, h, d2, H, D2 = tile
    offset, stride1, stride2 = state
    BD2: tl.constexpr = d2.shape[0]
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    before = tl.zeros([C, BD2], dtype=tl.float32)
    after = tl.zeros([C, BD2], dtype=tl.float32)
    d_total = tl.zeros([BD2], dtype=tl.float32)
    pairs = tl.zeros([C, C], dtype=tl.float32)
    for d in range(0, D1, BD1):
        d1 = d + tl.arange(0, BD1)
        at = offset + d1[:, None] * stride1 + d2[None, :] * stride2
        in_state = (d1 < D1)[:, None] & (d2 < D2)[None, :]
        if S is not None:
            a_ = load_tile(a, token, end, h, d1, H, D1)
            if P is None:
                pairs += dot(a_, tl.trans(load_tile(b, token, end, h, d1, H, D1)), DOT)
        if g1 is not None:
            gate = load_clamped_gates(g1, token, end, h, d1, H, D1)
        if S is not None:
            if g1 is not None:
                a_ = a_ * tl.exp(select(reads_gate(t, s, READ_BEFORE), gate, DOT))
            S_ = tl.load(S + at, mask=in_state, other=0.0)
            before += dot(a_, S_, DOT)
        if dS is not None:
            b_ = load_tile(b, token, end, h, d1, H, D1)
            if g1 is not None:
                b_ = b_ * tl.exp(select(s > t, gate, DOT))
            dS_ = tl.load(dS + at, mask=in_state, other=0.0)
            after += dot(b_, dS_, DOT)
        if S is not None and dS is not None:
            kept = S_.to(tl.float32) * dS_.to(tl.float32)
            if g1 is not None:
                kept *= tl.exp(tl.sum(gate.to(tl.float32), 0))[:, None]
            d_total += tl.sum(kept, 0)
    return before, after, d_total, pairs


@triton.jit
def _factorisable_chunk(
    sums, P, x, y, g2, S, dS, read, dg2, tile, READ_BEFORE: tl.constexpr, DOT: tl.constexpr
):
    """`sums` of `_other_chunks`, decayed by `g2`, plus the pairs of two different tokens of this chunk.

    The gates are factorisable: one product, relative to the chunk's middle, contains all pairs. Fills `dg2`.
    """
    before, after, d_total, pairs = sums
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    late = t >= C // 2
    g = load_clamped_gates(g2, *tile)
    write_sum, read_sum = middle_sums(g, t, s, READ_BEFORE, DOT)
    if S is not None:
        writer = tf32_rounded(load_tile(x, *tile) * tl.exp(-write_sum), DOT)
        before *= tl.exp(tl.sum(tl.where(late, 0.0, g.to(tl.float32)), 0))[None, :]
    if dS is not None:
        reader = tf32_rounded(load_tile(y, *tile) * tl.exp(read_sum), DOT)
        after *= tl.exp(tl.sum(tl.where(late, g.to(tl.float32), 0.0), 0))[None, :]
    if dg2 is not None:
        d_total *= tl.exp(tl.sum(g.to(tl.float32), 0))
        late_sum = d_total + tl.sum(writer * after, 0)
        early_sum = d_total + tl.sum(reader * before, 0)
    if S is not None:
        if P is not None:
            pairs = tl.load(P + t * C + s)
        before += rounded_dot(tf32_rounded(tl.where(t == s, 0.0, pairs), DOT), writer, DOT)
    if dS is not None:
        transposed = tf32_rounded(tl.load(P + s * C + t, mask=t != s, other=0.0), DOT)
        after += rounded_dot(transposed, reader, DOT)
    if dg2 is not None:
        # A pair that the gate does not decay is added once and subtracted once, as a product of the same rounded
        # factors, so it cancels.
        dg = tl.where(late, late_sum[None, :], early_sum[None, :])
        dg += select(from_middle(s, t), reader * before - writer * after, DOT)
        if READ_BEFORE:
            dg -= reader * before
    if dS is not None:
        after *= tl.exp(-write_sum)
    if dg2 is not None:
        store_tile(dg2, dg, *tile)
    if read is not None:
        if DOT != tl.float32:
            # The rounding error of P is added last, since the gate's gradient needs two products of equal factors.
            if P is not None:
                pairs = tl.load(P + t * C + s)
            rest = tl.where(t == s, 0.0, pairs - tf32_rounded(pairs, DOT))
            before += dot(rest, writer, DOT)
        before *= tl.exp(read_sum)
    return before, after


@triton.jit
def _chunk_by_levels(sums, P, x, y, g2, S, dS, dg2, tile, READ_BEFORE: tl.constexpr, DOT: tl.constexpr):
    """`_factorisable_chunk` for any gates: one product for each level contains the pairs of sibling blocks."""
    before, after, d_total, _ = sums
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    g = load_clamped_gates(g2, *tile)
    if S is not None:
        x_ = load_tile(x, *tile)
        before *= tl.exp(select(reads_gate(t, s, READ_BEFORE), g, DOT))
    if dS is not None:
        y_ = load_tile(y, *tile)
        after *= tl.exp(select(s > t, g, DOT))
    if dg2 is not None:
        dg = select(reads_gate(s, t, READ_BEFORE), y_ * before, DOT) + select(t > s, x_ * after, DOT)
        dg += (d_total * tl.exp(tl.sum(g.to(tl.float32), 0)))[None, :]
    for level in range(LEVELS):
        odd = ((t >> level) & 1) == 1
        weight = tl.exp(select(in_local_sum(t, s, level, READ_BEFORE), g, DOT))
        # One product for readers and writers: a row is one of P for a reader, and one of its transpose for a writer.
        at = tl.where(odd, t * C + s, s * C + t)
        pairs = tf32_rounded(tl.load(P + at, mask=siblings(t, s, level), other=0.0), DOT)
        if S is None:
            role = tl.where(odd, y_, 0.0)
        elif dS is None:
            role = tl.where(odd, 0.0, x_)
        else:
            role = tl.where(odd, y_, x_)
        out = weight * rounded_dot(pairs, tf32_rounded(role * weight, DOT), DOT)
        if S is not None:
            before += tl.where(odd, out, 0.0)
        if dS is not None:
            after += tl.where(odd, 0.0, out)
        if dg2 is not None:
            dg += select(in_local_sum(s, t, level, READ_BEFORE), role * out, DOT)
    if dg2 is not None:
        store_tile(dg2, dg, *tile)
    return before, after


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def channel_decay_gated_axis_kernel(
    P,  # [chunks, H, C, C]; if absent, computed here from `a` and `b`
    vectors,  # `Vectors`
    g1,  # [tokens, H, D1]
    g2,  # [tokens, H, D2]
    u,  # [H, D2]
    S,  # [chunks, H, D1, D2], with the strides of states; given with `read` and with `dg2`
    dS,  # [chunks, H, D1, D2], likewise; given with `write` and with `dg2`
    results,  # `Results`, each of which may be None
    factorisable_tiles,  # [chunks, H] if `KNOWN`, otherwise [chunks, H, tiles of D2]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    axes,  # `Axes`
    BD1: tl.constexpr,
    BD2: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    KNOWN: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``read_t = sum over s of P[t, s] x_s + scale * S^T a_t``, along an axis that the gate `g2` decays.

    It also computes ``write_s = sum over t of P[t, s] y_t + dS^T b_s``, and the gradients of `g2` and of `u`, which
    weights ``P[t, t]``. It fills the results that are given. `S` is the state before the chunk, `dS`
    the gradient of the state after it.

    It is launched twice: with `FACTORISABLE` for the tiles whose gates are factorisable, which it marks in
    `factorisable_tiles` unless that is `KNOWN`, and then for the others, because one kernel for both would need twice
    the registers. Registers are scarce, so inputs are loaded again rather than kept.
    """
    a, b, x, y = vectors
    read, write, dg2, du = results
    D1, D2, stride1, stride2 = axes
    tiles = tl.cdiv(D2, BD2)
    scale = in_float32(scale)
    column, row, h, lo, hi = tile_of_program(tiles, T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    token = lo + i
    d2 = column * BD2 + tl.arange(0, BD2)
    # 1. Whether the gates are factorisable, and so whether this launch computes the tile.
    at_mark = factorisable_tiles + (row * H + h if KNOWN else (row * H + h) * tiles + column)
    if KNOWN or not FACTORISABLE:
        if (tl.load(at_mark) != 0) != FACTORISABLE:
            return
    else:
        g = load_clamped_gates(g2, token, hi, h, d2, H, D2)
        write_sum, read_sum = middle_sums(g, t, s, READ_BEFORE, DOT)
        is_factorisable = tl.max(size_of_sums(write_sum, read_sum)) < FACTORISABLE_BOUND
        if dg2 is not None:
            each = tl.max(scaled_gate_size(g, DOT)) < FACTORISABLE_BOUND
            if DOT == tl.float32:
                is_factorisable = is_factorisable & each
            elif is_factorisable and not each:
                is_factorisable = has_bounded_means(g, (token < hi)[:, None] & (d2 < D2)[None, :])
        tl.store(at_mark, is_factorisable.to(tl.int8))
        if not is_factorisable:
            return

    # 2. The contributions of other chunks, through the states.
    tile = token, hi, h, d2, H, D2
    state = (row * H + h) * D1 * D2, stride1, stride2
    before, after, d_total, pairs = _other_chunks(P, a, b, g1, S, dS, tile, D1, state, BD1, READ_BEFORE, DOT)
    before *= scale
    if P is None:
        pairs = tl.where(s <= t, pairs * scale, 0.0)
    else:
        P += (row * H + h) * C * C
    # 3. The pairs of this chunk, and the gradient of the gates.
    sums = before, after, d_total, pairs
    if S is not None or dS is not None:
        if FACTORISABLE:
            before, after = _factorisable_chunk(sums, P, x, y, g2, S, dS, read, dg2, tile, READ_BEFORE, DOT)
        else:
            before, after = _chunk_by_levels(sums, P, x, y, g2, S, dS, dg2, tile, READ_BEFORE, DOT)
    # 4. No gate decays the pair of a token with itself. It is added last, since it would drown the others in
    # the gate's gradient.
    diagonal = (
        tl.sum(tl.where(t == s, pairs, 0.0), 1)[:, None] if P is None else tl.load(P + i * C + i)[:, None]
    )
    weighted = diagonal
    if u is not None:
        weighted = diagonal * tl.load(u + h * D2 + d2, mask=d2 < D2, other=0.0).to(tl.float32)[None, :]
    if read is not None or du is not None:
        x_ = load_tile(x, *tile)
    if read is not None:
        store_tile(read, before + weighted * x_, *tile)
    if write is not None or du is not None:
        y_ = load_tile(y, *tile)
    if write is not None:
        store_tile(write, after + weighted * y_, *tile)
    if du is not None:
        tl.store(du + (row * H + h) * D2 + d2, tl.sum(diagonal * x_ * y_, 0), mask=d2 < D2)


@triton.jit(do_not_specialize=["N"])
def slot_softmax_kernel(
    logits,  # [N, M]
    dp,  # [N, M]
    out,  # [N, M]
    N,
    M,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
):
    """The softmax of `logits` or, with `dp`, the gradient of `logits` from that of their softmax."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    m = tl.arange(0, BM)[None, :]
    at = row * M + m
    mask = (row < N) & (m < M)
    x = tl.where(m < M, tl.load(logits + at, mask=mask, other=0.0), float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    if dp is not None:
        p_dp = p * tl.load(dp + at, mask=mask, other=0.0).to(tl.float32)
        p = p_dp - p * tl.sum(p_dp, 1)[:, None]
    tl.store(out + at, p.to(out.dtype.element_ty), mask=mask)
