"""Triton kernels of ``h_t = a_t h_{t-1} + e_t``: of the elementwise scan and of the RG-LRU, which gates it.

    scan      a_t = exp(g_t)                                      e_t = x_t
    RG-LRU    a_t = exp(-8 softplus(a_param) sigmoid(r_t))        e_t = s_t sigmoid(i_t) x_t, s_t = sqrt(1 - a_t^2)

A call with `r` is one of the RG-LRU. Decays and inputs are made of the gates in registers, where the state is
too. A program is one warp, and goes from token to token, each thread with its own channels. The tokens of a
tile are unrolled, and loaded one tile ahead, so that loads overlap with the arithmetic.

From tile to tile the state is decayed by the whole tile at once, and the contribution of its tokens, `added`,
is computed separately: where decays are near 1, the rounding errors of single steps would add up over many
tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    bounded,
    chunks_of_segment,
    decayed,
    expm1_near_0,
    finite,
    is_idle,
    softplus,
    split_program,
    state_number,
    tile_of_channels,
)


@triton.jit
def _tile(
    x, g, r, i, reset, token, hi, d, in_d, D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """`x`, `g` or `r`, `i` and `reset` of each token of a tile, where they are given.

    Gates keep the state where there is no token. There are resets for H groups of channels.
    """
    inputs = tile_of_channels(x, token, hi, d, in_d, D, C, REVERSE)
    opened, resets = (), ()
    if r is None:
        gates = tile_of_channels(g, token, hi, d, in_d, D, C, REVERSE)
    else:
        gates = tile_of_channels(r, token, hi, d, in_d, D, C, REVERSE, float("-inf"))
    if i is not None:
        opened = tile_of_channels(i, token, hi, d, in_d, D, C, REVERSE)
    if reset is not None:
        resets = tile_of_channels(reset, token, hi, d // (D // H), in_d, H, C, REVERSE)
    return inputs, gates, opened, resets


@triton.jit
def _decay(gate, rate, reset):
    """Of a token: the log decay, the decay, and in the RG-LRU the open recurrence gate and the strength."""
    if rate is None:
        g = gate.to(tl.float32)
        a, opened, strength = tl.exp(g), 1.0, 1.0
    else:
        opened = tl.sigmoid(gate.to(tl.float32))
        g = bounded(rate * opened)
        a = tl.exp(g)
        strength = tl.sqrt(tl.where(g > -0.05, -expm1_near_0(2 * g), 1 - a * a))
        if reset is not None:
            g = tl.where(reset, float("-inf"), g)
            a = tl.where(reset, 0.0, a)
            strength = tl.where(reset, 1.0, strength)
    return g, a, opened, strength


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS", "count", "stride"])
def scan_kernel(
    x,  # [tokens, D]; backwards do
    g,  # [tokens, D], of the scan
    r,  # [tokens, D], of the RG-LRU, as are the next three
    i,  # [tokens, D]; None backwards
    a_param,  # [D]
    reset,  # [tokens, H]
    initial,  # [SEGMENTS, N, D], before each segment
    o,  # [tokens, D]
    before,  # [chunks, D]: the state before each chunk
    ends,  # [SEGMENTS, N, D], after each segment but the last
    sum_g,  # [SEGMENTS, N, D], the sum of each segment's log decays
    final,  # [N, D], or [N, count, D]
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    count,  # with C = 1, the number of stored states, see `state_number`; None for the final one alone
    stride,
    D: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The scan of one segment of one sequence, from zero if `initial` is absent; fills the given results.

    With `REVERSE`, backwards in time, it is ``c <- a_t (do_t + c)``, the gradient of the state before the
    token.
    """
    tile, segment, n = split_program(tl.cdiv(D, BD), SEGMENTS)
    if is_idle(segment, SEGMENTS, ends, o is not None or before is not None):
        return
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    at_end = (segment * N + n) * D + d
    lo, hi, row, _, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C, REVERSE)

    # 1. The rates, and the state before the segment.
    rate = None
    if a_param is not None:
        rate = finite(-8 * softplus(tl.load(a_param + d, mask=in_d, other=0.0).to(tl.float32)))
    h = tl.zeros([BD], tl.float32)
    if initial is not None:
        h += tl.load(initial + at_end, mask=in_d, other=0.0).to(tl.float32)
    gates = tl.zeros([BD], tl.float32)

    # 2. The tokens of the first tile.
    token = lo + (tl.maximum(stop - 1, 0) if REVERSE else begin) * C
    following = _tile(x, g, r, i, reset, token, hi, d, in_d, D, H, C, REVERSE)
    for k in range(begin, stop):
        chunk = begin + stop - 1 - k if REVERSE else k
        first = lo + chunk * C
        left = tl.minimum(hi - first, C).to(tl.int32)
        token = tl.maximum(first - C, lo) if REVERSE else first + C
        x_tile, gate_tile, i_tile, reset_tile = following
        following = _tile(x, g, r, i, reset, token, hi, d, in_d, D, H, C, REVERSE)
        # 3. One token after the other.
        begun, added, total = h, tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        for j in tl.static_range(C):
            reset_ = reset_tile[j] if reset is not None else None
            g_, a_, _opened, strength = _decay(gate_tile[j], rate, reset_)
            x_ = x_tile[j].to(tl.float32)
            if REVERSE:
                added = a_ * (added + x_)
            else:
                if before is not None and j == 0:
                    tl.store(before + (row + chunk) * D + d, h, mask=in_d)
                e_ = strength * tl.sigmoid(i_tile[j].to(tl.float32)) * x_ if i is not None else x_
                added = a_ * added + e_
                h = a_ * h + e_
                if o is not None:
                    tl.store(o + (first + j) * D + d, h.to(o.dtype.element_ty), mask=in_d & (j < left))
            total += g_
        # 4. The state after the tile.
        h = decayed(begun, total) + added
        if sum_g is not None:
            gates += total
        if count is not None:
            place = state_number(hi - lo - 1 - k, count, stride)
            if place >= 0:
                tl.store(final + (n * count + place) * D + d, h, mask=in_d)

    # 5. The results of the segment.
    if sum_g is not None:
        tl.store(sum_g + at_end, gates, mask=in_d)
    if ends is not None:
        tl.store(ends + at_end, h, mask=in_d)
    elif final is not None and count is None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D + d, h, mask=in_d)


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def scan_gradient_kernel(
    x,  # [tokens, D]
    g,  # [tokens, D], of the scan
    r,  # [tokens, D], of the RG-LRU, as are the next three
    i,  # [tokens, D]
    a_param,  # [D]
    reset,  # [tokens, H]
    do,  # [tokens, D]
    before,  # [chunks, D]: the state before each chunk; None where no gradient needs states
    d_final,  # [SEGMENTS, N, D], after each segment; segment 0 is the last in time
    dx,  # [tokens, D]
    dg,  # [tokens, D]
    dr,  # [tokens, D]
    di,  # [tokens, D]
    d_a_param,  # [SEGMENTS, N, D]: the sum over the tokens of each segment
    d_initial,  # [N, D]
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    """Fills the given gradients, backwards in time, one segment of one sequence per program.

    With ``dh_t = do_t + c_{t+1}``, where the scan carries ``c_t = a_t dh_t``, the gradient of ``g_t`` is
    ``dh_t a_t h_{t-1}``, and in the RG-LRU ``dh_t (a_t h_{t-1} - a_t^2 sigmoid(i_t) x_t / s_t)``. The states
    of a chunk are computed again, from the state before it.
    """
    tile, segment, n = split_program(tl.cdiv(D, BD), SEGMENTS)
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    at_end = (segment * N + n) * D + d
    lo, hi, row, _, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C, True)

    # 1. The rates, and the gradient of the state after the segment.
    rate = None
    if a_param is not None:
        of_rate = tl.load(a_param + d, mask=in_d, other=0.0).to(tl.float32)
        rate = finite(-8 * softplus(of_rate))
        d_rate = tl.zeros([BD], tl.float32)
    c = tl.zeros([BD], tl.float32)
    if d_final is not None:
        c += tl.load(d_final + at_end, mask=in_d, other=0.0).to(tl.float32)

    # 2. The tokens of the last chunk, and the state before it.
    last = tl.maximum(stop - 1, 0)
    token = lo + last * C
    following = _tile(x, g, r, i, reset, token, hi, d, in_d, D, H, C, False)
    next_do = tile_of_channels(do, token, hi, d, in_d, D, C, False)
    next_h = tl.zeros([BD], tl.float32)
    if before is not None:
        next_h = tl.load(before + (row + last) * D + d, mask=in_d & (begin < stop), other=0.0)
    for k in range(begin, stop):
        chunk = begin + stop - 1 - k
        first = lo + chunk * C
        left = tl.minimum(hi - first, C).to(tl.int32)
        earlier = tl.maximum(chunk - 1, 0)
        token = lo + earlier * C
        x_tile, gate_tile, i_tile, reset_tile = following
        do_tile, h = next_do, next_h
        following = _tile(x, g, r, i, reset, token, hi, d, in_d, D, H, C, False)
        next_do = tile_of_channels(do, token, hi, d, in_d, D, C, False)
        if before is not None:
            next_h = tl.load(before + (row + earlier) * D + d, mask=in_d, other=0.0)
        # 3. Forwards: the gates of each token, and the decayed state before it.
        gates, decays, strengths, lefts = (), (), (), ()
        begun, added, total = c, tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        for j in tl.static_range(C):
            reset_ = reset_tile[j] if reset is not None else None
            g_, a_, opened, strength = _decay(gate_tile[j], rate, reset_)
            gates, decays, strengths = gates + (opened,), decays + (a_,), strengths + (strength,)
            lefts = lefts + (a_ * h,)
            u_ = x_tile[j].to(tl.float32)
            if i is not None:
                u_ = strength * (tl.sigmoid(i_tile[j].to(tl.float32)) * u_)
            h = a_ * h + u_
            total += g_
        # 4. Backwards, with the gradients of each token.
        for j in tl.static_range(C - 1, -1, -1):
            a_, strength, do_ = decays[j], strengths[j], do_tile[j].to(tl.float32)
            dh = do_ + c
            c = a_ * dh
            added = a_ * (added + do_)
            at, is_token = (first + j) * D + d, in_d & (j < left)
            open_ = tl.sigmoid(i_tile[j].to(tl.float32)) if i is not None else 1.0
            if dx is not None:
                tl.store(dx + at, (dh * strength * open_).to(dx.dtype.element_ty), mask=is_token)
            if dg is not None:
                tl.store(dg + at, (dh * lefts[j]).to(dg.dtype.element_ty), mask=is_token)
            if i is not None:
                x_ = x_tile[j].to(tl.float32)
                if di is not None:
                    di_ = dh * strength * x_ * (open_ * (1 - open_))
                    tl.store(di + at, di_.to(di.dtype.element_ty), mask=is_token)
                if before is not None:
                    # A strength of 0 has no gradient.
                    of_strength = tl.where(
                        strength > 0.0, a_ * a_ * (open_ * x_) / tl.where(strength > 0.0, strength, 1.0), 0.0
                    )
                    dg_ = dh * (lefts[j] - of_strength)
                    d_rate += dg_ * gates[j]
                    if dr is not None:
                        # In this order, because a rate may be the largest float32 number.
                        dr_ = dg_ * (rate * (gates[j] * (1 - gates[j])))
                        tl.store(dr + at, dr_.to(dr.dtype.element_ty), mask=is_token)
        c = decayed(begun, total) + added

    # 5. The results of the segment.
    if d_a_param is not None:
        tl.store(d_a_param + at_end, d_rate * (-8 * tl.sigmoid(of_rate)), mask=in_d)
    if d_initial is not None:
        if segment == SEGMENTS - 1:
            tl.store(d_initial + n * D + d, c.to(d_initial.dtype.element_ty), mask=in_d)
