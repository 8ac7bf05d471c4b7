"""The Triton kernel of head decay: state passing over a sequence, the state in registers.

The output and three gradients are one sum, with the roles of q, k, v and do exchanged, forwards or backwards
in time:

    o  = pass(q, k, v)              dv = pass(k, q, do), backwards
    dq = pass(do, v, k)             dk = pass(v, do, q), backwards

The gradients of gates need the state before each chunk and the gradient of the state after it. Two passes
store these, and the second one computes dv as well. Then a kernel of `gradients` computes all other gradients
of all chunks at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    LOG2_E,
    clamp_gate,
    dot,
    dot_split,
    find_segment,
    find_sequence,
    in_float32,
    is_idle,
    split_dot,
    split_program,
)


class ReadsAndWrites(NamedTuple):
    """The state is read with `a`, and ``b x^T`` is written to it."""

    a: Any  # [tokens, HA, D1]
    b: Any  # [tokens, HA, D1]
    x: Any  # [tokens, HX, D2]
    beta: Any  # [tokens, H], the strength of writes


class Gates(NamedTuple):
    gamma: Any = None  # [H], a gate that is the same for every token
    sums: Any = None  # [chunks, H, CS], running sums of other gates, from `head_gate_sum_kernel`
    rest: Any = None  # [chunks, H, CS]


class States(NamedTuple):
    initial: Any = None  # [SEGMENTS, N, H, D1, D2], before each segment, with the strides of states
    states: Any = None  # [chunks, H, D1, D2]: before each chunk of `CS` tokens, or with `REVERSE` after it
    ends: Any = None  # [SEGMENTS, N, H, D1, D2], after each segment but the last, with the strides of states
    final: Any = None  # [N, H, D1, D2], with the strides of states
    sum_g: Any = None  # [SEGMENTS, N, H], the sum of each segment's gates


class Around(NamedTuple):
    """The operations around a scan of Mamba-2, absent elsewhere: see `_recurrences/fused/ssd`."""

    skip: Any = None  # [H, E], the weight with which `x` is added to the outputs
    E: Any = None  # D2, or 1 for one weight per head
    step: Any = None  # the stride of values in `skip`, 0 for one weight per head
    z: Any = None  # [tokens, H, D2], the gate of the sum, before silu
    z_token: Any = None  # the number of elements from one token of `z` to the next
    do: Any = None  # [tokens, H, D2], the gradient of the gated sum: `dy`, `dz`, `d_skip` then replace `out`
    dy: Any = None  # [tokens, H, D2], the gradient of the sum
    dz: Any = None  # [tokens, H, D2]
    d_skip: Any = None  # [SEGMENTS, N, H, D2]


@triton.jit
def _part(first, d2, D1, D2, stride1, stride2, BP: tl.constexpr):
    """The numbers of `BP` rows of a state from `first` on, and offsets and mask of ``[d2, rows]``."""
    d1 = first + tl.arange(0, BP)
    return d1, d2[:, None] * stride2 + d1[None, :] * stride1, (d2 < D2)[:, None] & (d1 < D1)[None, :]


@triton.jit
def _load_vectors(x, at, H, d, D: tl.constexpr, BD: tl.constexpr, t, remaining):
    """Tokens `t` of one head of ``x [tokens, H, D]``, from element `at` on; zero from `remaining` on."""
    at += t[:, None] * (H * D) + d[None, :]
    if D % BD == 0:
        out = tl.load(x + at, mask=(t < remaining)[:, None], other=0.0)
    else:
        out = tl.load(x + at, mask=(t < remaining)[:, None] & (d < D)[None, :], other=0.0)
    return out


@triton.jit
def _load_sums(sums, rest, row0, chunk, h, H, C: tl.constexpr, CS: tl.constexpr):
    """Running sums of gates of a chunk of `C`: at its tokens, along either axis, at its last, and before its first.

    Then the same numbers of `rest`, the rounding errors.
    """
    within = chunk * C % CS  # tokens of the larger chunk before this one
    at = ((row0 + chunk * C // CS) * H + h) * CS + within
    t = tl.arange(0, C)
    high = tl.load(sums + at + t)
    high_rows = tl.load(sums + at + t[:, None])
    high_end = tl.load(sums + at + C - 1)
    high_before = tl.zeros_like(high_end)
    low, low_rows = tl.zeros_like(high), tl.zeros_like(high_rows)
    low_end, low_before = tl.zeros_like(high_end), tl.zeros_like(high_end)
    if CS > C:
        high_before = tl.load(sums + at - 1, mask=within > 0, other=0.0)
    if rest is not None:
        low = tl.load(rest + at + t)
        low_rows = tl.load(rest + at + t[:, None])
        low_end = tl.load(rest + at + C - 1)
        if CS > C:
            low_before = tl.load(rest + at - 1, mask=within > 0, other=0.0)
    return high, high_rows, high_end, high_before, low, low_rows, low_end, low_before


@triton.jit(do_not_specialize=["T", "N", "H", "HA", "HX", "SEGMENTS", "first_tile", "scale"])
def head_decay_state_passing_kernel(
    vectors,  # `ReadsAndWrites`
    gates,  # `Gates`
    states,  # `States`, each of which may be None
    around,  # `Around`, likewise
    partial,  # [tokens, H, D2], added to `out`: the sum over the tiles of `D1` before `first_tile`
    out,  # [tokens, TILES, H, D2], the sums over each tile
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HA,
    HX,
    SEGMENTS,
    first_tile,  # of `D1`; None for 0, which needs fewer registers
    axes: tl.constexpr,  # `Axes`
    C: tl.constexpr,
    CS: tl.constexpr,
    BD1: tl.constexpr,
    BD2: tl.constexpr,
    BP: tl.constexpr,
    TILES: tl.constexpr,  # of `D1` from the first on
    REVERSE: tl.constexpr,
    FINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``S <- e^g S + beta_t b_t x_t^T``, ``out_t = scale * S^T a_t``, from chunk to chunk.

    With `REVERSE` it goes backwards in time, and `beta` weights the outputs: ``S <- e^g S + b_t x_t^T``,
    ``out_t = beta_t scale * S^T a_t``.

    One program has one segment of one sequence, and a tile of its state. It starts at zero if `initial` is
    absent, and stores `out`, `states`, `ends`, `final` and `sum_g`, if given; with `do`, `dy`, `dz` and `d_skip` too.
    It proceeds in chunks of `C` tokens, one or more of which form a chunk of `CS`. With `FINE`, the update of
    the state is a product in two parts, which keeps more digits: the gradient of `gamma` is a sum over all
    tokens, whose terms nearly cancel.

    The tile is held transposed, because the left factor of a product stays in registers. It is a tuple of parts
    of `BP` rows, so that the registers hold one part at a time in the dtype of products.
    """
    a, b, x, beta = vectors
    gamma, sums, rest = gates
    initial, before, ends, final, sum_g = states
    skip, E, step, z, z_token, do, dy, dz, d_skip = around
    D1: tl.constexpr = axes.D1
    D2: tl.constexpr = axes.D2
    GATED: tl.constexpr = gamma is not None or sums is not None
    READS: tl.constexpr = out is not None or dz is not None
    PARTS: tl.constexpr = BD1 // BP
    scale = in_float32(scale)
    tile, segment, nh = split_program(TILES * ((D2 + BD2 - 1) // BD2), SEGMENTS)
    if is_idle(segment, SEGMENTS, ends, out is not None or before is not None):
        return
    at_end = (segment * N * H + nh) * D1 * D2
    n = nh // H
    h = nh % H
    ha = h // (H // HA)
    hx = h // (H // HX)
    tile1 = (tile % TILES).to(tl.int32)
    row1 = tile1 * BD1 if first_tile is None else (first_tile + tile1) * BD1
    d2 = (tile // TILES).to(tl.int32) * BD2 + tl.arange(0, BD2)
    lo, hi, row0 = find_sequence(n, T, cu_seqlens, CS)
    chunks = tl.cdiv(hi - lo, C)
    begin, stop = find_segment(segment, SEGMENTS, chunks)

    # 1. The state before the segment. Backwards, the written vectors have the factor `scale`. The state is
    # kept without it; if it is 0, nothing is written.
    unit = scale
    if REVERSE:
        unit = tl.where(scale == 0.0, 1.0, scale)
    S = ()
    for part in tl.static_range(PARTS):
        S_ = tl.zeros([BD2, BP], dtype=tl.float32)
        _, at, inside = _part(row1 + part * BP, d2, D1, D2, axes.stride1, axes.stride2, BP)
        if initial is not None:
            S_ += tl.load(initial + at_end + at, mask=inside, other=0.0)
            if REVERSE:
                S_ /= unit
        S += (S_,)
    total_g = tl.zeros([], dtype=tl.float32)
    if skip is not None:
        weight = tl.load(skip + h * E + d2 * step, mask=d2 < D2, other=0.0).to(tl.float32)[:, None]
    if d_skip is not None:
        d_weight = tl.zeros([BD2], dtype=tl.float32)

    t = tl.arange(0, C)
    if gamma is not None:
        rate = clamp_gate(tl.load(gamma + h).to(tl.float32)) * LOG2_E
        between = tl.exp2(rate * tl.abs(t[None, :] - t[:, None]))
    # With more than 128 keys per program there are too few registers for the next chunk's sums of gates.
    AHEAD: tl.constexpr = PARTS <= 2
    if sums is not None and AHEAD:
        # A segment or sequence without chunks loads sums that it does not use.
        following = tl.minimum(begin, chunks - 1)
        following = tl.maximum(chunks - 1 - following if REVERSE else following, 0)
        following_sums = _load_sums(sums, rest, row0, following, h, H, C, CS)
    for i in range(begin, stop):
        chunk = chunks - 1 - i if REVERSE else i
        row = row0 + chunk * C // CS
        within = chunk * C % CS  # tokens of the larger chunk before this one
        start = lo + chunk * C
        remaining = (hi - start).to(tl.int32)
        writers_left = remaining
        if REVERSE:
            writers_left = tl.where(scale == 0.0, 0, remaining)
        # 2. The decays of the chunk: between its tokens, from its start and to its end.
        if gamma is not None:
            last = tl.minimum(remaining, C)
            total = rate * last
            to_start = rate * (t + 1)
            to_end = rate * tl.maximum(last - 1 - t, 0)
        elif sums is not None:
            if AHEAD:
                # The next chunk's sums are loaded while this chunk is computed.
                sums_ = following_sums
                following = tl.minimum(i + 1, stop - 1)
                following = chunks - 1 - following if REVERSE else following
                following_sums = _load_sums(sums, rest, row0, following, h, H, C, CS)
            else:
                sums_ = _load_sums(sums, rest, row0, chunk, h, H, C, CS)
            high, high_rows, high_end, high_before, low, low_rows, low_end, low_before = sums_
            to_start = (high - high_before) + (low - low_before)
            to_end = (high_end - high) + (low_end - low)
            total = (high_end - high_before) + (low_end - low_before)
            between = (high[None, :] - high_rows) + (low[None, :] - low_rows)
            between = tl.exp2(-between if REVERSE else between)
        if GATED:
            read_decay = tl.exp2(to_end if REVERSE else to_start)
            write_decay = tl.exp2(to_start if REVERSE else to_end)
            if sum_g is not None:
                total_g += total
        first = within == 0
        if REVERSE:
            first = (within == CS - C) | (chunk == chunks - 1)
        if beta is not None:
            beta_ = tl.load(beta + (start + t) * H + h, mask=t < remaining, other=0.0).to(tl.float32)
        at_x = (start * HX + hx) * D2 + t[None, :] * (HX * D2) + d2[:, None]
        in_out = (t < remaining)[None, :] & (d2 < D2)[:, None]
        x_ = tl.load(x + at_x, mask=in_out, other=0.0)  # [D2, tokens]
        # Loaded while the output is computed.
        if z is not None:
            z_ = tl.load(
                z + start * z_token + t[None, :] * z_token + h * D2 + d2[:, None], mask=in_out, other=0.0
            )
        if do is not None:
            do_ = tl.load(do + at_x, mask=in_out, other=0.0)

        # 3. The outputs: the reads of the state, and of the tokens of the chunk.
        writers = ()
        if READS:
            other_chunks = tl.zeros([BD2, C], dtype=tl.float32)
            pairs = tl.zeros([C, C], dtype=tl.float32)  # [writing tokens, reading tokens]
        at_ab = (start * HA + ha) * D1
        for part in tl.static_range(PARTS):
            d1, at, inside = _part(row1 + part * BP, d2, D1, D2, axes.stride1, axes.stride2, BP)
            b_ = _load_vectors(b, at_ab, HA, d1, D1, BD1, t, writers_left)
            writers += (b_,)
            if before is not None:
                if first:
                    at_states = (row * H + h) * D1 * D2 + at
                    tl.store(before + at_states, S[part].to(before.dtype.element_ty), mask=inside)
            if READS:
                a_ = tl.trans(_load_vectors(a, at_ab, HA, d1, D1, BD1, t, remaining))
                other_chunks += dot(S[part], a_, DOT)
                pairs += dot(b_, a_, DOT)
        if READS:
            if GATED:
                other_chunks *= read_decay[None, :]
                pairs *= between
            earlier = t[:, None] >= t[None, :] if REVERSE else t[:, None] <= t[None, :]
            pairs = tl.where(earlier, pairs, 0.0)
            if beta is not None and not REVERSE:
                pairs *= beta_[:, None]
            out_ = dot_split(x_, pairs, DOT, other_chunks)
            if beta is not None and REVERSE:
                out_ *= beta_[None, :]
            at_out = ((start * TILES + tile1) * H + h) * D2 + t[None, :] * (TILES * H * D2) + d2[:, None]
            out_ *= unit
            if partial is not None:
                out_ += tl.load(partial + at_out, mask=in_out, other=0.0)
            if skip is not None:
                out_ += weight * x_.to(tl.float32)
        if z is not None:
            z_ = z_.to(tl.float32)
            s = tl.sigmoid(z_)
            if READS:
                gated = out_ * (s * (1 + z_ * (1 - s)) if do is not None else z_ * s)
        if do is not None:
            dy_ = do_.to(tl.float32)
            if dz is not None:
                tl.store(dz + at_x, (dy_ * gated).to(dz.dtype.element_ty), mask=in_out)
            if z is not None:
                dy_ *= z_ * s
                tl.store(dy + at_x, dy_.to(dy.dtype.element_ty), mask=in_out)
            if d_skip is not None:
                d_weight += tl.sum(dy_ * x_.to(tl.float32), 1)
        elif READS:
            out_ = out_ if z is None else gated
            tl.store(out + at_out, out_.to(out.dtype.element_ty), mask=in_out)
        # 4. The state after the chunk.
        weighted = x_
        if GATED:
            weighted = weighted * write_decay[None, :]
        if beta is not None and not REVERSE:
            weighted = weighted * beta_[None, :]
        before_, S = S, ()
        for part in tl.static_range(PARTS):
            S_ = before_[part]
            if GATED:
                S_ *= tl.exp2(total)
            if FINE:
                S_ = split_dot(weighted, writers[part], DOT, S_)
            else:
                S_ += dot(weighted, writers[part], DOT)
            S += (S_,)

    # 5. The results of the segment.
    for part in tl.static_range(PARTS):
        _, at, inside = _part(row1 + part * BP, d2, D1, D2, axes.stride1, axes.stride2, BP)
        S_ = S[part] * unit if REVERSE else S[part]
        if ends is not None:
            tl.store(ends + at_end + at, S_, mask=inside)
        elif final is not None:
            if segment == SEGMENTS - 1:
                tl.store(final + nh * D1 * D2 + at, S_.to(final.dtype.element_ty), mask=inside)
    if d_skip is not None:
        tl.store(d_skip + (segment * N * H + nh) * D2 + d2, d_weight, mask=d2 < D2)
    if sum_g is not None:
        tl.store(sum_g + segment * N * H + nh, total_g / LOG2_E)
