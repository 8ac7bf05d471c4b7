"""Triton kernels of the selective scan: a tile of channels with their states is in registers.

A program is one warp, so no thread waits for another warp. It goes from token to token. The tokens of a tile
are unrolled, so the loads of some overlap with the arithmetic of others. The terms of a step, ``exp(dt_t A)``
and ``dt_t x_t B_t``, are in registers only. The two kernels distribute the states of a tile differently:

- The forward scan sums over the numbers of a state, and never over channels. A thread has a channel with
all its states.
- Gradients are sums over both. A thread has 4 numbers of the states of a few channels, 4 threads have all
of a channel, and 8 threads are side by side along the channels.

Triton distributes a tile so that its loads and stores are fastest. In the gradient kernel, whose tiles are
``[BD, BS]`` like the states in memory, this is the distribution above. The forward scan therefore loads its
states number by number (`_load_states`): for tiles ``[BS, BD]`` without loads of whole tiles, Triton puts all
threads side by side along the last axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    DECAYS_TO_ZERO,
    chunks_of_segment,
    decayed,
    finite,
    is_idle,
    of_channels,
    split_program,
    tile_of_channels,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(tile, P: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """A program's tile of states, group, tile in the group, and channels and states with masks.

    A group has P channels, in tiles of its own.
    """
    state_tile = (tile % tl.cdiv(S, BS)).to(tl.int32)
    tile = (tile // tl.cdiv(S, BS)).to(tl.int32)
    group = tile // tl.cdiv(P, BD)
    tile = tile % tl.cdiv(P, BD)
    p = tile * BD + tl.arange(0, BD)
    s = state_tile * BS + tl.arange(0, BS)
    return state_tile, group, tile, group * P + p, p < P, s, s < S


@triton.jit
def _of_states(BC, j, left, s, in_s, G: tl.constexpr, S: tl.constexpr, BS: tl.constexpr):
    """Numbers `s` of ``BC [tokens, G, 2, S]``, of the token `j` and one group.

    Past the end it loads the last of the `left` tokens: the time step is 0 there, and a load without a mask
    takes fewer instructions.
    """
    at = BC + tl.minimum(j, left - 1) * (2 * G * S) + s
    if S % BS == 0:
        states = tl.load(at)
    else:
        states = tl.load(at, mask=in_s, other=0.0)
    return states


@triton.jit
def _decay(A, dt):
    """``exp(dt A)`` for each channel and state. `LOG2_E` is a factor of each channel, not of each state."""
    return tl.exp2(A * (dt * LOG2_E))


@triton.jit
def _load_states(x, state_tile, d, in_d, S: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """``x [D, S]`` as a tile ``[BS, BD]`` in float32; a thread has all numbers of its channel."""
    states = tl.zeros([BS, BD], tl.float32)
    for i in tl.static_range(BS):
        s = state_tile * BS + i
        row = tl.load(x + d * S + s, mask=in_d & (s < S), other=0.0).to(tl.float32)
        states = tl.where((tl.arange(0, BS) == i)[:, None], row[None, :], states)
    return states


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def selective_scan_kernel(
    x,  # [tokens, D]; backwards dy
    dt,  # [tokens, D]
    A,  # [D, S]
    BC,  # [tokens, G, 2, S], float32: B and C
    initial,  # [SEGMENTS, N, D, S], before each segment
    y,  # [tokens, state tiles, D]
    before,  # [chunks, D, S]: the state before each chunk
    ends,  # [SEGMENTS, N, D, S], after each segment but the last
    sum_dt,  # [SEGMENTS, N, D], the sum of each segment's time steps
    final,  # [N, D, S]
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``h <- exp(dt_t A) * h + dt_t x_t B_t^T``, or ``c <- exp(dt_t A) * (c + dy_t C_t^T)`` with `REVERSE`.

    One program has one segment of one sequence. It starts at zero if `initial` is absent, and stores those of
    `y`, `before`, `ends` and `final` that are given. With `REVERSE` it goes backwards in time, and segment 0
    is the last.

    From tile to tile, `h` is decayed by the whole tile at once, and the contribution of its tokens, `added`,
    is computed separately.
    """
    tile, segment, n = split_program(tl.cdiv(S, BS) * G * tl.cdiv(D // G, BD), SEGMENTS)
    if is_idle(segment, SEGMENTS, ends, y is not None or before is not None):
        return
    state_tile, group, _, d, in_d, s, in_s = _place(tile, D // G, S, BS, BD)
    in_state = in_s[:, None] & in_d[None, :]
    at_end = segment * N + n
    at_state = d[None, :] * S + s[:, None]
    lo, hi, row, chunks, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, CHUNK, REVERSE)
    begin = (begin * (CHUNK // TOKENS)).to(tl.int32)
    stop = tl.minimum(stop * (CHUNK // TOKENS), tl.cdiv(hi - lo, TOKENS)).to(tl.int32)

    # 1. The rates, and the state before the segment.
    A_ = finite(_load_states(A, state_tile, d, in_d, S, BS, BD))
    h = tl.zeros([BS, BD], tl.float32)
    if initial is not None:
        h = _load_states(initial + at_end * D * S, state_tile, d, in_d, S, BS, BD)
    steps = tl.zeros([BD], tl.float32)

    # 2. The operands of tokens are loaded one tile ahead: those of channels into registers, those of states
    # by a pipeline of two stages into shared memory, where every thread reads them.
    next_token = lo + (tl.maximum(stop - 1, 0) if REVERSE else begin) * TOKENS
    next_x = tile_of_channels(x, next_token, hi, d, in_d, D, TOKENS, REVERSE)
    next_dt = tile_of_channels(dt, next_token, hi, d, in_d, D, TOKENS, REVERSE)
    both = s[:, None] + tl.arange(0, 2)[None, :] * S
    for i in tl.range(begin, stop, num_stages=2):
        first = begin + stop - 1 - i if REVERSE else i
        token = lo + first * TOKENS
        left = tl.minimum(hi - token, TOKENS).to(tl.int32)
        next_token = tl.maximum(token - TOKENS, lo) if REVERSE else token + TOKENS
        x_tile, dt_tile = next_x, next_dt
        next_x = tile_of_channels(x, next_token, hi, d, in_d, D, TOKENS, REVERSE)
        next_dt = tile_of_channels(dt, next_token, hi, d, in_d, D, TOKENS, REVERSE)
        if before is not None:
            at_chunk = before + (row + first // (CHUNK // TOKENS)) * D * S + at_state
            tl.store(at_chunk, h, mask=in_state & (first % (CHUNK // TOKENS) == 0))
        # 3. The tokens of a tile, one after the other, and their outputs.
        begun, added = h, tl.zeros([BS, BD], tl.float32)
        total = tl.zeros([BD], tl.float32)
        for step in tl.static_range(TOKENS):
            j = TOKENS - 1 - step if REVERSE else step
            x_, dt_ = x_tile[step].to(tl.float32), dt_tile[step].to(tl.float32)
            at_states = BC + (token * G + group) * (2 * S)
            B_, C_ = tl.split(_of_states(at_states, j, left, both, in_s[:, None], G, S, BS))
            a_ = _decay(A_, dt_[None, :])
            if REVERSE:
                added = a_ * (added + x_[None, :] * C_[:, None])
            else:
                e_ = (dt_ * x_)[None, :] * B_[:, None]
                added = a_ * added + e_
                if y is not None:
                    h = a_ * h + e_
                    y_ = tl.sum(h * C_[:, None], 0).to(y.dtype.element_ty)
                    y_tile = y + (token * tl.cdiv(S, BS) + state_tile) * D
                    tl.store(y_tile + j * tl.cdiv(S, BS) * D + d, y_, mask=in_d & (j < left))
            total += dt_
        # 4. The state after the tile.
        h = decayed(begun, A_ * total[None, :]) + added
        if sum_dt is not None:
            steps += total

    # 5. The results of the segment.
    if sum_dt is not None:
        # All tiles of states store the same number.
        tl.store(sum_dt + at_end * D + d, steps, mask=in_d)
    if ends is not None:
        tl.store(ends + at_end * D * S + at_state, h, mask=in_state)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D * S + at_state, h.to(final.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def selective_scan_gradient_kernel(
    x,  # [tokens, D]
    dt,  # [tokens, D]
    A,  # [D, S]
    BC,  # [tokens, G, 2, S], float32: B and C
    dy,  # [tokens, D]
    before,  # [chunks, D, S]: the state before each chunk; None where no gradient needs states
    d_final,  # [SEGMENTS, N, D, S], after each segment; segment 0 is the last in time
    dx,  # [tokens, state tiles, D]
    ddt,  # [tokens, state tiles, D]
    dA,  # [SEGMENTS, N, D, S]: the sum over the tokens of each segment
    dB,  # [tokens, channel tiles of a group, G, S]
    dC,  # [tokens, channel tiles of a group, G, S]
    d_initial,  # [N, D, S]
    cu_seqlens,
    T,
    N,
    SEGMENTS,
    D: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    """Fills the given gradients, backwards in time, one segment of one sequence per program.

    With ``dh_t = dy_t C_t^T + exp(dt_{t+1} A) * dh_{t+1}``, the gradient of ``dt_t x_t`` is ``dh_t B_t``. The
    scan carries ``c_t = exp(dt_t A) * dh_t``, the gradient of the state before the token, and the gradient of
    ``dt_t A`` is ``c_t * h_{t-1}``. The states of a tile of tokens are computed again, from the state before
    its chunk, and kept in registers.
    """
    tile, segment, n = split_program(tl.cdiv(S, BS) * G * tl.cdiv(D // G, BD), SEGMENTS)
    state_tile, group, channel_tile, d, in_d, s, in_s = _place(tile, D // G, S, BS, BD)
    in_state = in_d[:, None] & in_s[None, :]
    at_end = segment * N + n
    at_state = d[:, None] * S + s[None, :]
    lo, hi, row, chunks, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, CHUNK, True)

    # 1. The rates, and the gradient of the state after the segment.
    A_ = finite(tl.load(A + at_state, mask=in_state, other=0.0).to(tl.float32))  # [BD, BS]
    c = tl.zeros([BD, BS], tl.float32)
    if d_final is not None:
        c += tl.load(d_final + at_end * D * S + at_state, mask=in_state, other=0.0).to(tl.float32)
    dA_ = tl.zeros([BD, BS], tl.float32)
    t = tl.arange(0, TOKENS)

    for i in range(begin, stop):
        chunk = begin + stop - 1 - i
        # As in `selective_scan_kernel`, but for a chunk.
        begun, added = c, tl.zeros([BD, BS], tl.float32)
        total = tl.zeros([BD], tl.float32)
        for k in range(CHUNK // TOKENS):
            tiles_before = CHUNK // TOKENS - 1 - k
            token = lo + chunk * CHUNK + tiles_before * TOKENS
            left = tl.minimum(hi - token, TOKENS).to(tl.int32)
            BC_tile = BC + (token * G + group) * (2 * S)
            # 2. The states of a tile's tokens, once more.
            states = ()  # before each token of the tile, and after the last
            if before is not None:
                h = tl.load(before + (row + chunk) * D * S + at_state, mask=in_state, other=0.0)
                for tile_before in range(tiles_before):
                    earlier = lo + chunk * CHUNK + tile_before * TOKENS
                    left_then = tl.minimum(hi - earlier, TOKENS).to(tl.int32)
                    BC_then = BC + (earlier * G + group) * (2 * S)
                    for j in tl.static_range(TOKENS):
                        x_ = of_channels(x + earlier * D, j, left_then, d, in_d, D).to(tl.float32)
                        dt_ = of_channels(dt + earlier * D, j, left_then, d, in_d, D).to(tl.float32)
                        B_ = _of_states(BC_then, j, left_then, s, in_s, G, S, BS)
                        h = _decay(A_, dt_[:, None]) * h + (dt_ * x_)[:, None] * B_[None, :]
                states = (h,)
                for j in tl.static_range(TOKENS):
                    x_ = of_channels(x + token * D, j, left, d, in_d, D).to(tl.float32)
                    dt_ = of_channels(dt + token * D, j, left, d, in_d, D).to(tl.float32)
                    B_ = _of_states(BC_tile, j, left, s, in_s, G, S, BS)
                    h = _decay(A_, dt_[:, None]) * h + (dt_ * x_)[:, None] * B_[None, :]
                    states += (h,)
            # 3. Backwards from token to token, with the results of all tokens of the tile, to be stored together.
            dx_, ddt_ = tl.zeros([BD, TOKENS], tl.float32), tl.zeros([BD, TOKENS], tl.float32)
            dB_, dC_ = tl.zeros([TOKENS, BS], tl.float32), tl.zeros([TOKENS, BS], tl.float32)
            for j in tl.static_range(TOKENS - 1, -1, -1):
                x_ = of_channels(x + token * D, j, left, d, in_d, D).to(tl.float32)
                dt_ = of_channels(dt + token * D, j, left, d, in_d, D).to(tl.float32)
                dy_ = of_channels(dy + token * D, j, left, d, in_d, D).to(tl.float32)
                B_ = _of_states(BC_tile, j, left, s, in_s, G, S, BS)
                C_ = _of_states(BC_tile + S, j, left, s, in_s, G, S, BS)
                a_ = _decay(A_, dt_[:, None])
                dh = c + dy_[:, None] * C_[None, :]
                c = a_ * dh
                added = a_ * (added + dy_[:, None] * C_[None, :])
                total += dt_

                row_of_token, column_of_token = (t == j)[:, None], (t == j)[None, :]
                if dB is not None:
                    dB_j = tl.sum(dh * (dt_ * x_)[:, None], 0)
                    dB_ = tl.where(row_of_token, dB_j[None, :], dB_)
                if (dx is not None) or (ddt is not None):
                    d_product = tl.sum(dh * B_[None, :], 1)
                    if dx is not None:
                        dx_ = tl.where(column_of_token, (dt_ * d_product)[:, None], dx_)
                if before is not None:
                    if dC is not None:
                        dC_j = tl.sum(states[j + 1] * dy_[:, None], 0)
                        dC_ = tl.where(row_of_token, dC_j[None, :], dC_)
                    d_exponent = c * states[j]
                    if dA is not None:
                        dA_ += d_exponent * dt_[:, None]
                    if ddt is not None:
                        # Rates this low give a time step no gradient, which could overflow at a time step of
                        # 0.
                        d_of_dt = tl.where(A_ < DECAYS_TO_ZERO, 0.0, d_exponent * A_)
                        ddt_j = x_ * d_product + tl.sum(d_of_dt, 1)
                        ddt_ = tl.where(column_of_token, ddt_j[:, None], ddt_)

            # 4. The results of the tile.
            in_channels = in_d[:, None] & (t < left)[None, :]
            at_channels = state_tile * D + t[None, :] * (tl.cdiv(S, BS) * D) + d[:, None]
            at_channels = token * (tl.cdiv(S, BS) * D) + at_channels
            if dx is not None:
                tl.store(dx + at_channels, dx_.to(dx.dtype.element_ty), mask=in_channels)
            if ddt is not None:
                tl.store(ddt + at_channels, ddt_.to(ddt.dtype.element_ty), mask=in_channels)
            in_states = (t < left)[:, None] & in_s[None, :]
            at_sums = (token + t) * (tl.cdiv(D // G, BD) * G) + channel_tile * G + group
            at_sums = at_sums[:, None] * S + s[None, :]
            if dB is not None:
                tl.store(dB + at_sums, dB_, mask=in_states)
            if dC is not None:
                tl.store(dC + at_sums, dC_, mask=in_states)
        c = decayed(begun, A_ * total[:, None]) + added

    # 5. The results of the segment.
    if dA is not None:
        tl.store(dA + at_end * D * S + at_state, dA_, mask=in_state)
    if d_initial is not None:
        if segment == SEGMENTS - 1:
            tl.store(d_initial + n * D * S + at_state, c.to(d_initial.dtype.element_ty), mask=in_state)
