"""Triton kernel of the elementwise scan over a sequence, its state in registers.

Forwards in time it computes h or, for the gradient of gates, the decayed state ``exp(g_t) * h_{t-1}`` before
each token; backwards it computes the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    decayed,
    find_segment,
    find_sequence,
    is_idle,
    split_program,
    state_number,
)

UNIT = tl.constexpr(16)  # segments have a multiple of this many tokens, for all tiles


@triton.jit
def _join(decay, state, a, e, next_decay, next_state, next_a, next_e):
    """Joins two spans of ``h <- a * h + e``: decay and state before the last step, and that step."""
    return decay * a * next_decay, (state * a + e) * next_decay + next_state, next_a, next_e


@triton.jit
def _before(a, e):
    """The decay and the state before each step of ``h <- a * h + e`` along the second axis, started at 0."""
    steps = tl.full(a.shape, 1.0, tl.float32), tl.zeros_like(e), a, e
    decay, state, _, _ = tl.associative_scan(steps, 1, _join)
    return decay, state


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def scan_kernel(
    x,  # [tokens, D]; backwards do
    g,  # [tokens, D]
    decayed_h,  # [tokens, D]: backwards, the decayed state before each token; None if `dg` holds it
    initial,  # [SEGMENTS, N, D], before each segment
    out,  # [tokens, D]: h or, with DECAYED, the decayed state before each token; backwards dx
    dg,  # [tokens, D], backwards
    ends,  # [SEGMENTS, N, D], after each segment but the last
    sum_g,  # [SEGMENTS, N, D], the sum of each segment's gates
    final,  # [N, D], or [N, count, D]
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    count,  # with C = 1, the number of stored states, see `state_number`; None for the final one alone
    stride,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    DECAYED: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``h <- exp(g_t) * h + x_t``, or with `REVERSE`, backwards in time, ``dh_t = do_t + exp(g_{t+1}) * dh_{t+1}``.

    One program has one segment of one sequence. It starts at zero if `initial` is absent, and stores those of
    `out`, `dg`, `ends` and `final` that are given. Backwards, the scan carries ``exp(g_t) * dh_t``, the
    gradient of the state before the token.
    """
    tile, segment, n = split_program(tl.cdiv(D, BD), SEGMENTS)
    if is_idle(segment, SEGMENTS, ends, out is not None or dg is not None):
        return
    # With this order of axes, tokens second, a thread has two channels and all tokens of a tile: its scan
    # crosses no threads if BD is 64.
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD // 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    in_d = d < D
    lo, hi, _ = find_sequence(n, T, cu_seqlens, C)
    begin, stop = find_segment(segment, SEGMENTS, tl.cdiv(hi - lo, UNIT))
    begin *= UNIT // C
    stop = tl.minimum(stop * (UNIT // C), tl.cdiv(hi - lo, C))

    # 1. The state before the segment.
    at_end = (segment * N + n) * D + d
    h = tl.zeros([BD // 2, 2], dtype=tl.float32)
    if initial is not None:
        h += tl.load(initial + at_end, mask=in_d, other=0.0).to(tl.float32)
    gates = tl.zeros([BD // 2, 2], dtype=tl.float32)

    t = tl.arange(0, C)[None, :, None]
    from_start = (-t if REVERSE else t) * D + d[:, None, :]
    # The loop has its own number of stages: that of a launch is for loads that feed products.
    for i in tl.range(begin, stop, num_stages=STAGES):
        # 2. The tokens of a tile. Past the end nothing decays, and nothing is added.
        mask = t < (hi - lo - i * C).to(tl.int32)
        if D % BD != 0:
            mask &= in_d[:, None, :]
        start = (hi - 1 - i * C if REVERSE else lo + i * C) * D
        x_ = tl.load(x + start + from_start, mask=mask, other=0.0).to(tl.float32)
        g_ = tl.load(g + start + from_start, mask=mask, other=0.0).to(tl.float32)
        a_ = tl.exp(g_)
        e_ = a_ * x_ if REVERSE else x_
        # 3. The states before its tokens, started at 0, and the results that follow from them.
        decay, before = _before(a_, e_)
        end = tl.sum(tl.where(t == C - 1, a_ * before + e_, 0.0), 1)
        if ends is None:
            before += decay * h[:, None, :]
            if REVERSE:
                dh = before + x_
                if dg is not None:
                    h_ = tl.load(
                        (dg if decayed_h is None else decayed_h) + start + from_start, mask=mask, other=0.0
                    )
                if out is not None:
                    tl.store(out + start + from_start, dh.to(out.dtype.element_ty), mask=mask)
                if dg is not None:
                    tl.store(dg + start + from_start, (dh * h_).to(dg.dtype.element_ty), mask=mask)
            elif out is not None:
                out_ = a_ * before if DECAYED else a_ * before + x_
                tl.store(out + start + from_start, out_.to(out.dtype.element_ty), mask=mask)
        # 4. The state after the tile.
        total = tl.sum(g_, 1)
        h = decayed(h, total) + end
        if sum_g is not None:
            gates += total
        if count is not None:
            place = state_number(hi - lo - 1 - i, count, stride)
            if place >= 0:
                tl.store(final + (n * count + place) * D + d, h, mask=in_d)

    # 5. The results of the segment.
    if sum_g is not None:
        tl.store(sum_g + at_end, gates, mask=in_d)
    if ends is not None:
        tl.store(ends + at_end, h, mask=in_d)
    elif final is not None and count is None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D + d, h.to(final.dtype.element_ty), mask=in_d)
