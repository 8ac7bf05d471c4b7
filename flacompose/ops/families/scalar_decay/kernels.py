"""Triton kernels for scalar decay: a sweep over a sequence, its state in registers.

The output and three gradients are one sum, the roles of q, k, v and do exchanged, forwards or backwards in time:

    o  = sweep(q, k, v)             dv = sweep(k, q, do), backwards
    dq = sweep(do, v, k)            dk = sweep(v, do, q), backwards

What gates weigh are sums of them, and a small kernel makes the running ones of each chunk beforehand. Their gradient
is that of all sums which hold a gate: the sweeps of dq and dk leave what each token adds to them, and another small
kernel adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import LOWEST_GATE, dot, dot_split, split_dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(x, start, H, h, d, D: tl.constexpr, BD: tl.constexpr, left, C: tl.constexpr):
    """`C` rows of head `h` of ``x [tokens, H, D]`` from token `start` on, zero where `left` are passed."""
    t = tl.arange(0, C)
    at = x + (start * H + h) * D + t[:, None] * (H * D) + d[None, :]
    if D % BD == 0:
        out = tl.load(at, mask=(t < left)[:, None], other=0.0)
    else:
        out = tl.load(at, mask=(t < left)[:, None] & (d < D)[None, :], other=0.0)
    return out


@triton.jit(do_not_specialize=["T", "N", "H", "steps"])
def gate_kernel(
    g,  # [tokens, H]
    sums,  # [rows, H, C]
    rest,  # [rows, H, C]
    bounds,  # [rows, 2]: the first token of each chunk and the end of its sequence, or of itself if it is empty
    cu_seqlens,
    T,
    N,
    H,
    steps,
    C: tl.constexpr,
    BH: tl.constexpr,
):
    """The running sums of gates within each chunk, of base-2 logarithms.

    With `rest`, in two parts: multiples of 2^-9, which add and subtract exactly, and the small rest. A difference of
    sums is then as good as the sum of the gates between, however strong those before were.
    """
    row = tl.program_id(0).to(tl.int64)
    if cu_seqlens is not None:
        # Sequence ``n`` begins at row ``cu_seqlens[n] // C + n``. This is the last that begins here or before.
        n = tl.zeros([], tl.int64)
        beyond = N + tl.zeros([], tl.int64)
        for _ in range(steps):
            middle = (n + beyond) // 2
            begins = tl.load(cu_seqlens + middle) // C + middle <= row
            beyond = tl.where(begins, beyond, tl.maximum(middle, n + 1))
            n = tl.where(begins, middle, n)
        lo = tl.load(cu_seqlens + n)
        hi = tl.load(cu_seqlens + n + 1)
        start = lo + (row - lo // C - n) * C
        hi = tl.where(start < lo, start, hi)
    else:
        n = row // tl.cdiv(T, C)
        start = n * T + row % tl.cdiv(T, C) * C
        hi = (n + 1) * T
    if tl.program_id(1) == 0:
        tl.store(bounds + row * 2, start)
        tl.store(bounds + row * 2 + 1, hi)
    t = tl.arange(0, C)
    token = start + t
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = (h < H)[None, :]
    g_ = tl.load(g + token[:, None] * H + h[None, :], mask=(token < hi)[:, None] & in_h, other=0.0)
    g_ = tl.maximum(g_.to(tl.float32), LOWEST_GATE, propagate_nan=tl.PropagateNan.ALL) * LOG2_E
    at = (row * H + h)[None, :] * C + t[:, None]
    if rest is not None:
        high = tl.floor(g_ * 512.0) / 512.0
        tl.store(rest + at, tl.cumsum(g_ - high, 0), mask=in_h)
        g_ = high
    tl.store(sums + at, tl.cumsum(g_, 0), mask=in_h)


@triton.jit(do_not_specialize=["H", "scale"])
def gate_gradient_kernel(
    read,  # [rows, PARTS, H, C]: of the sums to each token, from the chunk's start and from its other tokens
    write,  # [rows, PARTS, H, C]: of the sum from each token to the chunk's end
    met,  # [rows, PARTS, H, C]: of the sums from each token to others in the chunk
    through,  # [rows, H, D]: of the sum over the chunk, to be added up
    bounds,  # [rows, 2], as `gate_kernel` gives them
    dg,  # [tokens, H]
    H,
    scale,
    D: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The gradient of every gate from those of the sums that hold it."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(bounds + row * 2)
    hi = tl.load(bounds + row * 2 + 1)
    t = tl.arange(0, C)
    token = start + t
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    in_h = (h < H)[None, :]
    # Backwards the state is kept without `scale`, as `sweep_kernel` says.
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    unit = tl.where(scale == 0.0, 1.0, scale)
    from_here = tl.zeros([C, BH], dtype=tl.float32)
    before = tl.zeros([C, BH], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = ((row * PARTS + part) * H + h)[None, :] * C + t[:, None]
        from_here += tl.load(read + at, mask=in_h, other=0.0) * scale
        from_here -= tl.load(met + at, mask=in_h, other=0.0) * unit
        # One token later: a write is in the sums that begin after it.
        before += tl.load(write + at - 1, mask=in_h & (t > 0)[:, None], other=0.0)
    at_through = (row * H + h)[:, None] * D + d[None, :]
    whole = tl.sum(tl.load(through + at_through, mask=(h < H)[:, None] & (d < D)[None, :], other=0.0), 1)
    out = tl.cumsum(from_here, 0, reverse=True) + (tl.cumsum(before, 0) + whole[None, :]) * unit
    mask = (token < hi)[:, None] & in_h
    tl.store(dg + token[:, None] * H + h[None, :], out.to(dg.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "H", "HA", "HX", "SEGMENTS", "scale"])
def sweep_kernel(
    a,  # [tokens, HA, D1]
    b,  # [tokens, HA, D1]
    x,  # [tokens, HX, D2]
    y,  # [tokens, HX, D2]: the primal of `out`, for the gradient of gates
    gamma,  # [H], gates that are those of every token
    sums,  # [rows, H, C], of other gates, as `gate_kernel` gives them
    rest,
    initial,  # [N, H, D1, D2], by strides, as the other states
    segment_state,  # [SEGMENTS, N, H, D1, D2]: each segment's end, begun at 0 (the first at `initial`)
    segment_gate,  # [SEGMENTS, N, H]: its summed gates
    out,  # [tokens, H, D2]
    states,  # [rows, H, D1, D2]: the state before each chunk, stored forwards in time and read backwards
    read,  # forwards in time, what `gate_gradient_kernel` takes under these names, `PARTS` being the blocks of D2
    write,  # backwards, likewise
    met,
    through,
    final,  # [N, H, D1, D2]
    cu_seqlens,
    scale,
    T,
    N,
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
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    REVERSE: tl.constexpr,
    FINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``S <- e^g S + b_t x_t^T``, ``out_t = scale * S^T a_t``, from chunk to chunk; `REVERSE`, backwards in time.

    One program sweeps one segment of one sequence. Without `out` from zero, to find the segments' ends; with it from
    the true state, folded from those. `FINE` where gradients of gates are summed over tokens, and cancel: the state and
    what is written to it are then multiplied in two parts.
    """
    tiles = tl.cdiv(D2, BD2)
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % tiles
    segment = (pid // tiles) % SEGMENTS
    if out is None:
        if segment == SEGMENTS - 1:
            return
    nh = pid // tiles // SEGMENTS
    n = nh // H
    h = nh % H
    ha = h // (H // HA)
    hx = h // (H // HX)
    d1 = tl.arange(0, BD1)
    d2 = (tile * BD2).to(tl.int32) + tl.arange(0, BD2)
    in_state = (d1 < D1)[:, None] & (d2 < D2)[None, :]
    at_state = d1[:, None] * stride1 + d2[None, :] * stride2
    if cu_seqlens is not None:
        lo = tl.load(cu_seqlens + n)
        hi = tl.load(cu_seqlens + n + 1)
        row0 = lo // C + n
    else:
        lo = n * T
        hi = lo + T
        row0 = n * tl.cdiv(T, C)
    rows = tl.cdiv(hi - lo, C)
    per_segment = tl.cdiv(rows, SEGMENTS)
    begin = segment * per_segment
    stop = tl.minimum(begin + per_segment, rows)

    # Backwards, `scale` is in what is written. The state is kept without it, and nothing is written if it is 0.
    unit = scale
    if REVERSE:
        unit = tl.where(scale == 0.0, 1.0, scale)
    S = tl.zeros([BD1, BD2], dtype=tl.float32)
    if initial is not None:
        S += tl.load(initial + nh * D1 * D2 + at_state, mask=in_state & (segment == 0), other=0.0)
        if REVERSE:
            S /= unit
    if SPLIT and out is not None:
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
        rate = tl.load(gamma + h).to(tl.float32)
        rate = tl.maximum(rate, LOWEST_GATE, propagate_nan=tl.PropagateNan.ALL) * LOG2_E
        between = tl.exp2(rate * tl.abs(i_ - j_))
    for i in range(begin, stop):
        row = rows - 1 - i if REVERSE else i
        start = lo + row * C
        left = (hi - start).to(tl.int32)
        written = left
        if REVERSE:
            written = tl.where(scale == 0.0, 0, left)
        b_ = _rows(b, start, HA, ha, d1, D1, BD1, written, C)
        x_ = _rows(x, start, HX, hx, d2, D2, BD2, left, C)
        if gamma is not None:
            last = tl.minimum(left, C)
            total = rate * last
            to_start = rate * (i_ + 1)
            to_end = rate * tl.maximum(last - 1 - i_, 0)
        elif sums is not None:
            at_gate = ((row0 + row) * H + h) * C
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
        if out is not None:
            a_ = _rows(a, start, HA, ha, d1, D1, BD1, left, C)
            other_chunks = dot_split(a_, S, DOT) if FINE else dot(a_, S, DOT)
            pairs = dot(a_, tl.trans(b_), DOT)
            if GATED:
                other_chunks *= near
                pairs *= between
            pairs = tl.where(i_ <= j_ if REVERSE else i_ >= j_, pairs, 0.0)
            if states is not None:
                y_ = _rows(y, start, HX, hx, d2, D2, BD2, left, C)
                # No gate decays the pair of a token with itself: it would drown the others.
                met_pairs = tl.where(i_ == j_, 0.0, pairs * dot(y_, tl.trans(x_), DOT))
                d_this_chunk = tl.sum(met_pairs, 1)
                d_other_chunks = tl.sum(y_ * other_chunks, 1)
                at_token = (((row0 + row) * tiles + tile) * H + h) * C + t
                at = ((row0 + row) * H + h) * D1 * D2 + d1[:, None] * D2 + d2[None, :]
                if REVERSE:
                    tl.store(write + at_token, d_other_chunks)
                    tl.store(met + at_token, d_this_chunk)
                    S_ = tl.load(states + at, mask=in_state, other=0.0)
                    if FINE:
                        kept = tl.sum(S_ * S, 0)
                    else:  # as the diagonal of a product, which is faster
                        kept = dot(tl.trans(S_), S, DOT)
                        kept = tl.sum(tl.where(d2[:, None] == d2[None, :], kept, 0.0), 1)
                    at_through = ((row0 + row) * H + h) * D2 + d2
                    tl.store(through + at_through, kept * tl.exp2(total), mask=d2 < D2)
                else:
                    tl.store(read + at_token, d_other_chunks + d_this_chunk)
                    tl.store(states + at, S.to(states.dtype.element_ty), mask=in_state)
            out_ = split_dot(pairs, x_.to(DOT), DOT, other_chunks)
            at_out = out + (start * H + h) * D2 + i_ * (H * D2) + d2[None, :]
            tl.store(at_out, (out_ * unit).to(out.dtype.element_ty), mask=(i_ < left) & (d2 < D2)[None, :])
        if GATED:
            S *= tl.exp2(total)
            x_ = x_ * far
        if FINE:
            S = dot_split(tl.trans(b_), x_, DOT, S)
        else:
            S += dot(tl.trans(b_), x_, DOT)

    if out is None:
        inh = segment * N * H + nh
        tl.store(segment_state + inh * D1 * D2 + at_state, S, mask=in_state)
        if GATED:
            tl.store(segment_gate + inh, gates)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + nh * D1 * D2 + at_state, S * unit if REVERSE else S, mask=in_state)
