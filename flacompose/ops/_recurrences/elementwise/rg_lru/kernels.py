"""Triton kernels of the RG-LRU, which compute decays and inputs from the gates; the state is in registers.

    a_t = exp(g_t)        g_t = -8 softplus(a_param) sigmoid(r_t)
    h_t = a_t h_{t-1} + s_t sigmoid(i_t) x_t        s_t = sqrt(1 - a_t^2)

A program is one warp, and goes from token to token, each thread with its own channels. The tokens of a tile
are unrolled. Their inputs are loaded one tile ahead, so that loads overlap with the arithmetic of the gates.

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
def _gates(rate, r, reset):
    """The recurrence gate of a token, its log decay, its decay, and the strength of its input."""
    gate = tl.sigmoid(r.to(tl.float32))
    g = bounded(rate * gate)
    a = tl.exp(g)
    s = tl.sqrt(tl.where(g > -0.05, -expm1_near_0(2 * g), 1 - a * a))
    return gate, tl.where(reset, float("-inf"), g), tl.where(reset, 0.0, a), tl.where(reset, 1.0, s)


@triton.jit
def _resets(
    reset, token, hi, d, in_d, D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr
):
    """``reset [tokens, H]`` of each token of a tile, in the order of the scan, for H groups of channels."""
    if reset is not None:
        resets = tile_of_channels(reset, token, hi, d // (D // H), in_d, H, C, REVERSE)
    else:
        resets = ()
        for _ in tl.static_range(C):
            resets += (in_d & False,)
    return resets


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS", "count", "stride"])
def rg_lru_scan_kernel(
    x,  # [tokens, D]; backwards do
    r,  # [tokens, D]
    i,  # [tokens, D]
    a_param,  # [D]
    reset,  # [tokens, H]
    initial,  # [SEGMENTS, N, D], before each segment
    o,  # [tokens, D]
    before,  # [chunks, D]: the state before each chunk
    ends,  # [SEGMENTS, N, D], after each segment but the last
    final,  # [N, D], or [N, count, D]
    sum_g,  # [SEGMENTS, N, D], the sum of each segment's log decays
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
    rate = finite(-8 * softplus(tl.load(a_param + d, mask=in_d, other=0.0).to(tl.float32)))
    h = tl.zeros([BD], tl.float32)
    if initial is not None:
        h += tl.load(initial + at_end, mask=in_d, other=0.0).to(tl.float32)
    gates = tl.zeros([BD], tl.float32)

    # 2. The tokens of the first tile. A closed gate, where there is no token, keeps the state.
    token = lo + (tl.maximum(stop - 1, 0) if REVERSE else begin) * C
    next_x = tile_of_channels(x, token, hi, d, in_d, D, C, REVERSE)
    next_r = tile_of_channels(r, token, hi, d, in_d, D, C, REVERSE, float("-inf"))
    next_reset = _resets(reset, token, hi, d, in_d, D, H, C, REVERSE)
    if not REVERSE:
        next_i = tile_of_channels(i, token, hi, d, in_d, D, C, REVERSE)
    for k in range(begin, stop):
        chunk = begin + stop - 1 - k if REVERSE else k
        first = lo + chunk * C
        left = tl.minimum(hi - first, C).to(tl.int32)
        token = tl.maximum(first - C, lo) if REVERSE else first + C
        x_tile, r_tile, reset_tile = next_x, next_r, next_reset
        next_x = tile_of_channels(x, token, hi, d, in_d, D, C, REVERSE)
        next_r = tile_of_channels(r, token, hi, d, in_d, D, C, REVERSE, float("-inf"))
        next_reset = _resets(reset, token, hi, d, in_d, D, H, C, REVERSE)
        if not REVERSE:
            i_tile = next_i
            next_i = tile_of_channels(i, token, hi, d, in_d, D, C, REVERSE)
        # 3. One token after the other.
        begun, added, total = h, tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        for j in tl.static_range(C):
            gate, g_, a_, s_ = _gates(rate, r_tile[j], reset_tile[j])
            x_ = x_tile[j].to(tl.float32)
            if REVERSE:
                added = a_ * (added + x_)
            else:
                if before is not None and j == 0:
                    tl.store(before + (row + chunk) * D + d, h, mask=in_d)
                e_ = s_ * tl.sigmoid(i_tile[j].to(tl.float32)) * x_
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
def rg_lru_gradient_kernel(
    x,  # [tokens, D]
    r,  # [tokens, D]
    i,  # [tokens, D]
    a_param,  # [D]
    reset,  # [tokens, H]
    do,  # [tokens, D]
    before,  # [chunks, D]: the state before each chunk; None where no gradient needs states
    d_final,  # [SEGMENTS, N, D], after each segment; segment 0 is the last in time
    dx,  # [tokens, D]
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

    With ``u_t = sigmoid(i_t) x_t`` and ``dh_t = do_t + c_{t+1}``, where the scan carries ``c_t = a_t dh_t``,
    the gradient of ``g_t`` is ``dh_t (a_t h_{t-1} - a_t^2 u_t / s_t)``. The states of a chunk are computed
    again, from the state before it.
    """
    tile, segment, n = split_program(tl.cdiv(D, BD), SEGMENTS)
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    at_end = (segment * N + n) * D + d
    lo, hi, row, _, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C, True)

    # 1. The rates, and the gradient of the state after the segment.
    of_rate = tl.load(a_param + d, mask=in_d, other=0.0).to(tl.float32)
    rate = finite(-8 * softplus(of_rate))
    c = tl.zeros([BD], tl.float32)
    if d_final is not None:
        c += tl.load(d_final + at_end, mask=in_d, other=0.0).to(tl.float32)
    d_rate = tl.zeros([BD], tl.float32)

    # 2. The tokens of the last chunk, and the state before it.
    last = tl.maximum(stop - 1, 0)
    token = lo + last * C
    next_x = tile_of_channels(x, token, hi, d, in_d, D, C, False)
    next_r = tile_of_channels(r, token, hi, d, in_d, D, C, False, float("-inf"))
    next_i = tile_of_channels(i, token, hi, d, in_d, D, C, False)
    next_do = tile_of_channels(do, token, hi, d, in_d, D, C, False)
    next_reset = _resets(reset, token, hi, d, in_d, D, H, C, False)
    next_h = tl.zeros([BD], tl.float32)
    if before is not None:
        next_h = tl.load(before + (row + last) * D + d, mask=in_d & (begin < stop), other=0.0)
    for k in range(begin, stop):
        chunk = begin + stop - 1 - k
        first = lo + chunk * C
        left = tl.minimum(hi - first, C).to(tl.int32)
        earlier = tl.maximum(chunk - 1, 0)
        token = lo + earlier * C
        x_tile, r_tile, i_tile, do_tile, reset_tile, h = next_x, next_r, next_i, next_do, next_reset, next_h
        next_x = tile_of_channels(x, token, hi, d, in_d, D, C, False)
        next_r = tile_of_channels(r, token, hi, d, in_d, D, C, False, float("-inf"))
        next_i = tile_of_channels(i, token, hi, d, in_d, D, C, False)
        next_do = tile_of_channels(do, token, hi, d, in_d, D, C, False)
        next_reset = _resets(reset, token, hi, d, in_d, D, H, C, False)
        if before is not None:
            next_h = tl.load(before + (row + earlier) * D + d, mask=in_d, other=0.0)
        # 3. Forwards: the gates of each token, and the decayed state before it.
        gates, decays, strengths, lefts = (), (), (), ()
        begun, added, total = c, tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        for j in tl.static_range(C):
            gate, g_, a_, s_ = _gates(rate, r_tile[j], reset_tile[j])
            gates, decays, strengths, lefts = (
                gates + (gate,),
                decays + (a_,),
                strengths + (s_,),
                lefts + (a_ * h,),
            )
            h = a_ * h + s_ * (tl.sigmoid(i_tile[j].to(tl.float32)) * x_tile[j].to(tl.float32))
            total += g_
        # 4. Backwards, with the gradients of each token.
        for j in tl.static_range(C - 1, -1, -1):
            a_, s_, do_ = decays[j], strengths[j], do_tile[j].to(tl.float32)
            dh = do_ + c
            c = a_ * dh
            added = a_ * (added + do_)
            x_, open_ = x_tile[j].to(tl.float32), tl.sigmoid(i_tile[j].to(tl.float32))
            at, is_token = (first + j) * D + d, in_d & (j < left)
            if dx is not None:
                tl.store(dx + at, (dh * s_ * open_).to(dx.dtype.element_ty), mask=is_token)
            if di is not None:
                di_ = dh * s_ * x_ * (open_ * (1 - open_))
                tl.store(di + at, di_.to(di.dtype.element_ty), mask=is_token)
            if before is not None:
                # A strength of 0 has no gradient.
                of_strength = tl.where(s_ > 0.0, a_ * a_ * (open_ * x_) / tl.where(s_ > 0.0, s_, 1.0), 0.0)
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
