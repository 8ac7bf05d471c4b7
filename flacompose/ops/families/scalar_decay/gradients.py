"""The Triton kernel of the gradients of queries, keys and gates, for all chunks at once.

Within a chunk, with `S` the state before it, `dS` the gradient of the state after it, and `w` the decay between tokens:

    dq_i = sum over j <= i of w_ij (do_i . v_j) k_j + w_i S do_i       w_i from the chunk's start
    dk_j = sum over i >= j of w_ij (v_j . do_i) q_i + w_j dS v_j       w_j to the chunk's end

Where tokens are written with a strength ``beta_j``, ``beta_j v_j`` takes the place of ``v_j``. The gradient of
``beta_j`` is the product of ``k_j`` with the gradient that ``k_j`` would have if it were 1.

These are one sum, the roles of q and k, v and do, S and dS exchanged. Heads of values that share queries and keys are
added up before their pairs are multiplied by the keys, so that this product is made once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import (
    dot,
    dot_split,
    find_chunk,
    load_state,
    load_tile,
    split_dot,
    split_program,
    store_tile,
)
from flacompose.ops.families.scalar_decay.gates import BEGINNING, ENDING, TO_END

FLAT = tl.constexpr(2048)  # numbers of a state that are multiplied by those of another at a time


@triton.jit
def _sums(sums, rest, at):
    """Running sums of gates, and what rounding took from them."""
    high = tl.load(sums + at)
    low = tl.load(rest + at) if rest is not None else high * 0.0
    return high, low


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def gradient_kernel(
    a,  # [tokens, HV, V]: do, or with `REVERSE` v
    b,  # [tokens, HV, V]: v, or do
    x,  # [tokens, H, K]: k, or q
    y,  # [tokens, H, K]: q, or k
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C]
    rest,  # [chunks, HV, C]
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it: the gradient, without `scale`
    out,  # [tokens, HV / GROUP, K]: the gradient of `y`, that of the heads of a program
    d_sums,  # [chunks, 3, PARTS, HV, C], for `gate_gradient_kernel`, as the following
    d_whole,  # [chunks, HV, tiles of K * BLOCKS]
    d_beta,  # [chunks, PARTS, HV, C], likewise, with `REVERSE`
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
    SHARES: tl.constexpr,
    REVERSE: tl.constexpr,
    FINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradient of queries, or with `REVERSE` of keys, and of the sums of gates that end, or begin, at a token.

    A program has a block of `BC` tokens of a chunk of `C`, a tile of the key axis, and `GROUP` heads of values that
    share queries and keys. `FINE`: the products with states, which are float32, are of factors in two parts.

    The gradients of sums of gates, and of `beta`, come in `PARTS` parts, which `gate_gradient_kernel` adds up: `SHARES`
    for each tile of keys. With one head to a program that is one, and otherwise one for each block of tokens at the
    other end of a sum, and one for the state.
    """
    tiles: tl.constexpr = (K + BK - 1) // BK
    BLOCKS: tl.constexpr = C // BC
    PARTS: tl.constexpr = tiles * SHARES
    KIND: tl.constexpr = BEGINNING if REVERSE else ENDING
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    part, row, group = split_program(tiles * BLOCKS, tl.num_programs(0) // (HV // GROUP * tiles * BLOCKS))
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    if lo >= hi:
        return
    tile = (part % tiles).to(tl.int32)
    block = (part // tiles).to(tl.int32)
    first = group * GROUP  # of its heads
    h = first // (HV // H)
    # Tokens are counted from the chunk's first, so that offsets in the chunk need 32 bits and not 64.
    size = tl.minimum(hi - lo, C).to(tl.int32)
    i = block * BC + tl.arange(0, BC)
    d = tile * BK + tl.arange(0, BK)
    a += (lo * HV + first) * V
    b += (lo * HV + first) * V
    x += (lo * H + h) * K
    y += (lo * H + h) * K
    # Keys do not write if `scale` is 0: see `sweep_kernel`.
    unit = scale
    if REVERSE:
        unit = tl.where(scale == 0.0, 1.0, scale)
    y_ = load_tile(y, i, size, 0, d, H, K)
    nothing = tl.zeros([BC], dtype=tl.float32)
    for head in range(GROUP):
        for other in range(SHARES - 1):
            at_sums = d_sums + ((row * 3 * PARTS + tile * SHARES + other) * HV + first + head) * C + i
            if REVERSE:
                tl.store(at_sums + TO_END * PARTS * HV * C, nothing)
                tl.store(at_sums + BEGINNING * PARTS * HV * C, nothing, mask=other < block)
                if d_beta is not None:
                    at_beta = ((row * PARTS + tile * SHARES + other) * HV + first + head) * C + i
                    tl.store(d_beta + at_beta, nothing, mask=other < block)
            else:
                tl.store(at_sums + ENDING * PARTS * HV * C, nothing, mask=other > block)

    # Through the state, which the gates from the chunk's start, or to its end, decay.
    acc = tl.zeros([BC, BK], dtype=tl.float32)
    # With one head to a program, the gradients of its sums of `KIND`, and of `beta`, are added up here.
    d_kind = tl.zeros([BC], dtype=tl.float32)
    d_strength = tl.zeros([BC], dtype=tl.float32)
    for head in range(GROUP):
        rh = row * HV + first + head
        high, low = _sums(sums, rest, rh * C + i)
        through = tl.zeros([BC, BK], dtype=tl.float32)
        for v0 in range(0, V, BV):
            d2 = v0 + tl.arange(0, BV)
            a_ = load_tile(a + head * V, i, size, 0, d2, HV, V)
            S_ = load_state((d_states if REVERSE else states) + rh * K * V, d, d2, K, V)
            if FINE:
                through = dot_split(a_, S_, DOT, through)
            else:
                through += dot(a_, S_, DOT)
        at_sums = d_sums + ((row * 3 * PARTS + tile * SHARES + SHARES - 1) * HV + first + head) * C + i
        if REVERSE:
            total, total_rest = _sums(sums, rest, rh * C + C - 1)
            through *= tl.exp2(total - high + (total_rest - low))[:, None]
            d_through = tl.sum(through * y_, 1)
            if beta is not None:
                beta_ = tl.load(beta + (lo + i) * HV + first + head, mask=i < size, other=0.0).to(tl.float32)
                if d_beta is not None:
                    if GROUP == 1:
                        d_strength += d_through
                    else:
                        at_beta = ((row * PARTS + tile * SHARES + SHARES - 1) * HV + first + head) * C + i
                        tl.store(d_beta + at_beta, d_through)
                through *= beta_[:, None]
                d_through *= beta_
            tl.store(at_sums + TO_END * PARTS * HV * C, d_through)
            if GROUP > 1:
                tl.store(at_sums + BEGINNING * PARTS * HV * C, nothing)
            # The sum over the whole chunk decays what goes through it, of which each block adds up some keys.
            whole = tl.zeros([FLAT], dtype=tl.float32)
            for at in range(0, BK // BLOCKS * V, FLAT):
                place = at + tl.arange(0, FLAT)
                from_tile = (tile * BK + block * (BK // BLOCKS)) * V + place
                mask = (place < BK // BLOCKS * V) & (from_tile < K * V)
                S_ = tl.load(states + rh * K * V + from_tile, mask=mask, other=0.0).to(tl.float32)
                whole += S_ * tl.load(d_states + rh * K * V + from_tile, mask=mask, other=0.0).to(tl.float32)
            whole = tl.sum(whole) * tl.exp2(total + total_rest)
            tl.store(d_whole + rh * tiles * BLOCKS + part, whole)
        else:
            through *= tl.exp2(high + low)[:, None]
            if GROUP == 1:
                d_kind += tl.sum(through * y_, 1)
            else:
                tl.store(at_sums + ENDING * PARTS * HV * C, tl.sum(through * y_, 1))
        acc += through

    # Through the tokens of the chunk, of which queries have those before them, and keys those after them.
    begin = block if REVERSE else 0
    end = BLOCKS if REVERSE else block + 1
    for other in range(begin, end):
        j = other * BC + tl.arange(0, BC)
        x_ = load_tile(x, j, size, 0, d, H, K)
        products = dot(y_, tl.trans(x_), DOT)
        joint = tl.zeros([BC, BC], dtype=tl.float32)
        for head in range(GROUP):
            rh = row * HV + first + head
            pairs = tl.zeros([BC, BC], dtype=tl.float32)
            for v0 in range(0, V, BV):
                d2 = v0 + tl.arange(0, BV)
                a_ = load_tile(a + head * V, i, size, 0, d2, HV, V)
                pairs += dot(a_, tl.trans(load_tile(b + head * V, j, size, 0, d2, HV, V)), DOT)
            high, low = _sums(sums, rest, rh * C + i)
            high_j, low_j = _sums(sums, rest, rh * C + j)
            between = tl.abs(high[:, None] - high_j[None, :] + (low[:, None] - low_j[None, :]))
            if REVERSE:
                pairs = tl.where(scale == 0.0, 0.0, pairs)
            # No gate decays the pair of a token with itself: it would drown the others in the gate's gradient.
            itself = tl.where(i[:, None] == j[None, :], pairs, 0.0)
            counts = i[:, None] < j[None, :] if REVERSE else i[:, None] > j[None, :]
            pairs = tl.where(counts, pairs * tl.exp2(-between), 0.0)
            if beta is not None and not REVERSE:
                beta_j = tl.load(beta + (lo + j) * HV + first + head, mask=j < size, other=0.0).to(tl.float32)
                pairs *= beta_j[None, :]
                itself *= beta_j[None, :]
            d_pairs = tl.sum(pairs * products, 1)
            if beta is not None and REVERSE:
                beta_i = tl.load(beta + (lo + i) * HV + first + head, mask=i < size, other=0.0).to(tl.float32)
                if d_beta is not None:
                    d_written = d_pairs + tl.sum(itself * products, 1)
                    if GROUP == 1:
                        d_strength += d_written
                    else:
                        at_beta = ((row * PARTS + tile * SHARES + other) * HV + first + head) * C + i
                        tl.store(d_beta + at_beta, d_written)
                d_pairs *= beta_i
                pairs *= beta_i[:, None]
                itself *= beta_i[:, None]
            if GROUP == 1:
                d_kind += d_pairs
            else:
                at_sums = d_sums + ((row * 3 * PARTS + tile * SHARES + other) * HV + first + head) * C + i
                tl.store(at_sums + KIND * PARTS * HV * C, d_pairs)
            joint += pairs + itself
        acc = split_dot(joint, x_, DOT, acc)
    if GROUP == 1:
        tl.store(d_sums + (((row * 3 + KIND) * PARTS + tile) * HV + first) * C + i, d_kind)
        if REVERSE and d_beta is not None:
            tl.store(d_beta + ((row * PARTS + tile) * HV + first) * C + i, d_strength)
    if out is not None:
        store_tile(out + (lo * (HV // GROUP) + group) * K, acc * unit, i, size, 0, d, HV // GROUP, K)
