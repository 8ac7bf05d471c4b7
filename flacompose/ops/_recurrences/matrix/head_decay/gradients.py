"""The Triton kernel of the gradients of queries, keys and gates of head decay, for all chunks at once.

Within a chunk, with `S` the state before it, `dS` the gradient of the state after it, and `w` the decay
between tokens:

    dq_i = sum over j <= i of w_ij (do_i . v_j) k_j + w_i S do_i       w_i from the chunk's start
    dk_j = sum over i >= j of w_ij (do_i . v_j) q_i + w_j dS v_j       w_j to the chunk's end

With `beta`, ``beta_j v_j`` replaces ``v_j``. The gradient of ``beta_j`` is the product of ``k_j`` with the
gradient that ``k_j`` would have if ``beta_j`` were 1.

A program has a block of the chunk. The pairs of its own tokens are computed once for queries and keys; pairs
with tokens of the other block are computed once for each. Pairs are added up over the heads of values that
share queries and keys before they are multiplied by these, so one product serves all heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import (
    dot,
    dot_split,
    find_chunk,
    in_float32,
    load_state,
    load_tile,
    size_of_chunk,
    split_dot,
    split_program,
    store_tile,
)

# The parts of `d_sums`, one of each for every tile of keys. `gates_of_heads` explains their kinds. Sums that end at
# a token have two parts, for sums that begin in the token's block and before it. If there are two blocks, the last
# part is ACROSS, or BETWEEN if heads share keys too.
ENDING_IN_BLOCK = tl.constexpr(0)
ENDING_FROM_BEFORE = tl.constexpr(1)
BEGINNING_IN_BLOCK = tl.constexpr(2)
LEAVING_BLOCK = tl.constexpr(3)
ACROSS_OTHER_BLOCK = tl.constexpr(4)
BETWEEN_BLOCKS = tl.constexpr(4)


class Vectors(NamedTuple):
    q: Any  # [tokens, H, K]
    k: Any  # [tokens, H, K]
    v: Any  # [tokens, HV, V]
    do: Any  # [tokens, HV, V]
    beta: Any  # [tokens, HV]


class Results(NamedTuple):
    dq: Any  # [tokens, HV / GROUP, K], one head for the heads of a program
    dk: Any  # [tokens, HV / GROUP, K], likewise
    d_sums: Any  # [chunks, PARTS, HV, C], for `head_gate_gradient_kernel`, like the next two
    d_total: Any  # [chunks, HV, tiles of K * BLOCKS]
    d_beta: Any  # [chunks, BETAS, HV, C]: through the block, through all else, and as in `BETWEEN_BLOCKS`


@triton.jit
def _sums(sums, rest, at):
    """Running sums of gates, and their rounding errors."""
    high = tl.load(sums + at)
    low = tl.load(rest + at) if rest is not None else high * 0.0
    return high, low


@triton.jit
def _at(x, row, part, PARTS: tl.constexpr, hv, HV, t, C: tl.constexpr):
    """Tokens `t` of a part of a chunk of ``x [chunks, PARTS, HV, C]``."""
    return x + ((row * PARTS + part) * HV + hv) * C + t


@triton.jit
def _pairs(
    x,  # [tokens, HV, V], of a head from the chunk's first token on, like `y`
    y,
    sums,
    rest,
    at,  # the offset of the sums of the head's chunk
    scale,
    i,
    j,
    size,
    HV,
    V,
    BC: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    BACKWARDS: tl.constexpr = False,
):
    """``w_ij (x_i . y_j)`` of tokens `i` of the chunk and tokens `j` before them, or with `BACKWARDS` after them.

    The sign of the sum of gates does not say which token is later: rounding makes gates of mLSTM a little
    more than 0.
    """
    pairs = tl.zeros([BC, BC], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        x_ = load_tile(x, i, size, 0, d2, HV, V)
        pairs += dot(x_, tl.trans(load_tile(y, j, size, 0, d2, HV, V)), DOT)
    high, low = _sums(sums, rest, at + i)
    high_j, low_j = _sums(sums, rest, at + j)
    between = high[:, None] - high_j[None, :] + (low[:, None] - low_j[None, :])
    # Keys do not write if `scale` is 0: see `head_decay_state_passing_kernel`.
    return tl.where(scale == 0.0, 0.0, pairs * tl.exp2(-between if BACKWARDS else between))


@triton.jit
def _through_state(
    x,  # [tokens, HV, V], of a head from the chunk's first token on
    state,  # [K, V]
    other,  # [K, V]
    block,
    t,
    size,
    d,
    HV,
    K,
    V,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
    FINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """``state x_t`` at keys `d`, and a block's share of the sum of the elementwise product of the two states.

    Both are computed at once, so that `state` is read once. Without `other` the sum is 0.
    """
    out = tl.zeros([BC, BK], dtype=tl.float32)
    both = tl.zeros([], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        x_ = load_tile(x, t, size, 0, d2, HV, V)
        state_ = load_state(state, d, d2, K, V)
        if FINE:
            out = dot_split(x_, state_, DOT, out)
        else:
            out += dot(x_, state_, DOT)
        if other is not None:
            keys = tl.where(v0 // BV % BLOCKS == block, K, 0)  # blocks share the tiles
            both += tl.sum(state_.to(tl.float32) * load_state(other, d, d2, keys, V).to(tl.float32))
    return out, both


@triton.jit
def _through_other_block(
    x,  # [tokens, HV, V], of the first head from the chunk's first token on, like `y`
    y,
    own,  # [BC, BK], the queries of the block, or with `BACKWARDS` the keys
    others,  # [tokens, H, K], from the chunk's first token on: the keys, or with `BACKWARDS` the queries
    beta,  # [tokens, HV], of the first head from the chunk's first token on
    sums,  # [HV, C], of the first head, like the next three
    rest,
    d_sums,  # [HV, C], the tile's part for pairs between blocks
    d_beta,
    place,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """The gradients through the other block: of the second's queries, or `BACKWARDS` the first's keys.

    As within a block, the pairs of all heads are added up first.
    """
    scale, block, size, d, H, HV = place
    t, other_t = block * BC + tl.arange(0, BC), (1 - block) * BC + tl.arange(0, BC)
    others_ = load_tile(others, other_t, size, 0, d, H, K)
    products = dot(own, tl.trans(others_), DOT)
    all_pairs = tl.zeros([BC, BC], dtype=tl.float32)
    for head in range(GROUP):
        at = head * C
        pairs = _pairs(
            x + head * V, y + head * V, sums, rest, at, scale, t, other_t, size, HV, V, BC, BV, DOT, BACKWARDS
        )
        if beta is not None:
            writers = t if BACKWARDS else other_t
            beta_ = tl.load(beta + writers * HV + head, mask=writers < size, other=0.0).to(tl.float32)
            if not BACKWARDS:
                pairs *= beta_[None, :]
        between = tl.sum(pairs * products, 1)
        if beta is not None:
            if d_beta is not None:
                tl.store(d_beta + at + t, between if BACKWARDS else tl.zeros([BC], dtype=tl.float32))
            if BACKWARDS:
                pairs *= beta_[:, None]
                between *= beta_
        tl.store(d_sums + at + t, between)
        all_pairs += pairs
    return split_dot(all_pairs, others_, DOT)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def head_decay_gradient_kernel(
    vectors,  # `Vectors`
    gates,  # `Gates` of `kernels`: sums [chunks, HV, C], and no gamma
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it: the gradient, without `scale`
    results,  # `Results`
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    FINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradients of queries and keys, and each tile's part of the gradients of sums of gates and of `beta`.

    A program has a block of `BC` tokens of a chunk of `C`, a tile of the key axis, and `GROUP` heads of
    values that share queries and keys. A chunk has one block or two. With `SHARED`, pairs between blocks are
    added up over heads too. With `FINE` states are float32, and are multiplied in two parts.
    """
    q, k, v, do, beta = vectors
    sums, rest = gates.sums, gates.rest
    dq, dk, d_sums, d_total, d_beta = results
    TILES: tl.constexpr = (K + BK - 1) // BK
    BLOCKS: tl.constexpr = C // BC
    PARTS: tl.constexpr = (3 + BLOCKS) * TILES
    BETAS: tl.constexpr = (2 + SHARED) * TILES
    tl.static_assert(BLOCKS == 1 or (BLOCKS == 2 and (SHARED or GROUP == 1)))
    scale = in_float32(scale)
    part, row, group = split_program(TILES * BLOCKS, tl.num_programs(0) // (HV // GROUP * TILES * BLOCKS))
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    tile = (part % TILES).to(tl.int32)
    block = (part // TILES).to(tl.int32) if BLOCKS > 1 else 0
    if lo >= hi:
        return
    first = group * GROUP  # head of the program
    h = first // (HV // H)
    size = size_of_chunk(lo, hi, C)
    t = block * BC + tl.arange(0, BC)
    d = tile * BK + tl.arange(0, BK)
    q += (lo * H + h) * K
    k += (lo * H + h) * K
    q_ = load_tile(q, t, size, 0, d, H, K)
    k_ = load_tile(k, t, size, 0, d, H, K)

    # 1. Through the block's own tokens: the matrix, summed over heads, that multiplies keys and, transposed, queries.
    all_pairs = tl.zeros([BC, BC], dtype=tl.float32)
    products = dot(q_, tl.trans(k_), DOT)
    for head in range(GROUP):
        hv = first + head
        at_v, at_gates = (lo * HV + hv) * V, (row * HV + hv) * C
        pairs = _pairs(do + at_v, v + at_v, sums, rest, at_gates, scale, t, t, size, HV, V, BC, BV, DOT)
        pairs = tl.where(t[:, None] >= t[None, :], pairs, 0.0)
        d_pairs = pairs * products
        if beta is not None:
            if d_beta is not None:
                tl.store(_at(d_beta, row, tile, BETAS, hv, HV, t, C), tl.sum(d_pairs, 0))
            beta_ = tl.load(beta + (lo + t) * HV + hv, mask=t < size, other=0.0).to(tl.float32)
            pairs *= beta_[None, :]
            d_pairs *= beta_[None, :]
        all_pairs += pairs
        # No gate decays the pair of a token with itself, which would drown the others in the gate's gradient.
        d_pairs = tl.where(t[:, None] > t[None, :], d_pairs, 0.0)
        tl.store(_at(d_sums, row, ENDING_IN_BLOCK * TILES + tile, PARTS, hv, HV, t, C), tl.sum(d_pairs, 1))
        tl.store(_at(d_sums, row, BEGINNING_IN_BLOCK * TILES + tile, PARTS, hv, HV, t, C), tl.sum(d_pairs, 0))

    # 2. Through the state before the chunk, decayed from its start, and the block before this one.
    acc = tl.zeros([BC, BK], dtype=tl.float32)
    at_v, at_gates = (lo * HV + first) * V, (row * HV + first) * C
    if SHARED:
        beta_first = beta + lo * HV + first if beta is not None else None
        between = _at(d_sums, row, BETWEEN_BLOCKS * TILES + tile, PARTS, first, HV, 0, C)
        d_beta_between = (
            _at(d_beta, row, 2 * TILES + tile, BETAS, first, HV, 0, C) if d_beta is not None else None
        )
        rest_first = rest + at_gates if rest is not None else None
        place = scale, block, size, d, H, HV
        if block == 1:
            acc = _through_other_block(
                do + at_v, v + at_v, q_, k, beta_first, sums + at_gates, rest_first, between, d_beta_between,
                place, K, V, C, BC, BV, GROUP, DOT, False,
            )  # fmt: skip
    for head in range(GROUP):
        hv = first + head
        rh = row * HV + hv
        do_head, v_head = do + (lo * HV + hv) * V, v + (lo * HV + hv) * V
        through, _ = _through_state(
            do_head, states + rh * K * V, None, block, t, size, d, HV, K, V, BC, BK, BV, BLOCKS, FINE, DOT
        )
        high, low = _sums(sums, rest, rh * C + t)
        through *= tl.exp2(high + low)[:, None]
        if not SHARED and block == 1:  # the second of two
            across = tl.sum(through * q_, 1)
            tl.store(_at(d_sums, row, ACROSS_OTHER_BLOCK * TILES + tile, PARTS, hv, HV, t, C), across)
            j = tl.arange(0, BC)
            k_j = load_tile(k, j, size, 0, d, H, K)
            pairs = _pairs(do_head, v_head, sums, rest, rh * C, scale, t, j, size, HV, V, BC, BV, DOT)
            if beta is not None:
                beta_j = tl.load(beta + (lo + j) * HV + hv, mask=j < size, other=0.0).to(tl.float32)
                pairs *= beta_j[None, :]
            through = split_dot(pairs, k_j, DOT, through)
        acc += through
        tl.store(
            _at(d_sums, row, ENDING_FROM_BEFORE * TILES + tile, PARTS, hv, HV, t, C), tl.sum(through * q_, 1)
        )
    if dq is not None:
        acc = split_dot(all_pairs, k_, DOT, acc)
        store_tile(dq + (lo * (HV // GROUP) + group) * K, acc * scale, t, size, 0, d, HV // GROUP, K)

    # 3. Through the state after the chunk, decayed to its end, and the block after this one.
    acc = tl.zeros([BC, BK], dtype=tl.float32)
    if SHARED:
        if block == 0:
            acc = _through_other_block(
                v + at_v, do + at_v, k_, q, beta_first, sums + at_gates, rest_first, between, d_beta_between,
                place, K, V, C, BC, BV, GROUP, DOT, True,
            )  # fmt: skip
    for head in range(GROUP):
        hv = first + head
        rh = row * HV + hv
        do_head, v_head = do + (lo * HV + hv) * V, v + (lo * HV + hv) * V
        S, dS = states + rh * K * V, d_states + rh * K * V
        through, both = _through_state(
            v_head, dS, S, block, t, size, d, HV, K, V, BC, BK, BV, BLOCKS, FINE, DOT
        )
        high, low = _sums(sums, rest, rh * C + t)
        total, total_rest = _sums(sums, rest, rh * C + C - 1)
        # The path from one state to the other is decayed by all of the chunk's gates.
        tl.store(d_total + rh * TILES * BLOCKS + part, both * tl.exp2(total + total_rest))
        through *= tl.exp2(total - high + (total_rest - low))[:, None]
        if beta is not None:
            beta_ = tl.load(beta + (lo + t) * HV + hv, mask=t < size, other=0.0).to(tl.float32)
        if not SHARED and block < BLOCKS - 1:  # the first of two
            across = tl.sum(through * k_, 1)
            if beta is not None:
                across *= beta_
            tl.store(_at(d_sums, row, ACROSS_OTHER_BLOCK * TILES + tile, PARTS, hv, HV, t, C), across)
            i = BC + tl.arange(0, BC)
            q_i = load_tile(q, i, size, 0, d, H, K)
            pairs = _pairs(v_head, do_head, sums, rest, rh * C, scale, t, i, size, HV, V, BC, BV, DOT, True)
            through = split_dot(pairs, q_i, DOT, through)
        d_leaving = tl.sum(through * k_, 1)
        if beta is not None:
            if d_beta is not None:
                tl.store(_at(d_beta, row, TILES + tile, BETAS, hv, HV, t, C), d_leaving)
            through *= beta_[:, None]
            d_leaving *= beta_
        acc += through
        tl.store(_at(d_sums, row, LEAVING_BLOCK * TILES + tile, PARTS, hv, HV, t, C), d_leaving)
    if dk is not None:
        acc = split_dot(tl.trans(all_pairs), q_, DOT, acc)
        acc *= tl.where(scale == 0.0, 1.0, scale)
        store_tile(dk + (lo * (HV // GROUP) + group) * K, acc, t, size, 0, d, HV // GROUP, K)
