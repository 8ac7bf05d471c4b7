"""Triton kernels for the selective scan: sweeps over a sequence, a tile of channels with their states in registers.

The axes of a tile are TOKENS, BS numbers of the states and BD channels, in this order: then threads lie side by side
along the channels and warps along the states, and each thread has all tokens of its channel and composes their steps
alone. What a step is made of, ``exp(dt_t A)`` and ``dt_t x_t B_t``, is in registers only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import decayed, find_segment, find_sequence, split_program


@triton.jit
def _compose(a, e, next_a, next_e):
    """The step ``h <- a * h + e``, then another."""
    return a * next_a, e * next_a + next_e


@triton.jit
def _join(decay, state, a, e, next_decay, next_state, next_a, next_e):
    """Steps, then others: the decay and the state before the last step, and that step."""
    return decay * a * next_decay, (state * a + e) * next_decay + next_state, next_a, next_e


@triton.jit
def _before(a, e, REVERSE: tl.constexpr):
    """The decay and the state before each step of ``h <- a * h + e`` along the first axis, begun at 0.

    With `REVERSE` along it backwards. To flip an axis that a thread has alone takes no instruction, where a scan that
    is told to go backwards would exchange everything between threads.
    """
    if REVERSE:
        a, e = tl.flip(a, 0), tl.flip(e, 0)
    steps = tl.full(a.shape, 1.0, tl.float32), tl.zeros_like(e), a, e
    decay, state, _, _ = tl.associative_scan(steps, 0, _join)
    if REVERSE:
        decay, state = tl.flip(decay, 0), tl.flip(state, 0)
    return decay, state


@triton.jit
def _channels(tile, P: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """Of a program: its tile of the states, its group, its tile in the group, and the channels and states in it.

    A group has P channels, in tiles of its own.
    """
    state_tile = tile % tl.cdiv(S, BS)
    tile = (tile // tl.cdiv(S, BS)).to(tl.int32)
    group = tile // tl.cdiv(P, BD)
    tile = tile % tl.cdiv(P, BD)
    p = tile * BD + tl.arange(0, BD)
    s = (state_tile * BS).to(tl.int32) + tl.arange(0, BS)
    return state_tile, group, tile, group * P + p, p < P, s, s < S


@triton.jit
def _load_channels(x, token, in_token, d, in_d, D):
    """``x [tokens, D]`` of some tokens and channels, in float32 and 0 where there is none."""
    at = x + token[:, None] * D + d[None, :]
    return tl.load(at, mask=in_token[:, None] & in_d[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_states(x, token, in_token, group, s, in_s, G, S):
    """``x [tokens, G, S]`` of some tokens and one group, likewise."""
    at = x + (token * G + group)[:, None] * S + s[None, :]
    return tl.load(at, mask=in_token[:, None] & in_s[None, :], other=0.0).to(tl.float32)


@triton.jit
def _start(initial, segment_state, segment_dt, A, segment, n, N, d, s, in_state, D, S):
    """The state before a segment: the initial one, taken on by the segments before."""
    at = d[None, :] * S + s[:, None]
    h = tl.zeros(A.shape, tl.float32)
    if initial is not None:
        h += tl.load(initial + n * D * S + at, mask=in_state, other=0.0).to(tl.float32)
    if segment_state is not None:
        for i in range(segment):
            row = i * N + n
            dt = tl.load(segment_dt + row * D + d, mask=d < D, other=0.0)
            h = decayed(h, A * dt[None, :])
            h += tl.load(segment_state + row * D * S + at, mask=in_state, other=0.0)
    return h


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def sweep_kernel(
    x,  # [tokens, D]; backwards dy
    dt,  # [tokens, D]
    A,  # [D, S]
    B,  # [tokens, G, S]; None backwards
    C,  # [tokens, G, S]; None where no output is read
    initial,  # [N, D, S]
    segment_state,  # [SEGMENTS, N, D, S]: each segment's end, begun at 0
    segment_dt,  # [SEGMENTS, N, D]: its summed time steps
    y,  # [tokens, state tiles, D]
    before,  # [chunks, D, S]: the state before each chunk
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
    STAGES: tl.constexpr,
    ENDS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``h <- exp(dt_t A) * h + dt_t x_t B_t^T``, or with `REVERSE`, backwards, ``c <- exp(dt_t A) * (c + dy_t C_t^T)``.

    One program sweeps one segment of one sequence. With `ENDS` it begins at zero and stores the state at the segment's
    end. Otherwise it begins at the true state, computed from those ends, and stores what is given of `y`, `before` and
    `final`. Backwards, segment 0 is the last in time.
    """
    tile, segment, n = split_program(tl.cdiv(S, BS) * G * tl.cdiv(D // G, BD), SEGMENTS)
    if ENDS:
        if segment == SEGMENTS - 1:
            return
    state_tile, group, _, d, in_d, s, in_s = _channels(tile, D // G, S, BS, BD)
    in_state = in_s[:, None] & in_d[None, :]
    at_state = d[None, :] * S + s[:, None]
    lo, hi, row = find_sequence(n, T, cu_seqlens, CHUNK)
    part = SEGMENTS - 1 - segment if REVERSE else segment
    begin, stop = find_segment(part, SEGMENTS, tl.cdiv(hi - lo, CHUNK))
    begin *= CHUNK // TOKENS
    stop = tl.minimum(stop * (CHUNK // TOKENS), tl.cdiv(hi - lo, TOKENS))

    A_ = tl.load(A + at_state, mask=in_state, other=0.0).to(tl.float32)  # [BS, BD]
    if ENDS:
        h = tl.zeros([BS, BD], tl.float32)
    else:
        h = _start(initial, segment_state, segment_dt, A_, segment, n, N, d, s, in_state, D, S)
    sum_dt = tl.zeros([BD], tl.float32)

    step = tl.arange(0, TOKENS)
    t = TOKENS - 1 - step if REVERSE else step
    # With stages of its own: those of a launch are for loads that feed products.
    for i in tl.range(begin, stop, num_stages=STAGES):
        first = begin + stop - 1 - i if REVERSE else i
        token = lo + first * TOKENS + t
        in_token = token < hi
        dt_ = _load_channels(dt, token, in_token, d, in_d, D)
        x_ = _load_channels(x, token, in_token, d, in_d, D)
        a_ = tl.exp(dt_[:, None, :] * A_[None, :, :])
        if before is not None:
            at_chunk = before + (row + first // (CHUNK // TOKENS)) * D * S + at_state
            tl.store(at_chunk, h, mask=in_state & (first % (CHUNK // TOKENS) == 0))
        if REVERSE:
            C_ = _load_states(C, token, in_token, group, s, in_s, G, S)
            e_ = a_ * (x_[:, None, :] * C_[:, :, None])
        else:
            B_ = _load_states(B, token, in_token, group, s, in_s, G, S)
            e_ = (dt_ * x_)[:, None, :] * B_[:, :, None]
        decay, state = tl.associative_scan((a_, e_), 0, _compose)
        if y is not None:
            C_ = _load_states(C, token, in_token, group, s, in_s, G, S)
            y_ = tl.sum((state + decay * h[None, :, :]) * C_[:, :, None], 1)
            at_y = y + (token * tl.cdiv(S, BS) + state_tile)[:, None] * D + d[None, :]
            tl.store(at_y, y_.to(y.dtype.element_ty), mask=in_token[:, None] & in_d[None, :])
        end = tl.sum(tl.where((step == TOKENS - 1)[:, None, None], state, 0.0), 0)
        total = tl.sum(dt_, 0)
        h = decayed(h, A_ * total[None, :]) + end
        sum_dt += total

    if ENDS:
        at = segment * N + n
        tl.store(segment_state + at * D * S + at_state, h, mask=in_state)
        # The tiles of the states all store the same.
        tl.store(segment_dt + at * D + d, sum_dt, mask=in_d)
    elif final is not None:
        if segment == SEGMENTS - 1:
            tl.store(final + n * D * S + at_state, h.to(final.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["T", "N", "SEGMENTS"])
def gradient_kernel(
    x,  # [tokens, D]
    dt,  # [tokens, D]
    A,  # [D, S]
    B,  # [tokens, G, S]
    C,  # [tokens, G, S]
    dy,  # [tokens, D]
    before,  # [chunks, D, S]: the state before each chunk; None where no gradient needs states
    d_final,  # [N, D, S]
    segment_state,  # [SEGMENTS, N, D, S], of the sweep backwards
    segment_dt,  # [SEGMENTS, N, D]
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
    """Fill what is given of the gradients, backwards in time, one segment of one sequence in a program.

    With ``dh_t = dy_t C_t^T + exp(dt_{t+1} A) * dh_{t+1}``, the gradient of ``dt_t A`` is ``dh_t * exp(dt_t A) *
    h_{t-1}``, and that of ``dt_t x_t`` is ``dh_t B_t``. The states of a chunk are computed again, tile by tile, from
    the one before it. What is carried is ``exp(dt_t A) * dh_t``, the gradient of the state before the token.
    """
    tile, segment, n = split_program(tl.cdiv(S, BS) * G * tl.cdiv(D // G, BD), SEGMENTS)
    state_tile, group, channel_tile, d, in_d, s, in_s = _channels(tile, D // G, S, BS, BD)
    in_state = in_s[:, None] & in_d[None, :]
    at_state = d[None, :] * S + s[:, None]
    lo, hi, row = find_sequence(n, T, cu_seqlens, CHUNK)
    begin, stop = find_segment(SEGMENTS - 1 - segment, SEGMENTS, tl.cdiv(hi - lo, CHUNK))

    A_ = tl.load(A + at_state, mask=in_state, other=0.0).to(tl.float32)  # [BS, BD]
    c = _start(d_final, segment_state, segment_dt, A_, segment, n, N, d, s, in_state, D, S)
    dA_ = tl.zeros([BS, BD], tl.float32)
    t = tl.arange(0, TOKENS)
    for i in range(begin, stop):
        chunk = begin + stop - 1 - i
        # The states before the tiles of the chunk.
        states = ()
        if before is not None:
            h = tl.load(before + (row + chunk) * D * S + at_state, mask=in_state, other=0.0)
            states = (h,)
            for j in tl.static_range(CHUNK // TOKENS - 1):
                token = lo + chunk * CHUNK + j * TOKENS + t
                in_token = token < hi
                dt_ = _load_channels(dt, token, in_token, d, in_d, D)
                x_ = _load_channels(x, token, in_token, d, in_d, D)
                B_ = _load_states(B, token, in_token, group, s, in_s, G, S)
                a_ = tl.exp(dt_[:, None, :] * A_[None, :, :])
                e_ = (dt_ * x_)[:, None, :] * B_[:, :, None]
                _, state = tl.associative_scan((a_, e_), 0, _compose)
                end = tl.sum(tl.where((t == TOKENS - 1)[:, None, None], state, 0.0), 0)
                h = decayed(h, A_ * tl.sum(dt_, 0)[None, :]) + end
                states += (h,)
        for j in tl.static_range(CHUNK // TOKENS - 1, -1, -1):
            token = lo + chunk * CHUNK + j * TOKENS + t
            in_token = token < hi
            dt_ = _load_channels(dt, token, in_token, d, in_d, D)
            dy_ = _load_channels(dy, token, in_token, d, in_d, D)
            C_ = _load_states(C, token, in_token, group, s, in_s, G, S)
            a_ = tl.exp(dt_[:, None, :] * A_[None, :, :])
            read = dy_[:, None, :] * C_[:, :, None]
            decay, state = _before(a_, a_ * read, True)
            end = tl.sum(tl.where((t == 0)[:, None, None], a_ * (state + read), 0.0), 0)
            dh = read + state + decay * c[None, :, :]
            c = decayed(c, A_ * tl.sum(dt_, 0)[None, :]) + end

            at_channels = (token * tl.cdiv(S, BS) + state_tile)[:, None] * D + d[None, :]
            in_channels = in_token[:, None] & in_d[None, :]
            at_states = (token * tl.cdiv(D // G, BD) + channel_tile) * G + group
            at_states = at_states[:, None] * S + s[None, :]
            in_states = in_token[:, None] & in_s[None, :]
            x_ = _load_channels(x, token, in_token, d, in_d, D)
            B_ = _load_states(B, token, in_token, group, s, in_s, G, S)
            product = dt_ * x_
            if dB is not None:
                tl.store(dB + at_states, tl.sum(dh * product[:, None, :], 2), mask=in_states)
            if (dx is not None) or (ddt is not None):
                d_product = tl.sum(dh * B_[:, :, None], 1)
                if dx is not None:
                    tl.store(dx + at_channels, (dt_ * d_product).to(dx.dtype.element_ty), mask=in_channels)
            if before is not None:
                e_ = product[:, None, :] * B_[:, :, None]
                decay, state = _before(a_, e_, False)
                left = a_ * (state + decay * states[j][None, :, :])
                if dC is not None:
                    tl.store(dC + at_states, tl.sum((left + e_) * dy_[:, None, :], 2), mask=in_states)
                if (ddt is not None) or (dA is not None):
                    d_exponent = dh * left
                    if dA is not None:
                        dA_ += tl.sum(d_exponent * dt_[:, None, :], 0)
                    if ddt is not None:
                        ddt_ = x_ * d_product + tl.sum(d_exponent * A_[None, :, :], 1)
                        tl.store(ddt + at_channels, ddt_.to(ddt.dtype.element_ty), mask=in_channels)

    if dA is not None:
        tl.store(dA + (segment * N + n) * D * S + at_state, dA_, mask=in_state)
    if d_initial is not None:
        if segment == SEGMENTS - 1:
            tl.store(d_initial + n * D * S + at_state, c.to(d_initial.dtype.element_ty), mask=in_state)
