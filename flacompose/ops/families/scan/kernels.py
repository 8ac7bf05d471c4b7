"""Triton kernel for the elementwise scan: a sweep over a sequence, its state in registers.

Forwards in time it gives h, or what is left of the state before each token, which the gradient of gates needs;
backwards it gives the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import _expm1


@triton.jit
def _then(decay, left, x, next_decay, next_left, next_x):
    """Tokens, then others: their decay, what is left of the state before the last token, and what that one adds."""
    return decay * next_decay, (left + x) * next_decay + next_left, next_x


@triton.jit
def _then_before(decay, dh, a, next_decay, next_dh, next_a):
    """Backwards in time: the decay up to the last token, the gradient of the state after it, and its own decay."""
    return decay * a * next_decay, dh * a * next_decay + next_dh, next_a


@triton.jit
def _decayed(h, g):
    """``exp(g) * h``; ``exp(g)`` near 1 is rounded, at every token the same way where gates are constant."""
    return tl.where(g > -0.1, h + h * _expm1(g), h * tl.exp(g))


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def scan_kernel(
    x,  # [tokens, D]; backwards do
    g,  # [tokens, D]
    left,  # [tokens, D]: backwards, what is left of the state before each token; None if `dg` holds it
    initial,  # [N, D]
    segment_state,  # [SEGMENTS, N, D]: each segment's end, begun at 0 (the first at `initial`)
    segment_gate,  # [SEGMENTS, N, D]: its summed gates
    out,  # [tokens, D]: h or, with LEFT, what is left of it; backwards dx
    dg,  # [tokens, D], backwards
    final,  # [N, D]
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D,
    C: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    LEFT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``h <- exp(g_t) * h + x_t``, or with `REVERSE`, backwards in time, ``dh_t = do_t + exp(g_{t+1}) * dh_{t+1}``.

    One program sweeps one segment of one sequence. Without `out` from zero, to find the segments' ends; with it from
    the true state, folded from those. What is carried backwards is ``exp(g_t) * dh_t``, the gradient of the state
    before the token.
    """
    tiles = tl.cdiv(D, BD)
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % tiles
    segment = (pid // tiles) % SEGMENTS
    n = pid // tiles // SEGMENTS
    if out is None:
        if segment == SEGMENTS - 1:
            return
    # Two channels to a thread, and so all tokens of a tile: the scan crosses no threads where BD is 64.
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD // 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    in_d = d < D
    if cu_seqlens is not None:
        lo = tl.load(cu_seqlens + n)
        hi = tl.load(cu_seqlens + n + 1)
    else:
        lo = n * T
        hi = lo + T
    rows = tl.cdiv(hi - lo, C)
    per_segment = tl.cdiv(rows, SEGMENTS)
    begin = segment * per_segment
    stop = tl.minimum(begin + per_segment, rows)

    h = tl.zeros([BD // 2, 2], dtype=tl.float32)
    if initial is not None:
        h += tl.load(initial + n * D + d, mask=in_d & (segment == 0), other=0.0).to(tl.float32)
    if SPLIT and out is not None:
        for i in range(segment):
            at = (i * N + n) * D + d
            h = _decayed(h, tl.load(segment_gate + at, mask=in_d, other=0.0))
            h += tl.load(segment_state + at, mask=in_d, other=0.0)
    gates = tl.zeros([BD // 2, 2], dtype=tl.float32)

    t = tl.arange(0, C)[:, None, None]
    # With its own stages: those of a launch are for loads that feed products.
    for i in tl.range(begin, stop, num_stages=STAGES):
        # Past the end nothing decays, and nothing is added.
        mask = (t < (hi - lo - i * C).to(tl.int32)) & in_d[None, :, :]
        start = hi - 1 - i * C if REVERSE else lo + i * C
        at = start * D + (-t if REVERSE else t) * D + d[None, :, :]
        x_ = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        g_ = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        a_ = tl.exp(g_)
        total = tl.sum(g_, 0)
        if REVERSE:
            decay, dh, _ = tl.associative_scan((tl.full(a_.shape, 1.0, tl.float32), x_, a_), 0, _then_before)
            end = tl.sum(tl.where(t == C - 1, a_ * dh, 0.0), 0)
            if out is not None:
                dh += decay * h[None, :, :]
                left_ = tl.load((dg if left is None else left) + at, mask=mask, other=0.0).to(tl.float32)
                tl.store(out + at, dh.to(out.dtype.element_ty), mask=mask)
                tl.store(dg + at, (dh * left_).to(dg.dtype.element_ty), mask=mask)
        else:
            decay, left_, _ = tl.associative_scan((a_, tl.zeros_like(x_), x_), 0, _then)
            end = tl.sum(tl.where(t == C - 1, left_ + x_, 0.0), 0)
            if out is not None:
                left_ += decay * h[None, :, :]
                out_ = left_ if LEFT else left_ + x_
                tl.store(out + at, out_.to(out.dtype.element_ty), mask=mask)
        h = _decayed(h, total) + end
        gates += total

    if out is None:
        at = (segment * N + n) * D + d
        tl.store(segment_state + at, h, mask=in_d)
        tl.store(segment_gate + at, gates, mask=in_d)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D + d, h.to(final.dtype.element_ty), mask=in_d)
