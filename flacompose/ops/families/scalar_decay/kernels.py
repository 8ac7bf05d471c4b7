"""The Triton kernel of scalar decay: a sweep over a sequence, its state in registers.

The output and three gradients are one sum, the roles of q, k, v and do exchanged, forwards or backwards in time:

    o  = sweep(q, k, v)             dv = sweep(k, q, do), backwards
    dq = sweep(do, v, k)            dk = sweep(v, do, q), backwards

The gradients of gates need the state before each chunk and the gradient of the state after it. Two sweeps store these,
of which the second makes dv on its way, and `gradients` has the kernel that computes everything else of all chunks at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import (
    bounded,
    dot,
    dot_split,
    find_segment,
    find_sequence,
    split_dot,
    split_program,
)
from flacompose.ops.families.scalar_decay.gates import LOG2_E


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


@triton.jit(do_not_specialize=["T", "N", "H", "HA", "HX", "SEGMENTS", "scale"])
def sweep_kernel(
    a,  # [tokens, HA, D1]
    b,  # [tokens, HA, D1]
    x,  # [tokens, HX, D2]
    beta,  # [tokens, H], how strongly a token is written
    gamma,  # [H], gates that are those of every token
    sums,  # [chunks, H, CS], of other gates, as `gate_kernel` gives them
    rest,  # [chunks, H, CS]
    initial,  # [N, H, D1, D2], with the strides of states
    segment_state,  # [SEGMENTS, N, H, D1, D2], with these too: each segment's end, begun at 0 (the first at `initial`)
    segment_gate,  # [SEGMENTS, N, H]: its summed gates
    out,  # [tokens, tiles of D1, H, D2], the sums over each tile
    states,  # [chunks, H, D1, D2]: the state before each chunk of `CS` tokens, or with `REVERSE` after it
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
    CS: tl.constexpr,
    BD1: tl.constexpr,
    BD2: tl.constexpr,
    SPLIT: tl.constexpr,
    ENDS: tl.constexpr,
    REVERSE: tl.constexpr,
    FINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``S <- e^g S + beta_t b_t x_t^T``, ``out_t = scale * S^T a_t``, from chunk to chunk.

    `REVERSE`, backwards in time, where `beta` weighs what is read: ``S <- e^g S + b_t x_t^T``, ``out_t = beta_t scale *
    S^T a_t``.

    One program sweeps one segment of one sequence, and of its state a tile. With `ENDS` it begins at zero, and stores
    the state at the segment's end. Otherwise it begins at the true state, computed from those ends, and stores what is
    given of `out`, of `states` and of `final`. It goes in chunks of `C` tokens, of which one or more are one of `CS`.
    `FINE` where gradients of gates are summed over tokens, and cancel: what is written to the state is then multiplied
    in two parts.
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
    lo, hi, row0 = find_sequence(n, T, cu_seqlens, CS)
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
        row = row0 + chunk * C // CS
        within = chunk * C % CS  # tokens of the larger chunk before this one
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
            at_gate = (row * H + h) * CS + within
            sum_i = tl.load(sums + at_gate + i_)
            total = tl.load(sums + at_gate + C - 1)
            to_start = sum_i
            to_end = total - sum_i
            if CS > C:
                before = tl.load(sums + at_gate - 1, mask=within > 0, other=0.0)
                to_start -= before
                total -= before
            between = sum_i - tl.load(sums + at_gate + j_)
            if rest is not None:
                rest_i = tl.load(rest + at_gate + i_)
                rest_total = tl.load(rest + at_gate + C - 1)
                to_start += rest_i
                to_end += rest_total - rest_i
                between += rest_i - tl.load(rest + at_gate + j_)
                total += rest_total
                if CS > C:
                    before = tl.load(rest + at_gate - 1, mask=within > 0, other=0.0)
                    to_start -= before
                    total -= before
            between = tl.exp2(-between if REVERSE else between)
        if GATED:
            near = tl.exp2(to_end if REVERSE else to_start)
            far = tl.exp2(to_start if REVERSE else to_end)
            gates += total
        if states is not None:
            first = within == 0
            if REVERSE:
                first = (within == CS - C) | (chunk == chunks - 1)
            if first:
                at = (row * H + h) * D1 * D2 + at_state
                tl.store(states + at, S.to(states.dtype.element_ty), mask=in_state)
        if beta is not None:
            beta_ = tl.load(beta + (start + t) * H + h, mask=t < remaining, other=0.0).to(tl.float32)
        if out is not None:
            a_ = _load_chunk(a, start, HA, ha, d1, D1, BD1, remaining, C)
            other_chunks = dot(a_, S, DOT)
            pairs = dot(a_, tl.trans(b_), DOT)
            if GATED:
                other_chunks *= near
                pairs *= between
            pairs = tl.where(i_ <= j_ if REVERSE else i_ >= j_, pairs, 0.0)
            if beta is not None and not REVERSE:
                pairs *= beta_[None, :]
            out_ = split_dot(pairs, x_.to(DOT), DOT, other_chunks)
            if beta is not None and REVERSE:
                out_ *= beta_[:, None]
            at_out = out + ((start * tiles1 + tile1) * H + h) * D2 + i_ * (tiles1 * H * D2) + d2[None, :]
            in_out = (i_ < remaining) & (d2 < D2)[None, :]
            tl.store(at_out, (out_ * unit).to(out.dtype.element_ty), mask=in_out)
        if GATED:
            S *= tl.exp2(total)
            x_ = x_ * far
        if beta is not None and not REVERSE:
            x_ = x_ * beta_[:, None]
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
