"""Triton kernels for gates of heads: running sums within chunks, and gradients from the gradients of sums.

Every weight in a recurrence is the exponential of a sum of gates, which is a difference of two running sums.
The gradient of a gate is the sum of the gradients of all sums that contain the gate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import LOG2_E, clamp_gate, find_chunk, in_float32

# Each part of `d_sums` has one number for each token: the gradient of all sums of gates of one kind. The kinds:
# - ENDING: sums that end at the token.
# - BEGINNING: sums that begin after the token, and end in its block.
# - LEAVING: sums that begin after the token, and end beyond its block.
# - ACROSS: sums over all gates of the other block, from the chunk's start to a token of the second block, or from
#   a token of the first block to the chunk's end.
# - BETWEEN: sums from a token of the first block to one of the second, if ENDING and LEAVING do not include them.
ENDING = tl.constexpr(0)
BEGINNING = tl.constexpr(1)
LEAVING = tl.constexpr(2)
ACROSS = tl.constexpr(3)
BETWEEN = tl.constexpr(4)


@triton.jit
def store_sums(g, sums, rest, at, mask):
    """The running sums of ``g [C, heads]`` as base-2 logarithms, in two parts if `rest` is given."""
    g *= LOG2_E
    if rest is not None:
        high = tl.floor(g * 512.0) / 512.0
        tl.store(rest + at, tl.cumsum(g - high, 0), mask=mask)
        g = high
    tl.store(sums + at, tl.cumsum(g, 0), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "H"])
def head_gate_sum_kernel(
    g,  # [tokens, H]
    gamma,  # [H], added to `g` at every token
    sums,  # [chunks, H, C]
    rest,  # [chunks, H, C]
    cu_seqlens,
    T,
    N,
    H,
    C: tl.constexpr,
    BH: tl.constexpr,
):
    """The running sums of gates within each chunk, as base-2 logarithms.

    With `rest`, in two parts: multiples of 2^-9, which add and subtract exactly, and the small rest. A
    difference of sums is then as accurate as the sum of the gates between, however strong the earlier gates
    were.
    """
    row = tl.program_id(0).to(tl.int64)
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    t = tl.arange(0, C)
    token = start + t
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = (h < H)[None, :]
    mask = (token < end)[:, None] & in_h
    g_ = tl.zeros([C, BH], dtype=tl.float32)
    if g is not None:
        g_ += tl.load(g + token[:, None] * H + h[None, :], mask=mask, other=0.0)
    if gamma is not None:
        gamma_ = tl.load(gamma + h, mask=h < H, other=0.0).to(tl.float32)
        g_ += tl.where(mask, gamma_[None, :], 0.0)
    store_sums(clamp_gate(g_), sums, rest, (row * H + h)[None, :] * C + t[:, None], in_h)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def head_gate_gradient_kernel(
    d_sums,  # [chunks, PARTS, H, C], gradients of sums of gates; the parts of a kind are added up
    d_total,  # [chunks, H, D], gradients of the sum over the chunk, to be added up
    dg,  # [tokens, H]
    d_beta,  # [chunks, BETAS, H, C], parts of the gradient of beta, to be added up
    dbeta,  # [tokens, H]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    D: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    ENDINGS: tl.constexpr,
    BEGINNINGS: tl.constexpr,
    LEAVINGS: tl.constexpr,
    PARTS: tl.constexpr,
    BETAS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """The gradient of every gate from the gradients of the sums that contain it.

    A program has a block of `BC` tokens of a chunk of `C`, which has one block or two. Only sums within one
    block are subtracted from others: in a difference of sums, the digits of one are lost if the other is far
    larger.

    Of the parts of `d_sums`, the first `ENDINGS` are of the kind `ENDING`, the next `BEGINNINGS` of
    `BEGINNING`, the next `LEAVINGS` of `LEAVING`, and the others of `ACROSS`. With `SHARED` the others are of
    `BETWEEN`. Then the second half of the parts of `ENDING` and all of `LEAVING` are also used as `ACROSS`.
    """
    BLOCKS: tl.constexpr = C // BC
    row = tl.program_id(0).to(tl.int64) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    t = block * BC + tl.arange(0, BC)
    token = start + t
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    in_h = (h < H)[None, :]
    # Backwards the state is stored without `scale`: see `head_decay_state_passing_kernel`.
    scale = in_float32(scale)
    unit = tl.where(scale == 0.0, 1.0, scale)
    # 1. The gradients of the sums that contain the gate, by their kinds.
    from_here = tl.zeros([BC, BH], dtype=tl.float32)
    before = tl.zeros([BC, BH], dtype=tl.float32)
    d_total_ = tl.zeros([BH], dtype=tl.float32)  # of the sums that contain all gates of the block
    for part in tl.static_range(PARTS):
        at_sums = ((row * PARTS + part) * H + h)[None, :] * C + t[:, None]
        if part < ENDINGS:
            from_here += tl.load(d_sums + at_sums, mask=in_h, other=0.0)
        elif part < ENDINGS + BEGINNINGS:
            from_here -= tl.load(d_sums + at_sums, mask=in_h, other=0.0)
        elif part < ENDINGS + BEGINNINGS + LEAVINGS:
            # The number of the token before: these sums begin after a token.
            before += tl.load(d_sums + at_sums - 1, mask=in_h & (t > block * BC)[:, None], other=0.0)
        else:
            # Gates of the first block are in sums that end at outputs, gates of the second block in sums to
            # the next state.
            other_t = (1 - block) * BC + tl.arange(0, BC)
            across_part = part
            if SHARED:
                across_part = tl.where(block == 0, part - 3 * LEAVINGS, part - LEAVINGS)
            at_other = ((row * PARTS + across_part) * H + h)[None, :] * C + other_t[:, None]
            across = tl.sum(tl.load(d_sums + at_other, mask=in_h, other=0.0), 0)
            d_total_ += across * tl.where(block == 0, scale, unit)
            if SHARED:
                # Sums between blocks end at a token of the second block, and begin after one of the first.
                begin = 1 - block
                between = tl.load(d_sums + at_sums - begin, mask=in_h & (t >= begin)[:, None], other=0.0)
                from_here += tl.where(block == 1, between, 0.0)
                before += tl.where(block == 0, between, 0.0)
    for tile in tl.static_range((D + BD - 1) // BD):
        d = tile * BD + tl.arange(0, BD)
        at_total = (row * H + h)[:, None] * D + d[None, :]
        in_total = (h < H)[:, None] & (d < D)[None, :]
        d_total_ += tl.sum(tl.load(d_total + at_total, mask=in_total, other=0.0), 1) * unit

    # 2. The gate's gradient, the sum of these.
    out = tl.cumsum(from_here, 0, reverse=True) * scale + tl.cumsum(before, 0) * unit + d_total_[None, :]
    mask = (token < end)[:, None] & in_h
    tl.store(dg + token[:, None] * H + h[None, :], out.to(dg.dtype.element_ty), mask=mask)

    # 3. The gradient of `beta`.
    if dbeta is not None:
        d_beta_ = tl.zeros([BC, BH], dtype=tl.float32)
        for part in tl.static_range(BETAS):
            at_part = ((row * BETAS + part) * H + h)[None, :] * C + t[:, None]
            d_beta_ += tl.load(d_beta + at_part, mask=in_h, other=0.0)
        tl.store(
            dbeta + token[:, None] * H + h[None, :], (d_beta_ * unit).to(dbeta.dtype.element_ty), mask=mask
        )


# The exponents below are differences of running sums in base 2. For float32 inputs `rest` is the rounding
# error of `sums`. For bfloat16 it is absent: 64 gates of at most 128 sum to at most 11,819, where float32
# has a spacing of 2^-10. So a weight other than 0 has a relative error of at most 2^-10; bfloat16 rounds to 2^-9.


@triton.jit
def decayed_rows(sums, rest, C: tl.constexpr):
    """The decays ``[C]`` from a chunk's start to its tokens, from these to its end, and of the chunk."""
    sum_i = tl.load(sums + tl.arange(0, C))
    total = tl.load(sums + C - 1)
    to_end = total - sum_i
    if rest is not None:
        rest_i = tl.load(rest + tl.arange(0, C))
        rest_total = tl.load(rest + C - 1)
        sum_i += rest_i
        to_end += rest_total - rest_i
        total += rest_total
    return tl.exp2(sum_i), tl.exp2(to_end), tl.exp2(total)


@triton.jit
def decays_of_reads(sums, rest, from_start, BEFORE: tl.constexpr, C: tl.constexpr):
    """The decays ``[C]`` from a chunk's start to reads: `from_start`, or `BEFORE` their gates."""
    if BEFORE:
        i = tl.arange(0, C)
        until = sums_before(sums, i)
        if rest is not None:
            until += sums_before(rest, i)
        from_start = tl.exp2(until)
    return from_start


@triton.jit
def sums_before(sums, i):
    """The sums of gates up to the token before each of the tokens `i`; 0 for the first of the chunk."""
    return tl.load(sums + i - 1, mask=i > 0, other=0.0)


@triton.jit
def decayed_pairs_before(sums, rest, C: tl.constexpr, READS: tl.constexpr):
    """The decays ``[C, C]`` from writing tokens to later ones, each of which reads before its own gate.

    The reading tokens are along the axis `READS`. Pairs out of order have a number of at most 1.
    """
    WRITES: tl.constexpr = 1 - READS
    i = tl.arange(0, C)
    between = tl.expand_dims(sums_before(sums, i), WRITES) - tl.expand_dims(tl.load(sums + i), READS)
    if rest is not None:
        between += tl.expand_dims(sums_before(rest, i), WRITES) - tl.expand_dims(tl.load(rest + i), READS)
    return tl.exp2(-tl.abs(between))


@triton.jit
def decayed_pairs(sums, rest, C: tl.constexpr):
    """The decays ``[C, C]`` between tokens, in either order."""
    sum_i = tl.load(sums + tl.arange(0, C))
    between = sum_i[:, None] - sum_i[None, :]
    if rest is not None:
        rest_i = tl.load(rest + tl.arange(0, C))
        between += rest_i[:, None] - rest_i[None, :]
    return tl.exp2(-tl.abs(between))
