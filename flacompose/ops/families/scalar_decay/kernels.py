"""The Triton kernel of scalar decay: one sweep over a sequence, its state in registers.

Outputs and gradients are the same sum with the roles of q, k, v and do exchanged, forwards or backwards in time:

    o  = sweep(q, k, v)             dv = sweep(k, q, do), backwards
    dq = sweep(do, v, k)            dk = sweep(v, do, q), backwards
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._triton import LOWEST_GATE, dot, split_dot

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


@triton.jit
def _chunk(row, cu_seqlens, T, N, C: tl.constexpr):
    """The first token of a chunk and the end of its sequence: sequence ``n`` begins at row ``cu[n] // C + n``."""
    if cu_seqlens is not None:
        # The last sequence that begins at this row or before.
        n = tl.zeros([], tl.int64)
        beyond = N + tl.zeros([], tl.int64)
        while beyond - n > 1:
            middle = (n + beyond) // 2
            begins = tl.load(cu_seqlens + middle) // C + middle <= row
            beyond = tl.where(begins, beyond, middle)
            n = tl.where(begins, middle, n)
        lo = tl.load(cu_seqlens + n)
        hi = tl.load(cu_seqlens + n + 1)
        start = lo + (row - lo // C - n) * C
    else:
        n = row // tl.cdiv(T, C)
        start = n * T + row % tl.cdiv(T, C) * C
        hi = (n + 1) * T
    return start, hi


@triton.jit(do_not_specialize=["T", "N", "H"])
def gate_kernel(
    g,  # [tokens, H]
    sums,
    rest,
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
    start, hi = _chunk(tl.program_id(0).to(tl.int64), cu_seqlens, T, N, C)
    token = start + tl.arange(0, C)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    at = token[:, None] * H + h[None, :]
    mask = (token < hi)[:, None] & (h < H)[None, :]
    g_ = tl.maximum(tl.load(g + at, mask=mask, other=0.0).to(tl.float32), LOWEST_GATE) * LOG2_E
    if rest is not None:
        high = tl.floor(g_ * 512.0) / 512.0
        tl.store(rest + at, tl.cumsum(g_ - high, 0), mask=mask)
        g_ = high
    tl.store(sums + at, tl.cumsum(g_, 0), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def gate_gradient_kernel(
    read,  # [tokens, PARTS, H]: of the sums to each token, from the chunk's start and from its other tokens
    write,  # [tokens, PARTS, H]: of the sum from each token to the chunk's end
    met,  # [tokens, PARTS, H]: of the sums from each token to others in the chunk
    through,  # [rows, PARTS, H, D]: of the sum over the chunk, to be added up
    dg,  # [tokens, H]
    cu_seqlens,
    T,
    N,
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
    start, hi = _chunk(row, cu_seqlens, T, N, C)
    t = tl.arange(0, C)
    token = start + t
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    at = token[:, None] * H + h[None, :]
    mask = (token < hi)[:, None] & (h < H)[None, :]
    # Backwards the state is kept without `scale`, as `sweep_kernel` says.
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    unit = tl.where(scale == 0.0, 1.0, scale)
    from_here = tl.zeros([C, BH], dtype=tl.float32)
    before = tl.zeros([C, BH], dtype=tl.float32)
    whole = tl.zeros([BH], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at_part = (token[:, None] * PARTS + part) * H + h[None, :]
        from_here += tl.load(read + at_part, mask=mask, other=0.0) * scale
        from_here -= tl.load(met + at_part, mask=mask, other=0.0) * unit
        # One token later: a write is in the sums that begin after it.
        before += tl.load(write + at_part - PARTS * H, mask=mask & (t > 0)[:, None], other=0.0)
        at_through = ((row * PARTS + part) * H + h)[:, None] * D + d[None, :]
        in_through = (h < H)[:, None] & (d < D)[None, :] & (start < hi)
        whole += tl.sum(tl.load(through + at_through, mask=in_through, other=0.0), 1)
    out = tl.cumsum(from_here, 0, reverse=True) + (tl.cumsum(before, 0) + whole[None, :]) * unit
    tl.store(dg + at, out.to(dg.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "H", "HA", "HX", "SEGMENTS", "scale"])
def sweep_kernel(
    a,  # [tokens, HA, D1]
    b,  # [tokens, HA, D1]
    x,  # [tokens, HX, D2]
    y,  # [tokens, HX, D2]: the primal of `out`, for the gradient of gates
    sums,  # [tokens, H], of gates, as `gate_kernel` gives them
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
    SPLIT: tl.constexpr,
    REVERSE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``S <- e^g S + b_t x_t^T``, ``out_t = scale * S^T a_t``, from chunk to chunk; `REVERSE`, backwards in time.

    One program sweeps one segment of one sequence. Without `out` from zero, to find the segments' ends; with it from
    the true state, folded from those.
    """
    tiles = tl.cdiv(D2, BD2)
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    pid = tl.program_id(0).to(tl.int64)
    number = pid % tiles
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
    d2 = (number * BD2).to(tl.int32) + tl.arange(0, BD2)
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
        S = tl.load(initial + nh * D1 * D2 + at_state, mask=in_state & (segment == 0), other=0.0).to(
            tl.float32
        )
        if REVERSE:
            S /= unit
    if SPLIT and out is not None:
        for i in range(segment):
            inh = i * N * H + nh
            if sums is not None:
                S *= tl.exp2(tl.load(segment_gate + inh))
            S += tl.load(segment_state + inh * D1 * D2 + at_state, mask=in_state, other=0.0)
    gates = tl.zeros([], dtype=tl.float32)

    t = tl.arange(0, C)
    i_ = t[:, None]
    j_ = t[None, :]
    for i in range(begin, stop):
        row = rows - 1 - i if REVERSE else i
        start = lo + row * C
        left = (hi - start).to(tl.int32)
        written = left
        if REVERSE:
            written = tl.where(scale == 0.0, 0, left)
        b_ = _rows(b, start, HA, ha, d1, D1, BD1, written, C)
        x_ = _rows(x, start, HX, hx, d2, D2, BD2, left, C)
        if sums is not None:
            at_gate = start * H + h
            last = tl.minimum(left, C) - 1
            at_i = at_gate + tl.minimum(i_, last) * H
            at_j = at_gate + tl.minimum(j_, last) * H
            sum_i = tl.load(sums + at_i)
            sum_j = tl.load(sums + at_j)
            total = tl.load(sums + at_gate + last * H)
            to_start = sum_i
            to_end = total - sum_i
            between = sum_i - sum_j
            if rest is not None:
                rest_i = tl.load(rest + at_i)
                rest_total = tl.load(rest + at_gate + last * H)
                to_start += rest_i
                to_end += rest_total - rest_i
                between += rest_i - tl.load(rest + at_j)
                total += rest_total
            near = tl.exp2(to_end if REVERSE else to_start)
            far = tl.exp2(to_start if REVERSE else to_end)
            gates += total
        if out is not None:
            a_ = _rows(a, start, HA, ha, d1, D1, BD1, left, C)
            other_chunks = dot(a_, S, DOT)
            pairs = dot(a_, tl.trans(b_), DOT)
            if sums is not None:
                other_chunks *= near
                pairs *= tl.exp2(-between if REVERSE else between)
            if states is None:
                pairs = tl.where(i_ <= j_ if REVERSE else i_ >= j_, pairs, 0.0)
                out_ = split_dot(pairs, x_.to(DOT), DOT, other_chunks)
            else:
                # The pair of a token with itself, which no gate decays, joins last: it would drown the others.
                own = tl.sum(tl.where(i_ == j_, pairs, 0.0), 1)[:, None]
                pairs = tl.where(i_ < j_ if REVERSE else i_ > j_, pairs, 0.0)
                y_ = _rows(y, start, HX, hx, d2, D2, BD2, left, C)
                at_token = ((start + t) * tiles + number) * H + h
                at = ((row0 + row) * H + h) * D1 * D2 + d1[:, None] * D2 + d2[None, :]
                d_other_chunks = tl.sum(y_ * other_chunks, 1)
                this_chunk = split_dot(pairs, x_.to(DOT), DOT)
                d_this_chunk = tl.sum(y_ * this_chunk, 1)
                if REVERSE:
                    tl.store(write + at_token, d_other_chunks, mask=t < left)
                    tl.store(met + at_token, d_this_chunk, mask=t < left)
                    kept = tl.sum(S * tl.load(states + at, mask=in_state, other=0.0), 1) * tl.exp2(total)
                    tl.store(
                        through + (((row0 + row) * tiles + number) * H + h) * D1 + d1, kept, mask=d1 < D1
                    )
                else:
                    tl.store(read + at_token, d_other_chunks + d_this_chunk, mask=t < left)
                    tl.store(states + at, S.to(states.dtype.element_ty), mask=in_state)
                out_ = other_chunks + this_chunk + own * x_
            at_out = out + (start * H + h) * D2 + i_ * (H * D2) + d2[None, :]
            tl.store(at_out, (out_ * unit).to(out.dtype.element_ty), mask=(i_ < left) & (d2 < D2)[None, :])
        if sums is not None:
            S *= tl.exp2(total)
            x_ = x_ * far
        S += dot(tl.trans(b_), x_, DOT)

    if out is None:
        inh = segment * N * H + nh
        tl.store(segment_state + inh * D1 * D2 + at_state, S, mask=in_state)
        if sums is not None:
            tl.store(segment_gate + inh, gates)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + nh * D1 * D2 + at_state, S * unit if REVERSE else S, mask=in_state)
