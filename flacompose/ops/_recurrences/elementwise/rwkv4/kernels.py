"""Triton kernels of RWKV-4: scans over a sequence, a tile of channels with their states in registers.

    m_t = max(w + m_{t-1}, k_t)        kept_t = exp(w + m_{t-1} - m_t)        written_t = exp(k_t - m_t)
    a_t = kept_t a_{t-1} + written_t v_t        b_t = kept_t b_{t-1} + written_t

A program is one warp, so no thread waits for another warp. It goes from token to token; the tokens of a chunk
are unrolled, so the loads of some overlap with the arithmetic of others. No exponent is above 0, except by
rounding.

From chunk to chunk, a state is decayed by the whole chunk at once, and the contribution of the tokens,
`added`, is computed separately. The maximum after a token is the larger of two: the maximum before the chunk,
decayed at once, and the maximum of the chunk's own tokens. So no rounding error of single tokens adds up over
a slow decay.

Long rows are cut into segments, which are computed at the same time, each from the state before it.

`tl.fma` marks the products that are fused with sums. Otherwise the compiler would choose depending on the
other uses of a product, and the bits of a gradient would depend on which other gradients are wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._recurrences.elementwise.rwkv4 import inputs
from flacompose.ops._tiles.blocks import (
    chunks_of_segment,
    decayed,
    finite,
    is_idle,
    split_program,
    state_number,
)

LOWEST = tl.constexpr(inputs.LOWEST)


class State(NamedTuple):
    """The state, or its gradient, of which the maximum has none."""

    a: Any = None
    b: Any = None
    m: Any = None


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_state(state, at, in_d, BD: tl.constexpr):
    """The state at `at`, or the one before any token."""
    a, b, m = state
    a_, b_ = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    m_ = tl.full([BD], LOWEST, tl.float32)
    if a is not None:
        a_ += _load(a, at, in_d)
        b_ += _load(b, at, in_d)
        # The maximum of a state without writes is the lowest, whatever is stored.
        m_ = tl.where(b_ == 0.0, LOWEST, tl.maximum(_load(m, at, in_d), LOWEST))
    return a_, b_, m_


@triton.jit
def _store_state(state, at, a_, b_, m_, mask):
    a, b, m = state
    tl.store(a + at, a_, mask=mask)
    tl.store(b + at, b_, mask=mask)
    tl.store(m + at, m_, mask=mask)


@triton.jit
def _load_gradient(d_state, at, in_d, BD: tl.constexpr):
    """The gradients of a and b at `at`, zeros where they are absent."""
    a, b, _m = d_state
    da, db = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if a is not None:
        da += _load(a, at, in_d)
    if b is not None:
        db += _load(b, at, in_d)
    return da, db


@triton.jit
def _key(k, at, mask):
    """Keys, at least `LOWEST`, the lowest maximum: a lower one has a weight of 0 even alone."""
    k_ = _load(k, at, mask)
    return tl.where(k_ < LOWEST, LOWEST, k_)


@triton.jit
def _tokens(begin, stop, lo, hi, C: tl.constexpr):
    """The number of tokens in the chunks from `begin` to `stop` of a sequence, in float32."""
    return tl.maximum(tl.minimum(hi - lo, stop * C) - begin * C, 0).to(tl.float32)


@triton.jit
def _write(j, left, k, w, own, begun_m, m):
    """The factors `kept` and `written` of the token `j` of a chunk with `left` tokens, and the next maxima.

    `own` is the maximum of the chunk's own tokens, and `begun_m` the one before the chunk. If there is no
    such token, every bit of the state stays as it is.
    """
    k = tl.where(j < left, k, float("-inf"))
    decay = tl.where(j < left, w, 0.0)
    own = tl.maximum(own + decay, k)
    after = tl.maximum(tl.maximum(tl.fma(tl.minimum(j + 1, left).to(tl.float32), w, begun_m), own), LOWEST)
    return tl.exp(decay + (m - after)), tl.exp(k - after), own, after


@triton.jit
def _read(a, b, m, k, v, u):
    """The weights of the past (a and b) and of the token in the output, and the output."""
    # The maximum of a state without writes, or whose writes have decayed to 0, is meaningless.
    before, now = tl.where(b > 0, m, LOWEST), u + k
    top = tl.maximum(before, now)
    past, present = tl.exp(before - top), tl.exp(now - top)
    share = 1 / tl.fma(past, b, present)
    past, present = past * share, present * share
    return past, present, tl.fma(past, a, present * v)


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS", "count", "stride"])
def rwkv4_scan_kernel(
    v,  # [tokens, D]
    k,  # [tokens, D]
    w,  # [D]
    u,  # [D]
    initial,  # `State`, [SEGMENTS, N, D] each, before each segment
    o,  # [tokens, D]
    do,  # [tokens, D]
    before,  # [chunks, 3, D]: the state before each chunk
    d_start,  # `State`, [SEGMENTS, N, D] each, the gradients of the state before each segment through its outputs
    end,  # `State`, with `ENDS` [SEGMENTS, N, D] each, after each segment, else [N, D], or [N, count, D], at the end
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    count,  # with C = 1, the number of stored states, see `state_number`; None for the final one alone
    stride,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    ENDS: tl.constexpr,
):
    """One program scans one segment of one sequence, from the empty state if `initial` is absent.

    It stores the results that are given. Without `o` and `do` it computes the ends of all segments but the
    last.
    """
    tile, segment, n = split_program(tl.cdiv(D, BD), SEGMENTS)
    READS: tl.constexpr = (o is not None) or (do is not None)
    if is_idle(segment, SEGMENTS, None if READS else end.a, True):
        return
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    lo, hi, row, _, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C)

    # 1. The state before the segment.
    at_end = (segment * N + n) * D + d
    w_ = finite(_load(w, d, in_d))
    u_ = _load(u, d, in_d)
    a, b, m = _load_state(initial, at_end, in_d, BD)
    # The decay of the segment so far, and the gradients of the state before it through its outputs so far.
    left_over = tl.full([BD], 1.0, tl.float32)
    da = tl.zeros([BD], tl.float32)
    db = tl.zeros([BD], tl.float32)

    for i in range(begin, stop):
        at = (lo + i * C) * D + d
        left = tl.minimum(hi - lo - i * C, C).to(tl.int32)
        if before is not None:
            _store_state((before, before + D, before + 2 * D), (row + i) * 3 * D + d, a, b, m, in_d)
        begun_a, begun_b, begun_m, begun_left = a, b, m, left_over
        added_a = tl.zeros([BD], tl.float32)
        added_b = tl.zeros([BD], tl.float32)
        own = tl.full([BD], LOWEST, tl.float32)
        for j in tl.static_range(C):
            # 2. The output of a token.
            mask = in_d & (j < left)
            k_, v_ = _key(k + at, j * D, mask), _load(v + at, j * D, mask)
            if READS:
                past, _present, o_ = _read(a, b, m, k_, v_, u_)
                if o is not None:
                    tl.store(o + at + j * D, o_.to(o.dtype.element_ty), mask=mask)
                if do is not None:
                    d_past = left_over * past * _load(do + at, j * D, mask)
                    da += d_past
                    db -= d_past * o_
            # 3. The state after the token.
            kept, written, own, m = _write(j, left, k_, w_, own, begun_m, m)
            added_a, added_b = kept * added_a + written * v_, kept * added_b + written
            if READS:
                a, b = kept * a + written * v_, kept * b + written
            if do is not None:
                left_over *= kept
        total = left.to(tl.float32) * w_ + (begun_m - m)
        a, b = decayed(begun_a, total) + added_a, decayed(begun_b, total) + added_b
        if do is not None:
            left_over = decayed(begun_left, total)
        if count is not None:
            place = state_number(hi - lo - 1 - i, count, stride)
            if place >= 0:
                _store_state(end, (n * count + place) * D + d, a, b, m, in_d)

    # 4. The results of the segment.
    if do is not None:
        if d_start.a is not None:
            tl.store(d_start.a + at_end, da, mask=in_d)
            tl.store(d_start.b + at_end, db, mask=in_d)
            tl.store(end.m + at_end, m, mask=in_d)
    elif ENDS:
        _store_state(end, at_end, a, b, m, in_d)
    elif count is None:
        _store_state(end, n * D + d, a, b, m, in_d & (segment == SEGMENTS - 1))


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def rwkv4_join_kernel(
    states,  # `State`, [SEGMENTS, N, D] each: in, the ends of segments from the empty state; out, the states before
    w,  # [D]
    initial,  # `State`, [N, D] each
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    """The state before each segment: ``m <- max(n w + m, end_m)`` for n tokens, and a and b."""
    tile, n, _ = split_program(tl.cdiv(D, BD), N)
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    w_ = finite(_load(w, d, in_d))
    a_, b_, m_ = _load_state(initial, n * D + d, in_d, BD)
    for segment in tl.range(0, SEGMENTS, num_stages=4):
        lo, hi, _row, _chunks, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C)
        at = (segment * N + n) * D + d
        known = in_d & (segment < SEGMENTS - 1)
        own_a, own_b = _load(states.a, at, known), _load(states.b, at, known)
        own_m = _load(states.m, at, known)
        _store_state(states, at, a_, b_, m_, in_d)
        tokens = _tokens(begin, stop, lo, hi, C)
        after = tl.maximum(m_ + tokens * w_, own_m)
        total = tokens * w_ + (m_ - after)
        written = tl.exp(own_m - after)
        # A segment without tokens leaves every bit of the state as it is, finite or not.
        a_ = tl.where(tokens > 0, decayed(a_, total) + written * own_a, a_)
        b_ = tl.where(tokens > 0, decayed(b_, total) + written * own_b, b_)
        m_ = tl.where(tokens > 0, after, m_)


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def rwkv4_join_gradient_kernel(
    d_states,  # `State`, [SEGMENTS, N, D] each: in, of the state before a segment through its outputs; out, after it
    start_m,  # [SEGMENTS, N, D]: the maximum before each segment
    end_m,  # [SEGMENTS, N, D]: the maximum after it, whose rounding may differ from that of the next start
    w,  # [D]
    d_final,  # `State`, [N, D] each
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    """The gradients of a and b, backwards from segment to segment, each at its own maximum."""
    tile, n, _ = split_program(tl.cdiv(D, BD), N)
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    w_ = finite(_load(w, d, in_d))
    da, db = _load_gradient(d_final, n * D + d, in_d, BD)
    next_m = _load(end_m, ((SEGMENTS - 1) * N + n) * D + d, in_d)
    for i in tl.range(0, SEGMENTS, num_stages=4):
        segment = SEGMENTS - 1 - i
        lo, hi, _row, _chunks, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C)
        at = (segment * N + n) * D + d
        own_a, own_b = _load(d_states.a, at, in_d), _load(d_states.b, at, in_d)
        before, after = _load(start_m, at, in_d), _load(end_m, at, in_d)
        scale = tl.exp(after - next_m)
        da, db = scale * da, scale * db
        tl.store(d_states.a + at, da, mask=in_d)
        tl.store(d_states.b + at, db, mask=in_d)
        tokens = _tokens(begin, stop, lo, hi, C)
        total = tokens * w_ + (before - after)
        da = tl.where(tokens > 0, decayed(da, total) + own_a, da)
        db = tl.where(tokens > 0, decayed(db, total) + own_b, db)
        next_m = before


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def rwkv4_gradient_kernel(
    v,  # [tokens, D]
    k,  # [tokens, D]
    w,  # [D]
    u,  # [D]
    do,  # [tokens, D]
    before,  # [chunks, 3, D]: the state before each chunk
    d_end,  # `State`, [SEGMENTS, N, D] each, after each segment
    d_final_m,  # [N, D]
    dv,  # [tokens, D]
    dk,  # [tokens, D]
    dw,  # [SEGMENTS, N, D]: the sum over the tokens of each segment
    du,  # [SEGMENTS, N, D], likewise
    d_initial,  # `State`, [N, D] each
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    """Fills the given gradients, backwards in time, one segment of one sequence per program.

    The states of a chunk are computed again, from the one before it, and kept in registers. With `past_t` and
    `present_t`, the weights of `_read`, times ``do_t``:

        da_{t-1} = kept_t da_t + past_t             dv_t = written_t da_t + present_t
        db_{t-1} = kept_t db_t - past_t o_t         dk_t = written_t (v_t da_t + db_t) + present_t (v_t - o_t)
        dw = sum of kept_t (da_t a_{t-1} + db_t b_{t-1})        du = sum of present_t (v_t - o_t)
    """
    tile, segment, n = split_program(tl.cdiv(D, BD), SEGMENTS)
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    lo, hi, row, _, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C)

    # 1. The gradients of the state after the segment.
    at_end = (segment * N + n) * D + d
    w_ = finite(_load(w, d, in_d))
    u_ = _load(u, d, in_d)
    da, db = _load_gradient(d_end, at_end, in_d, BD)
    dw_, du_ = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)

    for i in range(begin, stop):
        chunk = begin + stop - 1 - i
        at = (lo + chunk * C) * D + d
        left = tl.minimum(hi - lo - chunk * C, C).to(tl.int32)
        # 2. The tokens of the chunk, once more.
        at_chunk = (row + chunk) * 3 * D + d
        a, b = _load(before, at_chunk, in_d), _load(before, at_chunk + D, in_d)
        m = _load(before, at_chunk + 2 * D, in_d)
        begun_m, own = m, tl.full([BD], LOWEST, tl.float32)
        as_, bs, vs, kepts, writtens = (), (), (), (), ()
        of_as, of_bs, of_presents, errors = (), (), (), ()
        for j in tl.static_range(C):
            mask = in_d & (j < left)
            k_, v_, do_ = _key(k + at, j * D, mask), _load(v + at, j * D, mask), _load(do + at, j * D, mask)
            past, present, o_ = _read(a, b, m, k_, v_, u_)
            kept, written, own, m = _write(j, left, k_, w_, own, begun_m, m)
            as_, bs, vs = as_ + (a,), bs + (b,), vs + (v_,)
            kepts, writtens = kepts + (kept,), writtens + (written,)
            of_as, of_bs = of_as + (past * do_,), of_bs + (-past * do_ * o_,)
            of_presents, errors = of_presents + (present * do_,), errors + (v_ - o_,)
            a, b = tl.fma(kept, a, written * v_), tl.fma(kept, b, written)
        # 3. Backwards from token to token.
        begun_a, begun_b = da, db
        added_a, added_b = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        for j in tl.static_range(C - 1, -1, -1):
            mask = in_d & (j < left)
            kept, written = kepts[j], writtens[j]
            if dv is not None:
                dv_ = tl.fma(written, da, of_presents[j])
                tl.store(dv + at + j * D, dv_.to(dv.dtype.element_ty), mask=mask)
            if dk is not None:
                dk_ = tl.fma(written, tl.fma(da, vs[j], db), of_presents[j] * errors[j])
                dk_ = tl.where(_load(k + at, j * D, mask) < LOWEST, 0.0, dk_)
                tl.store(dk + at + j * D, dk_.to(dk.dtype.element_ty), mask=mask)
            if dw is not None:
                dw_ = tl.where(j < left, tl.fma(kept, tl.fma(da, as_[j], db * bs[j]), dw_), dw_)
            du_ = tl.fma(of_presents[j], errors[j], du_)
            da, db = tl.fma(kept, da, of_as[j]), tl.fma(kept, db, of_bs[j])
            added_a, added_b = tl.fma(kept, added_a, of_as[j]), tl.fma(kept, added_b, of_bs[j])
        total = tl.fma(left.to(tl.float32), w_, begun_m - m)
        da, db = decayed(begun_a, total) + added_a, decayed(begun_b, total) + added_b

    # 4. The results of the segment.
    if dw is not None:
        tl.store(dw + at_end, dw_, mask=in_d)
    if du is not None:
        tl.store(du + at_end, du_, mask=in_d)
    first = in_d & (segment == 0)
    if d_initial.a is not None:
        tl.store(d_initial.a + n * D + d, da.to(d_initial.a.dtype.element_ty), mask=first)
    if d_initial.b is not None:
        tl.store(d_initial.b + n * D + d, db.to(d_initial.b.dtype.element_ty), mask=first)
    if d_initial.m is not None:
        # The maximum is a constant, except for the copy that a sequence without tokens returns.
        dm = tl.zeros([BD], tl.float32)
        if d_final_m is not None:
            dm += _load(d_final_m, n * D + d, first & (lo == hi))
        tl.store(d_initial.m + n * D + d, dm.to(d_initial.m.dtype.element_ty), mask=first)
