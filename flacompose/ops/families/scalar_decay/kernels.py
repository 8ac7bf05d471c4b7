"""Triton kernels for scalar decay: a sweep over a sequence, its state in registers.

The output and three gradients are one sum, the roles of q, k, v and do exchanged, forwards or backwards in time:

    o  = sweep(q, k, v)             dv = sweep(k, q, do), backwards
    dq = sweep(do, v, k)            dk = sweep(v, do, q), backwards

Every weight is the exponential of a sum of gates, which is a difference of two running sums within the chunk. A small
kernel computes these before the sweeps. The gradient of a gate adds up the gradients of all sums that contain the gate:
the sweeps of dq and dk store the latter for each token, and another small kernel adds them up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import (
    bounded,
    dot,
    dot_split,
    find_chunk,
    find_segment,
    find_sequence,
    split_dot,
    split_program,
)

LOG2_E = tl.constexpr(1.4426950408889634)

# The kinds of sums of gates in `d_sums`. For each token: those that end at it, from the chunk's start and from other
# tokens; those that begin after it and end at other tokens; and the one that begins after it and ends with the chunk.
ENDING = tl.constexpr(0)
BEGINNING = tl.constexpr(1)
TO_END = tl.constexpr(2)


@triton.jit
def _load_chunk(x, start, H, h, d, D: tl.constexpr, BD: tl.constexpr, remaining, C: tl.constexpr):
    """`C` tokens from `start` on of head `h` of ``x [tokens, H, D]``, zero after the first `remaining`."""
    t = tl.arange(0, C)
    at = x + (start * H + h) * D + t[:, None] * (H * D) + d[None, :]
    if D % BD == 0:
        out = tl.load(at, mask=(t < remaining)[:, None], other=0.0)
    else:
        out = tl.load(at, mask=(t < remaining)[:, None] & (d < D)[None, :], other=0.0)
    return out


@triton.jit(do_not_specialize=["T", "N", "H"])
def gate_kernel(
    g,  # [tokens, H]
    gamma,  # [H], added to `g` at every token
    sums,  # [chunks, H, C]
    rest,  # [chunks, H, C]
    cu_seqlens,
    T,
    N,
    H,
    C: tl.constexpr,
    BH: tl.constexpr,
):
    """The running sums of gates within each chunk, of base-2 logarithms.

    With `rest`, in two parts: multiples of 2^-9, which add and subtract exactly, and the small rest. A difference of
    sums is then as good as the sum of the gates between, however strong those before were.
    """
    row = tl.program_id(0).to(tl.int64)
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    t = tl.arange(0, C)
    token = start + t
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = (h < H)[None, :]
    mask = (token < end)[:, None] & in_h
    g_ = tl.zeros([C, BH], dtype=tl.float32)
    if g is not None:
        g_ += tl.load(g + token[:, None] * H + h[None, :], mask=mask, other=0.0)
    if gamma is not None:
        gamma_ = tl.load(gamma + h, mask=h < H, other=0.0).to(tl.float32)
        g_ += tl.where(mask, gamma_[None, :], 0.0)
    g_ = bounded(g_) * LOG2_E
    at = (row * H + h)[None, :] * C + t[:, None]
    if rest is not None:
        high = tl.floor(g_ * 512.0) / 512.0
        tl.store(rest + at, tl.cumsum(g_ - high, 0), mask=in_h)
        g_ = high
    tl.store(sums + at, tl.cumsum(g_, 0), mask=in_h)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def gate_gradient_kernel(
    d_sums,  # [chunks, 3, PARTS, H, C], the gradients of sums of gates, by `ENDING`, `BEGINNING` and `TO_END`
    d_whole,  # [chunks, H, D]: of the sum over the chunk, to be added up
    dg,  # [tokens, H]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    D: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The gradient of every gate from those of the sums that contain it."""
    row = tl.program_id(0).to(tl.int64)
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    t = tl.arange(0, C)
    token = start + t
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = (h < H)[None, :]
    # Backwards the state is kept without `scale`, as `sweep_kernel` says.
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    unit = tl.where(scale == 0.0, 1.0, scale)
    from_here = tl.zeros([C, BH], dtype=tl.float32)
    before = tl.zeros([C, BH], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        ending = (((row * 3 + ENDING) * PARTS + part) * H + h)[None, :] * C + t[:, None]
        beginning = (((row * 3 + BEGINNING) * PARTS + part) * H + h)[None, :] * C + t[:, None]
        to_end = (((row * 3 + TO_END) * PARTS + part) * H + h)[None, :] * C + t[:, None]
        from_here += tl.load(d_sums + ending, mask=in_h, other=0.0) * scale
        from_here -= tl.load(d_sums + beginning, mask=in_h, other=0.0) * unit
        # From the token before: the sum to the chunk's end begins after a token.
        before += tl.load(d_sums + to_end - 1, mask=in_h & (t > 0)[:, None], other=0.0)
    whole = tl.zeros([BH], dtype=tl.float32)
    for tile in tl.static_range((D + BD - 1) // BD):
        d = tile * BD + tl.arange(0, BD)
        at_whole = (row * H + h)[:, None] * D + d[None, :]
        whole += tl.sum(tl.load(d_whole + at_whole, mask=(h < H)[:, None] & (d < D)[None, :], other=0.0), 1)
    out = tl.cumsum(from_here, 0, reverse=True) + (tl.cumsum(before, 0) + whole[None, :]) * unit
    mask = (token < end)[:, None] & in_h
    tl.store(dg + token[:, None] * H + h[None, :], out.to(dg.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "H", "HA", "HX", "SEGMENTS", "scale"])
def sweep_kernel(
    a,  # [tokens, HA, D1]
    b,  # [tokens, HA, D1]
    x,  # [tokens, HX, D2]
    y,  # [tokens, HX, D2]: the input whose gradient `out` is, for the gradient of gates
    gamma,  # [H], gates that are those of every token
    sums,  # [chunks, H, C], of other gates, as `gate_kernel` gives them
    rest,  # [chunks, H, C]
    initial,  # [N, H, D1, D2], with the strides of states
    segment_state,  # [SEGMENTS, N, H, D1, D2], with these too: each segment's end, begun at 0 (the first at `initial`)
    segment_gate,  # [SEGMENTS, N, H]: its summed gates
    out,  # [tokens, tiles of D1, H, D2], the sums over each tile
    states,  # [chunks, H, D1, D2]: the state before each chunk, stored forwards in time and read backwards
    d_sums,  # [chunks, 3, tiles, H, C], for `gate_gradient_kernel`: `ENDING` forwards, the others backwards
    d_whole,  # [chunks, H, tiles of D1, D2], likewise, backwards
    final,  # [N, H, D1, D2], with the strides of states
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HA,
    HX,
    SEGMENTS,
    D1: tl.constexpr,
    D2: tl.constexpr,
    stride1: tl.constexpr,
    stride2: tl.constexpr,
    C: tl.constexpr,
    BD1: tl.constexpr,
    BD2: tl.constexpr,
    SPLIT: tl.constexpr,
    ENDS: tl.constexpr,
    REVERSE: tl.constexpr,
    FINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``S <- e^g S + b_t x_t^T``, ``out_t = scale * S^T a_t``, from chunk to chunk; `REVERSE`, backwards in time.

    One program sweeps one segment of one sequence, for one tile of its state. With `ENDS` it begins at zero, and stores
    the state at the segment's end. Otherwise it begins at the true state, computed from those ends, and stores what is
    given of `out`, of `final`, and, together, of `states`, `d_sums` and `d_whole`. `FINE` where gradients of gates are
    summed over tokens, and cancel: the state and what is written to it are then multiplied in two parts.
    """
    GATED: tl.constexpr = gamma is not None or sums is not None
    tiles1: tl.constexpr = (D1 + BD1 - 1) // BD1
    tiles: tl.constexpr = tiles1 * ((D2 + BD2 - 1) // BD2)
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    tile, segment, nh = split_program(tiles, SEGMENTS)
    if ENDS:
        if segment == SEGMENTS - 1:
            return
    elif out is None and states is None:
        if segment < SEGMENTS - 1:
            return
    n = nh // H
    h = nh % H
    ha = h // (H // HA)
    hx = h // (H // HX)
    tile1 = (tile % tiles1).to(tl.int32)
    d1 = tile1 * BD1 + tl.arange(0, BD1)
    d2 = (tile // tiles1).to(tl.int32) * BD2 + tl.arange(0, BD2)
    in_state = (d1 < D1)[:, None] & (d2 < D2)[None, :]
    at_state = d1[:, None] * stride1 + d2[None, :] * stride2
    lo, hi, row0 = find_sequence(n, T, cu_seqlens, C)
    chunks = tl.cdiv(hi - lo, C)
    begin, stop = find_segment(segment, SEGMENTS, chunks)

    # Backwards, `scale` is in what is written. The state is kept without it, and nothing is written if it is 0.
    unit = scale
    if REVERSE:
        unit = tl.where(scale == 0.0, 1.0, scale)
    S = tl.zeros([BD1, BD2], dtype=tl.float32)
    if initial is not None:
        S += tl.load(initial + nh * D1 * D2 + at_state, mask=in_state & (segment == 0), other=0.0)
        if REVERSE:
            S /= unit
    if SPLIT and not ENDS:
        for i in range(segment):
            inh = i * N * H + nh
            if GATED:
                S *= tl.exp2(tl.load(segment_gate + inh))
            S += tl.load(segment_state + inh * D1 * D2 + at_state, mask=in_state, other=0.0)
    gates = tl.zeros([], dtype=tl.float32)

    t = tl.arange(0, C)
    i_ = t[:, None]
    j_ = t[None, :]
    if gamma is not None:
        rate = bounded(tl.load(gamma + h).to(tl.float32)) * LOG2_E
        between = tl.exp2(rate * tl.abs(i_ - j_))
    for i in range(begin, stop):
        chunk = chunks - 1 - i if REVERSE else i
        row = row0 + chunk
        start = lo + chunk * C
        remaining = (hi - start).to(tl.int32)
        written = remaining
        if REVERSE:
            written = tl.where(scale == 0.0, 0, remaining)
        b_ = _load_chunk(b, start, HA, ha, d1, D1, BD1, written, C)
        x_ = _load_chunk(x, start, HX, hx, d2, D2, BD2, remaining, C)
        if gamma is not None:
            last = tl.minimum(remaining, C)
            total = rate * last
            to_start = rate * (i_ + 1)
            to_end = rate * tl.maximum(last - 1 - i_, 0)
        elif sums is not None:
            at_gate = (row * H + h) * C
            sum_i = tl.load(sums + at_gate + i_)
            total = tl.load(sums + at_gate + C - 1)
            to_start = sum_i
            to_end = total - sum_i
            between = sum_i - tl.load(sums + at_gate + j_)
            if rest is not None:
                rest_i = tl.load(rest + at_gate + i_)
                rest_total = tl.load(rest + at_gate + C - 1)
                to_start += rest_i
                to_end += rest_total - rest_i
                between += rest_i - tl.load(rest + at_gate + j_)
                total += rest_total
            between = tl.exp2(-between if REVERSE else between)
        if GATED:
            near = tl.exp2(to_end if REVERSE else to_start)
            far = tl.exp2(to_start if REVERSE else to_end)
            gates += total
        if out is not None or states is not None:
            a_ = _load_chunk(a, start, HA, ha, d1, D1, BD1, remaining, C)
            other_chunks = dot_split(a_, S, DOT) if FINE else dot(a_, S, DOT)
            pairs = dot(a_, tl.trans(b_), DOT)
            if GATED:
                other_chunks *= near
                pairs *= between
            pairs = tl.where(i_ <= j_ if REVERSE else i_ >= j_, pairs, 0.0)
            if states is not None:
                y_ = _load_chunk(y, start, HX, hx, d2, D2, BD2, remaining, C)
                # No gate decays the pair of a token with itself: its gradient would drown that of the others.
                d_pairs = tl.where(i_ == j_, 0.0, pairs * dot(y_, tl.trans(x_), DOT))
                d_this_chunk = tl.sum(d_pairs, 1)
                d_other_chunks = tl.sum(y_ * other_chunks, 1)
                at = (row * H + h) * D1 * D2 + d1[:, None] * D2 + d2[None, :]
                if REVERSE:
                    tl.store(d_sums + (((row * 3 + TO_END) * tiles + tile) * H + h) * C + t, d_other_chunks)
                    tl.store(d_sums + (((row * 3 + BEGINNING) * tiles + tile) * H + h) * C + t, d_this_chunk)
                    S_ = tl.load(states + at, mask=in_state, other=0.0)
                    if FINE:
                        kept = tl.sum(S_ * S, 0)
                    else:  # as the diagonal of a product, which is faster
                        kept = dot(tl.trans(S_), S, DOT)
                        kept = tl.sum(tl.where(d2[:, None] == d2[None, :], kept, 0.0), 1)
                    tl.store(
                        d_whole + ((row * H + h) * tiles1 + tile1) * D2 + d2,
                        kept * tl.exp2(total),
                        mask=d2 < D2,
                    )
                else:
                    at_ending = (((row * 3 + ENDING) * tiles + tile) * H + h) * C + t
                    tl.store(d_sums + at_ending, d_other_chunks + d_this_chunk)
                    tl.store(states + at, S.to(states.dtype.element_ty), mask=in_state)
            if out is not None:
                out_ = split_dot(pairs, x_.to(DOT), DOT, other_chunks)
                at_out = out + ((start * tiles1 + tile1) * H + h) * D2 + i_ * (tiles1 * H * D2) + d2[None, :]
                in_out = (i_ < remaining) & (d2 < D2)[None, :]
                tl.store(at_out, (out_ * unit).to(out.dtype.element_ty), mask=in_out)
        if GATED:
            S *= tl.exp2(total)
            x_ = x_ * far
        if FINE:
            S = dot_split(tl.trans(b_), x_, DOT, S)
        else:
            S += dot(tl.trans(b_), x_, DOT)

    if ENDS:
        inh = segment * N * H + nh
        tl.store(segment_state + inh * D1 * D2 + at_state, S, mask=in_state)
        if GATED:
            tl.store(segment_gate + inh, gates)
    elif final is not None:
        if segment == SEGMENTS - 1:
            S = S * unit if REVERSE else S
            tl.store(final + nh * D1 * D2 + at_state, S.to(final.dtype.element_ty), mask=in_state)
