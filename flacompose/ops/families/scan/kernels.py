"""Triton kernel for the elementwise scan: a sweep over a sequence, its state in registers.

Forwards in time it gives h; backwards the gradients, from the state that it left before each chunk on a way forwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import _expm1


@triton.jit
def _then(decay, h, next_decay, next_h):
    """Tokens, then others: their decay, and what they leave of a state of zero."""
    return decay * next_decay, h * next_decay + next_h


@triton.jit
def _then_left(decay, left, x, next_decay, next_left, next_x):
    """Likewise; what is left of the state before the last token, and what this token adds."""
    return decay * next_decay, (left + x) * next_decay + next_left, next_x


@triton.jit
def _then_before(decay, dh, a, next_decay, next_dh, next_a):
    """Backwards in time: as `_then`, but for the decay of the last token, which is kept for later."""
    return decay * a * next_decay, dh * a * next_decay + next_dh, next_a


@triton.jit
def _decayed(h, g):
    """``exp(g) * h``; ``exp(g)`` near 1 is rounded, at every token the same way where gates are constant."""
    return tl.where(g > -0.1, h + h * _expm1(g), h * tl.exp(g))


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def scan_kernel(
    x,  # [tokens, D]
    g,  # [tokens, D]
    do,  # [tokens, D], backwards
    initial,  # [N, D]
    segment_state,  # [SEGMENTS, N, D]: each segment's end, begun at 0 (the first at `initial`)
    segment_gate,  # [SEGMENTS, N, D]: its summed gates
    out,  # [tokens, D]: h, or backwards dx
    dg,  # [tokens, D], backwards
    states,  # [rows, D]: the state before each chunk, stored forwards in time and read backwards
    final,  # [N, D]
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D,
    C: tl.constexpr,
    BD: tl.constexpr,
    SPLIT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``h <- exp(g_t) * h + x_t``, or with `REVERSE`, backwards in time, ``dh_t = do_t + exp(g_{t+1}) * dh_{t+1}``.

    One program sweeps one segment of one sequence. Without `out` and `states` from zero, to find the segments' ends;
    with one of them from the true state, folded from those. What is carried backwards is ``exp(g_t) * dh_t``, the
    gradient of the state before the token.
    """
    tiles = tl.cdiv(D, BD)
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % tiles
    segment = (pid // tiles) % SEGMENTS
    n = pid // tiles // SEGMENTS
    ENDS: tl.constexpr = out is None and states is None
    if ENDS:
        if segment == SEGMENTS - 1:
            return
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
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

    h = tl.zeros([BD], dtype=tl.float32)
    if initial is not None:
        h += tl.load(initial + n * D + d, mask=in_d & (segment == 0), other=0.0).to(tl.float32)
    if SPLIT and not ENDS:
        for i in range(segment):
            at = (i * N + n) * D + d
            h = _decayed(h, tl.load(segment_gate + at, mask=in_d, other=0.0))
            h += tl.load(segment_state + at, mask=in_d, other=0.0)
    gates = tl.zeros([BD], dtype=tl.float32)

    t = tl.arange(0, C)[:, None]
    for i in range(begin, stop):
        row = rows - 1 - i if REVERSE else i
        start = lo + row * C
        mask = (t < (hi - start).to(tl.int32)) & in_d[None, :]
        at = start * D + t * D + d[None, :]
        at_state = (row0 + row) * D + d
        # Past the end nothing decays, and nothing is added.
        g_ = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        a_ = tl.exp(g_)
        total = tl.sum(g_, 0)
        if REVERSE:
            do_ = tl.load(do + at, mask=mask, other=0.0).to(tl.float32)
            one = tl.full([C, BD], 1.0, dtype=tl.float32)
            decay, dh, _ = tl.associative_scan((one, do_, a_), 0, _then_before, reverse=True)
            end = tl.sum(tl.where(t == 0, dh * a_, 0.0), 0)
            if out is not None:
                dh += decay * h[None, :]
                x_ = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
                kept, left, _ = tl.associative_scan((a_, tl.zeros_like(x_), x_), 0, _then_left)
                left += kept * tl.load(states + at_state, mask=in_d, other=0.0)[None, :]
                tl.store(out + at, dh.to(out.dtype.element_ty), mask=mask)
                tl.store(dg + at, (dh * left).to(dg.dtype.element_ty), mask=mask)
        else:
            x_ = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            decay, h_ = tl.associative_scan((a_, x_), 0, _then)
            end = tl.sum(tl.where(t == C - 1, h_, 0.0), 0)
            if states is not None:
                tl.store(states + at_state, h, mask=in_d)
            if out is not None:
                tl.store(out + at, (h_ + decay * h[None, :]).to(out.dtype.element_ty), mask=mask)
        h = _decayed(h, total) + end
        gates += total

    if ENDS:
        at = (segment * N + n) * D + d
        tl.store(segment_state + at, h, mask=in_d)
        tl.store(segment_gate + at, gates, mask=in_d)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D + d, h.to(final.dtype.element_ty), mask=in_d)
