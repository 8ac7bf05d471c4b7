"""Triton kernel for the elementwise scan: a sweep over a sequence, its state in registers.

Forwards in time it gives h, or what is left of the state before each token, which the gradient of gates needs;
backwards it gives the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import decayed

UNIT = tl.constexpr(16)  # tokens that segments are multiples of


@triton.jit
def _join(decay, state, a, e, next_decay, next_state, next_a, next_e):
    """Steps ``h <- a * h + e``, then others: the decay and the state before the last step, and that step."""
    return decay * a * next_decay, (state * a + e) * next_decay + next_state, next_a, next_e


@triton.jit
def _before(a, e):
    """The decay and the state before each step of ``h <- a * h + e`` along the second axis, begun at 0."""
    steps = tl.full(a.shape, 1.0, tl.float32), tl.zeros_like(e), a, e
    decay, state, _, _ = tl.associative_scan(steps, 1, _join)
    return decay, state


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
    D: tl.constexpr,
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
    # Axes in this order, tokens the second, give a thread two channels and all tokens of a tile: its scan crosses no
    # threads where BD is 64.
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD // 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    in_d = d < D
    if cu_seqlens is not None:
        lo = tl.load(cu_seqlens + n)
        hi = tl.load(cu_seqlens + n + 1)
    else:
        lo = n * T
        hi = lo + T
    # The same tokens whatever the tile.
    per_segment = tl.cdiv(tl.cdiv(hi - lo, UNIT), SEGMENTS) * (UNIT // C)
    begin = segment * per_segment
    stop = tl.minimum(begin + per_segment, tl.cdiv(hi - lo, C))

    h = tl.zeros([BD // 2, 2], dtype=tl.float32)
    if initial is not None:
        h += tl.load(initial + n * D + d, mask=in_d & (segment == 0), other=0.0).to(tl.float32)
    if SPLIT and out is not None:
        for i in range(segment):
            at = (i * N + n) * D + d
            h = decayed(h, tl.load(segment_gate + at, mask=in_d, other=0.0))
            h += tl.load(segment_state + at, mask=in_d, other=0.0)
    gates = tl.zeros([BD // 2, 2], dtype=tl.float32)

    t = tl.arange(0, C)[None, :, None]
    from_start = (-t if REVERSE else t) * D + d[:, None, :]
    # With its own stages: those of a launch are for loads that feed products.
    for i in tl.range(begin, stop, num_stages=STAGES):
        # Past the end nothing decays, and nothing is added.
        mask = t < (hi - lo - i * C).to(tl.int32)
        if D % BD != 0:
            mask &= in_d[:, None, :]
        start = (hi - 1 - i * C if REVERSE else lo + i * C) * D
        x_ = tl.load(x + start + from_start, mask=mask, other=0.0).to(tl.float32)
        g_ = tl.load(g + start + from_start, mask=mask, other=0.0).to(tl.float32)
        a_ = tl.exp(g_)
        e_ = a_ * x_ if REVERSE else x_
        decay, before = _before(a_, e_)
        end = tl.sum(tl.where(t == C - 1, a_ * before + e_, 0.0), 1)
        if out is not None:
            before += decay * h[:, None, :]
            if REVERSE:
                dh = before + x_
                left_ = tl.load((dg if left is None else left) + start + from_start, mask=mask, other=0.0)
                tl.store(out + start + from_start, dh.to(out.dtype.element_ty), mask=mask)
                tl.store(dg + start + from_start, (dh * left_).to(dg.dtype.element_ty), mask=mask)
            else:
                out_ = a_ * before if LEFT else a_ * before + x_
                tl.store(out + start + from_start, out_.to(out.dtype.element_ty), mask=mask)
        total = tl.sum(g_, 1)
        h = decayed(h, total) + end
        gates += total

    if out is None:
        at = (segment * N + n) * D + d
        tl.store(segment_state + at, h, mask=in_d)
        tl.store(segment_gate + at, gates, mask=in_d)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D + d, h.to(final.dtype.element_ty), mask=in_d)
