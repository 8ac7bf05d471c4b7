"""Triton kernels of ``h_t = a_t h_{t-1} + e_t``: of the elementwise scan and of the RG-LRU, which gates it.

    scan      a_t = exp(g_t)                                      e_t = x_t
    RG-LRU    a_t = exp(-8 softplus(a_param) sigmoid(r_t))        e_t = s_t sigmoid(i_t) x_t, s_t = sqrt(1 - a_t^2)

A call with `r` is one of the RG-LRU. Decays and inputs are made of the gates in registers, where the state is
too. A program is one warp and goes from tile to tile. A thread has one channel and all tokens of a tile, so
that `tl.associative_scan` crosses no threads and goes from token to token. The next tile is loaded meanwhile.

From tile to tile the state is decayed by the whole tile at once, and what its tokens add is computed separately:
where decays are near 1, the rounding errors of single steps would add up over many tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    LOG2_E,
    clamp_gate,
    decayed,
    expm1_near_0,
    find_segment,
    find_sequence,
    finite,
    is_idle,
    sigmoid,
    softplus,
    split_program,
    state_number,
)

SMALLEST = tl.constexpr(1.2e-38)  # below it `rsqrt` takes a number for 0
UNIT = tl.constexpr(32)  # segments have a multiple of this many tokens, whatever the tile


@triton.jit
def _join(decay, state, added, a, e, next_decay, next_state, next_added, next_a, next_e):
    """Joins two spans of ``h <- a * h + e``: their decay and states before the last step, and that step."""
    decay *= a
    state = (state * a + e) * next_decay + next_state
    return decay * next_decay, state, (added * a + e) * next_decay + next_added, next_a, next_e


@triton.jit
def _before(h, a, e):
    """The state before each step of ``h <- a * h + e`` along the first axis, and the last state if started at 0.

    Adding -0.0 changes no number, so the compiler leaves it out.
    """
    C: tl.constexpr = a.shape[0]
    t = tl.arange(0, C)[:, None]
    none = tl.zeros_like(a) * -1.0
    steps = tl.full(a.shape, 1.0, tl.float32), tl.where(t == 0, h[None, :], none), none, a, e
    _, before, added, _, _ = tl.associative_scan(steps, 0, _join)
    return before, tl.sum(tl.where(t == C - 1, added * a + e, none), 0)


@triton.jit
def _places(first, hi, t, d, in_d, D: tl.constexpr, BD: tl.constexpr):
    """Where a tile is in ``[tokens, D]``, as offsets of its channels and of its tokens, and which of it exists."""
    exists = (t < (hi - first).to(tl.int32))[:, None]
    if D % BD != 0:
        exists &= in_d[None, :]
    return (first * D + d)[None, :], (t * D)[:, None], exists


@triton.jit
def _load(x, places, other: tl.constexpr = 0.0):
    channels, tokens, exists = places
    return tl.load(x + channels + tokens, mask=exists, other=other)


@triton.jit
def _store(x, places, value):
    channels, tokens, exists = places
    tl.store(x + channels + tokens, value.to(x.dtype.element_ty), mask=exists)


@triton.jit
def _tile(x, g, r, i, reset, first, hi, t, d, in_d, D: tl.constexpr, H: tl.constexpr, BD: tl.constexpr):
    """`x`, `g` or `r`, `i` and `reset` of a tile, 0 where they are absent. Without a token, gates keep the state."""
    places = _places(first, hi, t, d, in_d, D, BD)
    i_, resets = 0, 0
    if r is None:
        gate = _load(g, places)
    else:
        gate = _load(r, places, float("-inf"))
    if i is not None:
        i_ = _load(i, places)
    if reset is not None:
        groups = (first * H + d // (D // H))[None, :], (t * H)[:, None], places[2]
        resets = _load(reset, groups, 0)
    return _load(x, places), gate, i_, resets


@triton.jit
def _decays(gate, rate, resets, RESETS: tl.constexpr):
    """The log decays of a tile, the decays, and in the RG-LRU the open recurrence gates and the strengths."""
    if rate is None:
        g = gate.to(tl.float32)
        a, opened, strength = tl.exp2(g * LOG2_E), 1.0, 1.0
    else:
        opened = sigmoid(gate)
        g = clamp_gate(rate[None, :] * opened)
        a = tl.exp2(g * LOG2_E)
        strength = tl.sqrt(tl.where(g > -0.05, -expm1_near_0(2 * g), 1 - a * a))
        if RESETS:
            resets = resets != 0
            g = tl.where(resets, float("-inf"), g)
            a = tl.where(resets, 0.0, a)
            strength = tl.where(resets, 1.0, strength)
    return g, a, opened, strength


@triton.jit
def _bounds(n, segment, SEGMENTS, T, cu_seqlens, C: tl.constexpr, REVERSE: tl.constexpr):
    """A sequence's first token, its end, the row of its first tile, and a segment's tiles, `begin` to `stop`."""
    lo, hi, row = find_sequence(n, T, cu_seqlens, C)
    segment = SEGMENTS - 1 - segment if REVERSE else segment
    begin, stop = find_segment(segment, SEGMENTS, tl.cdiv(hi - lo, UNIT))
    return lo, hi, row, begin * (UNIT // C), tl.minimum(stop * (UNIT // C), tl.cdiv(hi - lo, C))


@triton.jit
def _channels(tile, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """The channels of a tile, and which of them exist.

    In tiles of several tokens a thread has one channel: the compiler is told that two are side by side, so threads
    lie along the channels, and that no place is aligned, so it loads one at a time.
    """
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    if C > 1:
        d = tl.multiple_of(tl.max_contiguous(d, 2), 1)
    return d, in_d


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
    before,  # [tiles, D]: the state before each tile
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
    d, in_d = _channels(tile, D, C, BD)
    at_end = (segment * N + n) * D + d
    lo, hi, row, begin, stop = _bounds(n, segment, SEGMENTS, T, cu_seqlens, C, REVERSE)

    # 1. The rates, and the state before the segment.
    rate = None
    if a_param is not None:
        rate = finite(-8 * softplus(tl.load(a_param + d, mask=in_d, other=0.0).to(tl.float32)))
    h = tl.zeros([BD], tl.float32)
    if initial is not None:
        h += tl.load(initial + at_end, mask=in_d, other=0.0).to(tl.float32)
    gates = tl.zeros([BD], tl.float32)

    # 2. The tokens of the first tile; in time they go backwards with `REVERSE`.
    t = C - 1 - tl.arange(0, C) if REVERSE else tl.arange(0, C)
    first = lo + (tl.maximum(stop - 1, 0) if REVERSE else begin) * C
    following = _tile(x, g, r, i, reset, first, hi, t, d, in_d, D, H, BD)
    for k in range(begin, stop):
        chunk = begin + stop - 1 - k if REVERSE else k
        first = lo + chunk * C
        x_, gate, i_, resets = following
        after = tl.maximum(first - C, lo) if REVERSE else first + C
        following = _tile(x, g, r, i, reset, after, hi, t, d, in_d, D, H, BD)
        g_, a_, _opened, strength = _decays(gate, rate, resets, reset is not None)
        x_ = x_.to(tl.float32)
        if REVERSE:
            x_ *= a_
        elif i is not None:
            x_ *= strength * sigmoid(i_)
        # 3. The states, from the one before the tile.
        if before is not None:
            tl.store(before + (row + chunk) * D + d, h, mask=in_d)
        states, added = _before(h, a_, x_)
        if o is not None:
            _store(o, _places(first, hi, t, d, in_d, D, BD), a_ * states + x_)
        # 4. The state after the tile.
        total = tl.sum(g_, 0)
        h = decayed(h, total) + added
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
    before,  # [tiles, D]: the state before each tile; None where no gradient needs states
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
    of a tile are computed again, from the state before it.
    """
    tile, segment, n = split_program(tl.cdiv(D, BD), SEGMENTS)
    d, in_d = _channels(tile, D, C, BD)
    at_end = (segment * N + n) * D + d
    lo, hi, row, begin, stop = _bounds(n, segment, SEGMENTS, T, cu_seqlens, C, True)

    # 1. The rates, and the gradient of the state after the segment.
    rate = None
    if a_param is not None:
        of_rate = tl.load(a_param + d, mask=in_d, other=0.0).to(tl.float32)
        rate = finite(-8 * softplus(of_rate))
    d_rate = tl.zeros([BD], tl.float32)
    c = tl.zeros([BD], tl.float32)
    if d_final is not None:
        c += tl.load(d_final + at_end, mask=in_d, other=0.0).to(tl.float32)

    # 2. The tokens of the last tile, and the state before it.
    t = tl.arange(0, C)
    last = tl.maximum(stop - 1, 0)
    following = _tile(x, g, r, i, reset, lo + last * C, hi, t, d, in_d, D, H, BD)
    next_do = _load(do, _places(lo + last * C, hi, t, d, in_d, D, BD))
    next_h = tl.zeros([BD], tl.float32)
    if before is not None:
        next_h = tl.load(before + (row + last) * D + d, mask=in_d & (begin < stop), other=0.0)
    for k in range(begin, stop):
        chunk = begin + stop - 1 - k
        first = lo + chunk * C
        places = _places(first, hi, t, d, in_d, D, BD)
        x_, gate, i_, resets = following
        do_, h = next_do.to(tl.float32), next_h
        earlier = tl.maximum(chunk - 1, 0)
        following = _tile(x, g, r, i, reset, lo + earlier * C, hi, t, d, in_d, D, H, BD)
        next_do = _load(do, _places(lo + earlier * C, hi, t, d, in_d, D, BD))
        if before is not None:
            next_h = tl.load(before + (row + earlier) * D + d, mask=in_d, other=0.0)
        g_, a_, opened, strength = _decays(gate, rate, resets, reset is not None)
        # 3. The gradients of the states after each token, but for those of the token's own output.
        after, added = _before(c, tl.flip(a_, 0), tl.flip(a_ * do_, 0))
        dh = do_ + tl.flip(after, 0)
        c = decayed(c, tl.sum(g_, 0)) + added
        # 4. The gradients of the inputs, and of their gates.
        e_ = x_.to(tl.float32)
        if i is None:
            if dx is not None:
                _store(dx, places, dh)
        else:
            open_ = sigmoid(i_)
            dx_, u_ = dh * strength * open_, open_ * e_
            if dx is not None:
                _store(dx, places, dx_)
            if di is not None:
                _store(di, places, dx_ * e_ * (1 - open_))
            e_ = strength * u_
        # 5. The gradients of the decays.
        if before is not None:
            states, _ = _before(h, a_, e_)
            of_decay = a_ * states
            if dg is not None:
                _store(dg, places, dh * of_decay)
            if i is not None:
                # A strength of 0 has no gradient.
                by_strength = tl.rsqrt(tl.maximum(strength * strength, SMALLEST))
                dg_ = dh * (of_decay - tl.where(strength > 0.0, a_ * a_ * u_ * by_strength, 0.0))
                d_rate += tl.sum(dg_ * opened, 0)
                if dr is not None:
                    # In this order, because a rate may be the largest float32 number.
                    dr_ = dg_ * (rate[None, :] * (opened * (1 - opened)))
                    _store(dr, places, dr_)

    # 6. The results of the segment.
    if d_a_param is not None:
        tl.store(d_a_param + at_end, d_rate * (-8 * tl.sigmoid(of_rate)), mask=in_d)
    if d_initial is not None:
        if segment == SEGMENTS - 1:
            tl.store(d_initial + n * D + d, c.to(d_initial.dtype.element_ty), mask=in_d)
