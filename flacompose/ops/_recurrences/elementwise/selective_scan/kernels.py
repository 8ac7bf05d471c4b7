"""Triton kernels of the selective scan: a tile of channels with their states is in registers.

A program is one warp, so no thread waits for another warp. It goes from token to token. The tokens of a tile
are unrolled, so that the work on some overlaps with that on others. There are only a few, because Triton's
time to compile grows with the square of the operations and more. The terms of a step, ``exp(dt_t A)``
and ``dt_t x_t B_t``, are in registers only. The two kernels distribute the states of a tile differently:

- The forward scan sums over the numbers of a state, and never over channels. A thread has a channel with
all its states. What channels and states have for the tokens of a tile is loaded as one tile, of which a thread
has all tokens, and cut into its columns (`_columns`).
- Gradients are sums over both. A thread has 4 numbers of the states of a few channels, 4 threads have all
of a channel, and 8 threads are side by side along the channels.

Triton distributes a tile so that its loads and stores are fastest. In the gradient kernel, whose tiles are
``[BD, BS]`` like the states in memory, this is the distribution above. The forward scan therefore loads its
states number by number (`_load_states`): for tiles ``[BS, BD]`` without loads of whole tiles, Triton puts all
threads side by side along the last axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    DECAYS_TO_ZERO,
    LOG2_E,
    chunks_of_segment,
    decayed,
    expm1_near_0,
    finite,
    is_idle,
    sigmoid,
    split_program,
)


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
def _columns(x, N: tl.constexpr):
    """The N columns of `x`, a power of 2. No numbers move between threads if each has all columns of its rows."""
    if N == 1:
        columns = (tl.reshape(x, [x.shape[0]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], N // 2, 2]))
        of_even, of_odd = _columns(even, N // 2), _columns(odd, N // 2)
        columns = ()
        for i in tl.static_range(N // 2):
            columns += (of_even[i], of_odd[i])
    return columns


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


class Given(NamedTuple):
    dt: Any  # [tokens, D]: time steps before bias and softplus, or after them
    bias: Any  # [D]
    skip: Any  # [D]
    z: Any  # [tokens, D]


class Results(NamedTuple):
    y: Any  # [tokens, state tiles, D]
    before: Any  # [chunks, D, S]: the state before each chunk
    ends: Any  # [SEGMENTS, N, D, S], after each segment but the last
    sum_dt: Any  # [SEGMENTS, N, D], the sum of each segment's time steps
    final: Any  # [N, D, S]


@triton.jit
def _softplus(x):
    """``log(1 + e^x)``, precise also where it is small, without the many instructions of a precise logarithm.

    With ``e = e^-|x|`` and ``z = e / (2 + e)``, at most 1/3, ``log(1 + e)`` is the series ``2 (z + z^3 / 3 + ...)``.
    """
    e = tl.exp2(tl.abs(x) * -LOG2_E)
    root = tl.rsqrt(2 + e)
    z = e * (root * root)
    w = z * z
    series = 1 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11)))))
    return tl.maximum(x, 0.0) + 2 * z * series


@triton.jit
def _step(dt, bias, exists, SOFTPLUS: tl.constexpr):
    """A token's time steps, after their bias and softplus, 0 where there is no token."""
    dt = dt.to(tl.float32)
    if bias is not None:
        dt += bias
    if SOFTPLUS:
        dt = _softplus(dt)
    if SOFTPLUS or (bias is not None):
        dt = tl.where(exists, dt, 0.0)
    return dt


@triton.jit
def _load(x, dt, z, at, exists):
    z_ = 0
    if z is not None:
        z_ = tl.load(z + at, mask=exists, other=0.0)
    return tl.load(x + at, mask=exists, other=0.0), tl.load(dt + at, mask=exists, other=0.0), z_


@triton.jit
def _tile(x, dt, z, token, hi, t, d, in_d, D: tl.constexpr):
    """`x`, `dt` and, if it is given, `z` of the tokens of a tile, ``[BD, TOKENS]``, and which of them exist.

    The compiler is told that pairs of channels are side by side, so threads lie along the channels, and that no place
    is aligned, so each loads one channel.
    """
    exists = in_d[:, None] & (t < hi - token)[None, :]
    at = token * D + d[:, None] + (t * D)[None, :]
    at = tl.multiple_of(tl.max_contiguous(at, [2, 1]), [1, 1])
    x_, dt_, z_ = _load(x, dt, z, at, exists)
    return x_, dt_, z_, exists


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def selective_scan_kernel(
    x,  # [tokens, D]; backwards the gradient of the output
    A,  # [D, S]
    BC,  # [tokens, G, 2, S], float32: B and C
    given,  # `Given`
    initial,  # [SEGMENTS, N, D, S], before each segment
    results,  # `Results`
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
    SOFTPLUS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``h <- exp(dt_t A) * h + dt_t x_t B_t^T``, or ``c <- exp(dt_t A) * (c + dy_t C_t^T)`` with `REVERSE`.

    One program has one segment of one sequence. It starts at zero if `initial` is absent, and stores those of
    `results` that are given. With `REVERSE` it goes backwards in time, and segment 0 is the last.

    From chunk to chunk, `h` is decayed by the whole chunk at once, and the contribution of its tokens, `added`,
    is computed separately.
    """
    dt, bias, skip, z = given
    y, before, ends, sum_dt, final = results
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
    if bias is not None:
        bias = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)[:, None]
    if skip is not None:
        skip_ = tl.load(skip + d, mask=in_d, other=0.0).to(tl.float32)
    all_steps = tl.zeros([BD], tl.float32)
    begun, added, total = h, tl.zeros([BS, BD], tl.float32), tl.zeros([BD], tl.float32)

    # 2. The operands of tokens are loaded one tile ahead: those of channels into registers, those of states
    # by a pipeline of three stages into shared memory, where every thread reads them. Without outputs only one
    # of B and C is read, else columns have both in turn.
    KINDS: tl.constexpr = 1 if y is None else 2
    t, column = tl.arange(0, TOKENS), tl.arange(0, KINDS * TOKENS)
    of_state = s[:, None] + (column % KINDS * S)[None, :] + (S if REVERSE else 0)
    column = (column // KINDS)[None, :]
    if REVERSE:
        t, column = TOKENS - 1 - t, TOKENS - 1 - column
    token = lo + (tl.maximum(stop - 1, 0) if REVERSE else begin) * TOKENS
    following = _tile(x, dt, z, token, hi, t, d, in_d, D)
    for i in tl.range(begin, stop, num_stages=3):
        first = begin + stop - 1 - i if REVERSE else i
        token = lo + first * TOKENS
        left = tl.minimum(hi - token, TOKENS).to(tl.int32)
        next_token = tl.maximum(token - TOKENS, lo) if REVERSE else token + TOKENS
        x_, dt_, z_, exists = following
        following = _tile(x, dt, z, next_token, hi, t, d, in_d, D)
        # 3. The state before a chunk.
        if (i - begin) % (CHUNK // TOKENS) == 0:
            h = decayed(begun, A_ * total[None, :]) + added
            begun, added = h, tl.zeros([BS, BD], tl.float32)
            all_steps += total
            total = tl.zeros([BD], tl.float32)
            if before is not None:
                tl.store(before + (row + first // (CHUNK // TOKENS)) * D * S + at_state, h, mask=in_state)
        # 4. The tokens of a tile, one after the other, and their outputs.
        x_, dt_ = x_.to(tl.float32), _step(dt_, bias, exists, SOFTPLUS)
        if z is not None:
            gate = z_.to(tl.float32) * sigmoid(z_)
            gates = _columns(gate, TOKENS)
            if REVERSE:
                x_ *= gate
        total += tl.sum(dt_, 1)
        xs, steps_, writes = _columns(x_, TOKENS), _columns(dt_, TOKENS), _columns(dt_ * x_, TOKENS)
        BC_tile = BC + (token * G + group) * (2 * S)
        states = _of_states(BC_tile, column, left, of_state, in_s[:, None], G, S, BS)
        states = _columns(states, KINDS * TOKENS)
        for j in tl.static_range(TOKENS):
            a_ = _decay(A_, steps_[j][None, :])
            if REVERSE:
                added = a_ * (added + xs[j][None, :] * states[j][:, None])
            else:
                e_ = writes[j][None, :] * states[KINDS * j][:, None]
                added = a_ * added + e_
                if y is not None:
                    h = a_ * h + e_
                    y_ = tl.sum(h * states[2 * j + 1][:, None], 0)
                    if skip is not None:
                        y_ += skip_ * xs[j]
                    if z is not None:
                        y_ *= gates[j]
                    at_y = (token + j) * (tl.cdiv(S, BS) * D) + state_tile * D + d
                    tl.store(y + at_y, y_.to(y.dtype.element_ty), mask=in_d & (j < left))

    # 5. The results of the segment.
    h = decayed(begun, A_ * total[None, :]) + added
    if sum_dt is not None:
        # All tiles of states store the same number.
        tl.store(sum_dt + at_end * D + d, all_steps + total, mask=in_d)
    if ends is not None:
        tl.store(ends + at_end * D * S + at_state, h, mask=in_state)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D * S + at_state, h.to(final.dtype.element_ty), mask=in_state)


class Found(NamedTuple):
    dx: Any  # [tokens, state tiles, D]
    ddt: Any  # [tokens, state tiles, D]
    dA: Any  # [SEGMENTS, N, D, S]: the sum over the tokens of each segment
    dB: Any  # [tokens, channel tiles of a group, G, S]
    dC: Any  # [tokens, channel tiles of a group, G, S]
    dz: Any  # [tokens, D]
    d_skip: Any  # [SEGMENTS, N, D], sums over the tokens of each segment
    d_bias: Any  # [SEGMENTS, N, state tiles, D], likewise
    d_initial: Any  # [N, D, S]


@triton.jit
def _chunk(x, dt, do, z, first, hi, t, d, in_d, D: tl.constexpr):
    """`x`, `dt`, `do` and, if it is given, `z` of a chunk."""
    exists = (t < hi - first)[:, None] & in_d[None, :]
    at = tl.max_contiguous((first + t)[:, None] * D + d[None, :], [1, 4])
    x_, dt_, z_ = _load(x, dt, z, at, exists)
    return x_, dt_, tl.load(do + at, mask=exists, other=0.0), z_


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def selective_scan_gradient_kernel(
    x,  # [tokens, D]
    A,  # [D, S]
    BC,  # [tokens, G, 2, S], float32: B and C
    given,  # `Given`; several tiles of states have no `z`
    do,  # [tokens, D]
    before,  # [chunks, D, S]: the state before each chunk; None where no gradient needs states
    d_final,  # [SEGMENTS, N, D, S], after each segment; segment 0 is the last in time
    gradients,  # `Found`
    scratch,  # [programs, 3, CHUNK, BD], float32: `x`, time steps and `dy` of a chunk
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
    SOFTPLUS: tl.constexpr,
):
    """Fills the given gradients, backwards in time, one segment of one sequence per program.

    With ``dh_t = dy_t C_t^T + exp(dt_{t+1} A) * dh_{t+1}``, the gradient of ``dt_t x_t`` is ``dh_t B_t``. The
    scan carries ``c_t = exp(dt_t A) * dh_t``, the gradient of the state before the token, and the gradient of
    ``dt_t A`` is ``c_t * h_{t-1}``. The states of a tile of tokens are computed again, from the state before
    its chunk, and kept in registers.

    What tokens have for each channel is loaded for a chunk at once. It comes back token by token from `scratch`,
    which is so small that it stays in the cache.
    """
    dt, bias, skip, z = given
    dx, ddt, dA, dB, dC, dz, d_skip, d_bias, d_initial = gradients
    tile, segment, n = split_program(tl.cdiv(S, BS) * G * tl.cdiv(D // G, BD), SEGMENTS)
    state_tile, group, channel_tile, d, in_d, s, in_s = _place(tile, D // G, S, BS, BD)
    in_state = in_d[:, None] & in_s[None, :]
    at_end = segment * N + n
    at_state = d[:, None] * S + s[None, :]
    lo, hi, row, chunks, begin, stop = chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, CHUNK, True)

    # 1. The rates, and the gradient of the state after the segment.
    A_ = finite(tl.load(A + at_state, mask=in_state, other=0.0).to(tl.float32))  # [BD, BS]
    # Rates this low give a time step no gradient, which could overflow at a time step of 0.
    A_of_dt = tl.where(A_ < DECAYS_TO_ZERO, 0.0, A_)
    c = tl.zeros([BD, BS], tl.float32)
    if d_final is not None:
        c += tl.load(d_final + at_end * D * S + at_state, mask=in_state, other=0.0).to(tl.float32)
    # Only one of several tiles of states has the skip.
    skip_ = tl.zeros([BD], tl.float32)
    if skip is not None:
        skip_ += tl.load(skip + d, mask=in_d & (state_tile == 0), other=0.0).to(tl.float32)
    if bias is not None:
        bias = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    dA_ = tl.zeros([BD, BS], tl.float32)
    d_skip_, d_bias_ = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    t, t_chunk, p = tl.arange(0, TOKENS), tl.arange(0, CHUNK), tl.arange(0, BD)
    of_x = scratch + tl.program_id(0).to(tl.int64) * (3 * CHUNK * BD) + p
    of_dt, of_dy = of_x + CHUNK * BD, of_x + 2 * CHUNK * BD

    following = _chunk(x, dt, do, z, lo + tl.maximum(stop - 1, 0) * CHUNK, hi, t_chunk, d, in_d, D)
    for i in range(begin, stop):
        # 2. The operands of a chunk, which are loaded one chunk ahead.
        chunk = begin + stop - 1 - i
        first = lo + chunk * CHUNK
        exists = (t_chunk < hi - first)[:, None] & in_d[None, :]
        all_x, all_dt, all_dy, all_z = following
        following = _chunk(x, dt, do, z, lo + tl.maximum(chunk - 1, 0) * CHUNK, hi, t_chunk, d, in_d, D)
        all_x = all_x.to(tl.float32)
        all_dt = _step(all_dt, bias, exists, SOFTPLUS)
        all_dy = all_dy.to(tl.float32)
        if z is not None:
            all_z = all_z.to(tl.float32)
            all_dy *= all_z * sigmoid(all_z)
        tl.debug_barrier()  # every thread has read the chunk before
        tl.store(of_x[None, :] + t_chunk[:, None] * BD, all_x)
        tl.store(of_dt[None, :] + t_chunk[:, None] * BD, all_dt)
        tl.store(of_dy[None, :] + t_chunk[:, None] * BD, all_dy)
        tl.debug_barrier()
        total = tl.sum(all_dt, 0)
        if d_skip is not None:
            d_skip_ += tl.sum(all_dy * all_x, 0)
        # As in `selective_scan_kernel`.
        begun, added = c, tl.zeros([BD, BS], tl.float32)
        for k in range(CHUNK // TOKENS):
            tiles_before = CHUNK // TOKENS - 1 - k
            token = first + tiles_before * TOKENS
            left = tl.minimum(hi - token, TOKENS).to(tl.int32)
            BC_tile = BC + (token * G + group) * (2 * S)
            # 3. The states of a tile's tokens, once more: before each, and after the last.
            states = ()
            if before is not None:
                h = tl.load(before + (row + chunk) * D * S + at_state, mask=in_state, other=0.0)
                for _ in tl.static_range(TOKENS + 1):
                    states += (h,)
                for tile_before in range(tiles_before + 1):
                    earlier = first + tile_before * TOKENS
                    left_then = tl.minimum(hi - earlier, TOKENS).to(tl.int32)
                    BC_then = BC + (earlier * G + group) * (2 * S)
                    h = states[TOKENS]
                    states = (h,)
                    for j in tl.static_range(TOKENS):
                        at_token = (tile_before * TOKENS + j) * BD
                        x_, dt_ = tl.load(of_x + at_token), tl.load(of_dt + at_token)
                        B_ = _of_states(BC_then, j, left_then, s, in_s, G, S, BS)
                        h = _decay(A_, dt_[:, None]) * h + (dt_ * x_)[:, None] * B_[None, :]
                        states += (h,)
            # 4. Backwards from token to token, with the results of all tokens of the tile, to be stored together.
            dx_, ddt_ = tl.zeros([BD, TOKENS], tl.float32), tl.zeros([BD, TOKENS], tl.float32)
            dB_, dC_ = tl.zeros([TOKENS, BS], tl.float32), tl.zeros([TOKENS, BS], tl.float32)
            y_ = tl.zeros([BD, TOKENS], tl.float32)
            for j in tl.static_range(TOKENS - 1, -1, -1):
                at_token = (tiles_before * TOKENS + j) * BD
                x_, dt_, dy_ = tl.load(of_x + at_token), tl.load(of_dt + at_token), tl.load(of_dy + at_token)
                B_ = _of_states(BC_tile, j, left, s, in_s, G, S, BS)
                C_ = _of_states(BC_tile + S, j, left, s, in_s, G, S, BS)
                a_ = _decay(A_, dt_[:, None])
                dh = c + dy_[:, None] * C_[None, :]
                c = a_ * dh
                added = a_ * (added + dy_[:, None] * C_[None, :])

                row_of_token, column_of_token = (t == j)[:, None], (t == j)[None, :]
                if dB is not None:
                    dB_j = tl.sum(dh * (dt_ * x_)[:, None], 0)
                    dB_ = tl.where(row_of_token, dB_j[None, :], dB_)
                if (dx is not None) or (ddt is not None) or (d_bias is not None):
                    d_product = tl.sum(dh * B_[None, :], 1)
                    if dx is not None:
                        dx_ = tl.where(column_of_token, (dt_ * d_product + skip_ * dy_)[:, None], dx_)
                if before is not None:
                    if dC is not None:
                        dC_j = tl.sum(states[j + 1] * dy_[:, None], 0)
                        dC_ = tl.where(row_of_token, dC_j[None, :], dC_)
                    if dz is not None:
                        y_j = tl.sum(states[j + 1] * C_[None, :], 1) + skip_ * x_
                        y_ = tl.where(column_of_token, y_j[:, None], y_)
                    d_exponent = c * states[j]
                    if dA is not None:
                        dA_ += d_exponent * dt_[:, None]
                    if (ddt is not None) or (d_bias is not None):
                        ddt_j = x_ * d_product + tl.sum(d_exponent * A_of_dt, 1)
                        ddt_ = tl.where(column_of_token, ddt_j[:, None], ddt_)

            # 5. The results of the tile.
            in_channels = in_d[:, None] & (t < left)[None, :]
            at_sums = (
                token * (tl.cdiv(S, BS) * D) + state_tile * D + t[None, :] * (tl.cdiv(S, BS) * D) + d[:, None]
            )
            if dx is not None:
                tl.store(dx + at_sums, dx_.to(dx.dtype.element_ty), mask=in_channels)
            if (ddt is not None) or (d_bias is not None):
                if SOFTPLUS:
                    # Its derivative is ``1 - exp(-softplus)``.
                    delta = tl.load(of_dt[:, None] + (tiles_before * TOKENS + t)[None, :] * BD)
                    ddt_ *= tl.where(delta < 0.1, -expm1_near_0(-delta), 1 - tl.exp2(delta * -LOG2_E))
                if ddt is not None:
                    tl.store(ddt + at_sums, ddt_.to(ddt.dtype.element_ty), mask=in_channels)
                if d_bias is not None:
                    d_bias_ += tl.sum(tl.where(in_channels, ddt_, 0.0), 1)
            if dz is not None:
                at_tokens = token * D + t[None, :] * D + d[:, None]
                do_ = tl.load(do + at_tokens, mask=in_channels, other=0.0).to(tl.float32)
                z_ = tl.load(z + at_tokens, mask=in_channels, other=0.0).to(tl.float32)
                open_ = sigmoid(z_)
                dz_ = do_ * y_ * open_ * (1 + z_ * (1 - open_))
                tl.store(dz + at_tokens, dz_.to(dz.dtype.element_ty), mask=in_channels)
            in_states = (t < left)[:, None] & in_s[None, :]
            at_sums = (token + t) * (tl.cdiv(D // G, BD) * G) + channel_tile * G + group
            at_sums = at_sums[:, None] * S + s[None, :]
            if dB is not None:
                tl.store(dB + at_sums, dB_, mask=in_states)
            if dC is not None:
                tl.store(dC + at_sums, dC_, mask=in_states)
        c = decayed(begun, A_ * total[:, None]) + added

    # 6. The results of the segment.
    if dA is not None:
        tl.store(dA + at_end * D * S + at_state, dA_, mask=in_state)
    at_channels = (at_end * tl.cdiv(S, BS) + state_tile) * D + d
    if d_skip is not None:
        # All tiles of states have the same sum.
        tl.store(d_skip + at_end * D + d, d_skip_, mask=in_d)
    if d_bias is not None:
        tl.store(d_bias + at_channels, d_bias_, mask=in_d)
    if d_initial is not None:
        if segment == SEGMENTS - 1:
            tl.store(d_initial + n * D * S + at_state, c.to(d_initial.dtype.element_ty), mask=in_state)
