"""Triton kernels of the gradients of diagonal plus low rank, from the states that state passing has stored.

The state has two reads: by queries, with the gradient do, and by `a`, with the gradient ``z``. It has two
writes: by `b`, of the reads ``u`` of `a`, and by keys, of the values. S is the state before a chunk, dS the
gradient of the state after it, and ``D[t, s]`` the sum of the gates ``s + 1`` to `t`, one number for each
channel. The gradient of a vector has two parts: one through the state, and one through the products of this
vector with the other vectors of its chunk. `low_rank_product_gradient_kernel` computes the gradients of these
products, which are the same for all channels:

    dA_qb[t, s] = scale * do_t . u_s        dA_qk[t, s] = scale * do_t . v_s        for s <= t
    dA_ab[t, s] = z_t . u_s                 dA_ak[t, s] = z_t . v_s                 for s < t

`low_rank_write_gradient_kernel` multiplies them by the reading vectors, and `low_rank_read_gradient_kernel`
by the writing ones:

    db_s = exp(D[end, s]) dS u_s           + sum over t of exp(D[t, s]) (dA_qb[t, s] q_t + dA_ab[t, s] a_t)
    dq_t = scale * exp(D[t, start]) S do_t + sum over s of exp(D[t, s]) (dA_qb[t, s] b_s + dA_qk[t, s] k_s)

and likewise for keys and for `a`, where the sums to a read by `a` end before the token's own gate, if `a`
reads before the decay.

The gradient of a gate is the sum of all terms whose exponents contain it, each multiplied by its vector. As
in the delta rule with gates of channels, one product relative to the chunk's middle contains all pairs if the
gates are factorisable; if they are not, there is one product for each level of blocks. For factorisable gates
`low_rank_factor_kernel` stores the vectors decayed to the middle, rounded to the dtype of products. A pair that a gate
does not decay is then added to the gate's gradient and subtracted as a product of the same rounded factors,
so it cancels.

Where keys are alike, `b` erases most of what keys have written. So the gradients of the pairs of `a` are kept
in two parts: with factorisable gates both are multiplied in bfloat16, otherwise their sum is, in TF32. There
is one part where products are in float32.

With factorisable gates, the kernels accumulate for each token and channel the gradient of the sum of gates
from the chunk's middle to that token. The sum of token C / 2 - 1 is empty, so its row is used for the gradient
that all gates of the first half share. The sum of the last token contains all gates of the second half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.delta_rule.channel_gradients import by_levels
from flacompose.ops._recurrences.matrix.gates_of_channels import (
    C,
    from_middle,
    load_clamped_gates,
    reads_gate,
    select,
)
from flacompose.ops._recurrences.matrix.low_rank.kernels import load_sums, sums_of_reads
from flacompose.ops._tiles.blocks import (
    dot,
    in_float32,
    load_state,
    load_tile,
    numbers_of_tile,
    size_of_chunk,
    store_tile,
    tile_of_program,
)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def low_rank_product_gradient_kernel(
    u,  # [tokens, H, V]
    v,  # [tokens, H, V]
    do,  # [tokens, H, V]
    du,  # [tokens, H, V], the product of `b` with the state's gradient
    z,  # [tokens, H, V]
    Y,  # [chunks, H, C, C], transposed
    X,  # [chunks, H, C, C], transposed
    pairs,  # [chunks, H, 1 + PARTS, 2, C, C]: of q, of a in `PARTS` parts, with b and k; no diagonals
    diagonal,  # [chunks, H, 2, C]: the diagonals of `dA_qb` and `dA_qk`
    cu_seqlens,
    T,
    N,
    scale,
    H,
    V: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `pairs`, `diagonal` and ``z = scale * X^T do + Y^T du``, one program per reader."""
    scale = in_float32(scale)
    reader, row, h, lo, hi = tile_of_program(2, T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    first = (lo * H + h) * V
    rh = row * H + h
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    dA_b = tl.zeros([C, C], dtype=tl.float32)
    dA_k = tl.zeros([C, C], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d = v0 + tl.arange(0, BV)
        at = i, size, 0, d, H, V
        x = load_tile(do + first, *at).to(tl.float32) * scale
        if reader == 1:
            x = dot(tl.load(X + rh * C * C + t * C + s), load_tile(do + first, *at), DOT) * scale
            x += dot(tl.load(Y + rh * C * C + t * C + s), load_tile(du + first, *at), DOT)
            store_tile(z + first, x, *at)
        dA_b += dot(x, tl.trans(load_tile(u + first, *at)), DOT)
        dA_k += dot(x, tl.trans(load_tile(v + first, *at)), DOT)
    if reader == 0:
        tl.store(diagonal + rh * 2 * C + i, tl.sum(tl.where(s == t, dA_b, 0.0), 1))
        tl.store(diagonal + (rh * 2 + 1) * C + i, tl.sum(tl.where(s == t, dA_k, 0.0), 1))
    dA_b = tl.where(s < t, dA_b, 0.0)
    dA_k = tl.where(s < t, dA_k, 0.0)
    PARTS: tl.constexpr = 1 if DOT == tl.float32 else 2
    pairs += (rh * (2 + 2 * PARTS) + reader * 2) * C * C + t * C + s
    rounded_b = dA_b.to(pairs.dtype.element_ty)
    rounded_k = dA_k.to(pairs.dtype.element_ty)
    tl.store(pairs, rounded_b)
    tl.store(pairs + C * C, rounded_k)
    if reader == 1 and PARTS == 2:
        tl.store(pairs + 2 * C * C, (dA_b - rounded_b).to(pairs.dtype.element_ty))
        tl.store(pairs + 3 * C * C, (dA_k - rounded_k).to(pairs.dtype.element_ty))


@triton.jit
def _state_dots(x, y, S, size, H, V: tl.constexpr, d, K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """``x S^T`` and ``y S^T`` of ``x, y [C, V]`` and the rows `d` of ``S [K, V]``."""
    i = tl.arange(0, C)
    x_S = tl.zeros([C, d.shape[0]], dtype=tl.float32)
    y_S = tl.zeros([C, d.shape[0]], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        S_ = load_state(S, d, d2, K, V)
        x_S += dot(load_tile(x, i, size, 0, d2, H, V), S_, DOT)
        y_S += dot(load_tile(y, i, size, 0, d2, H, V), S_, DOT)
    return x_S, y_S


@triton.jit
def _two_dots(x_sum, y_sum, pairs, stride, vectors, DOT: tl.constexpr):
    x_sum += dot(tl.load(pairs), vectors, DOT)
    y_sum += dot(tl.load(pairs + stride), vectors, DOT)
    return x_sum, y_sum


@triton.jit
def _gradient_of_gates(d_rows, DOT: tl.constexpr):
    """The gradients of gates from the gradients of their sums from the chunk's middle."""
    j = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    return select(tl.where((t == C // 2 - 1) & (j < C // 2), 1.0, from_middle(t, j)), d_rows, DOT)


@triton.jit(do_not_specialize=["T", "N", "H"])
def low_rank_write_gradient_kernel(
    vectors,  # `Vectors`
    at_middle,  # `Vectors`, from `low_rank_factor_kernel`
    factorisable_tiles,  # [chunks, H, tiles of K]
    u,  # [tokens, H, V]
    v,  # [tokens, H, V]
    pairs,  # [chunks, H, 1 + PARTS, 2, C, C], from `low_rank_product_gradient_kernel`, like `diagonal`
    diagonal,  # [chunks, H, 2, C]
    states,  # [chunks, H, K, V], before each chunk
    d_states,  # [chunks, H, K, V], after it
    dk,  # [tokens, H, K]
    db,  # [tokens, H, K]
    dgk_part,  # [tokens, H, K], if wanted: this kernel's part of the gradient of gates
    cu_seqlens,
    T,
    N,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradients of `b` and of keys, for a chunk and a tile of channels.

    With gates it is launched twice: with `FACTORISABLE` for the tiles whose gates are factorisable, and then for the
    others. The second launch adds all pairs to the gradient of gates here; the first adds only the gradients
    of sums to writes.
    """
    q, k, a, b, gk = vectors
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * H + h
    if gk is not None:
        if (tl.load(factorisable_tiles + rh * tiles + tile) != 0) != FACTORISABLE:
            return
    first = (lo * H + h) * K
    first_v = (lo * H + h) * V
    PARTS: tl.constexpr = 1 if DOT == tl.float32 else 2
    # From the first parts of the pairs of `a` to the second, if there are any.
    REST: tl.constexpr = (PARTS - 1) * 2 * C * C
    pairs += rh * ((2 + 2 * PARTS) * C * C)
    diagonal += rh * 2 * C
    d_states += rh * K * V
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    d = numbers_of_tile(tile, BK)
    at = i, size, 0, d, H, K
    GATES: tl.constexpr = dgk_part is not None

    # 1. The gates that decay the state before the chunk.
    d_gates = tl.zeros([C, BK], dtype=tl.float32)
    if GATES:
        d_total = tl.zeros([BK], dtype=tl.float32)
        # Not in the loop of the product: Triton 3.6 overwrites an operand that a product still reads if it is
        # read twice.
        for v0 in range(0, V, BV):
            d2 = v0 + tl.arange(0, BV)
            S = load_state(states + rh * K * V, d, d2, K, V).to(tl.float32)
            d_total += tl.sum(S * load_state(d_states, d, d2, K, V), 0)
        d_total *= tl.exp(tl.sum(load_clamped_gates(gk + first, *at).to(tl.float32), 0))
    # 2. The writes of `b` and keys, through the state after the chunk, and then through pairs.
    if FACTORISABLE:
        early_row = t == C // 2 - 1
        gk_, sums = load_sums(gk if gk is None else gk + first, i, size, d, H, K, DOT)
        to_end = tl.exp(tl.sum(tl.where(t < C // 2, 0.0, gk_.to(tl.float32)), 0))[None, :]
        db_, dk_ = _state_dots(u + first_v, v + first_v, d_states, size, H, V, d, K, BV, DOT)
        db_ *= to_end
        dk_ *= to_end
        if GATES:
            d_end = load_tile(at_middle.b + first, *at) * db_ + load_tile(at_middle.k + first, *at) * dk_
            d_end = d_total + tl.where(t == C - 1, tl.sum(d_end, 0)[None, :], 0.0)
            d_gates += tl.where(early_row | (t == C - 1), d_end, 0.0)
        pairs += s * C + t
        db_, dk_ = _two_dots(db_, dk_, pairs, C * C, load_tile(at_middle.q + first, *at), DOT)
        for part in range(PARTS):
            at_a = pairs + (2 + 2 * part) * C * C
            db_, dk_ = _two_dots(db_, dk_, at_a, C * C, load_tile(at_middle.a + first, *at), DOT)
        if GATES:
            d_rows = load_tile(at_middle.b + first, *at) * db_ + load_tile(at_middle.k + first, *at) * dk_
            d_gates = _gradient_of_gates(d_gates - tl.where(early_row, 0.0, d_rows), DOT)
        db_ *= tl.exp(-sums)
        dk_ *= tl.exp(-sums)
    else:
        gk_ = load_clamped_gates(gk + first, *at)
        to_end = tl.exp(select(s > t, gk_, DOT))
        db_, dk_ = _state_dots(u + first_v, v + first_v, d_states, size, H, V, d, K, BV, DOT)
        db_ *= to_end
        dk_ *= to_end
        b_ = load_tile(b + first, *at).to(tl.float32)
        k_ = load_tile(k + first, *at).to(tl.float32)
        if GATES:
            d_gates += d_total[None, :] + select(t > s, b_ * db_ + k_ * dk_, DOT)
        unused = tl.zeros([C, BK], dtype=tl.float32)
        a_ = load_tile(a + first, *at).to(tl.float32)
        q_ = load_tile(q + first, *at).to(tl.float32)
        for writer in range(2):
            y = tl.where(writer == 0, b_, k_)
            _, d_y, d_gates = by_levels(q_, y, gk_, pairs, unused, unused, d_gates, GATES, False, DOT)
            at_a = pairs + 2 * C * C
            _, d_y, d_gates = by_levels(a_, y, gk_, at_a, unused, d_y, d_gates, GATES, READ_BEFORE, DOT, REST)
            db_ += tl.where(writer == 0, d_y, 0.0)
            dk_ += tl.where(writer == 0, 0.0, d_y)
            pairs += C * C
    if GATES:
        store_tile(dgk_part + first, d_gates, *at)
    # 3. No gate decays the pair of a token with itself. It is added last, here and below, since it would
    # drown the others in the gate's gradient.
    q_ = load_tile(q + first, *at)
    store_tile(db + first, db_ + tl.load(diagonal + i)[:, None] * q_, *at)
    store_tile(dk + first, dk_ + tl.load(diagonal + C + i)[:, None] * q_, *at)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def low_rank_read_gradient_kernel(
    vectors,  # `Vectors`
    at_middle,  # `Vectors`, from `low_rank_factor_kernel`
    factorisable_tiles,  # [chunks, H, tiles of K]
    do,  # [tokens, H, V]
    z,  # [tokens, H, V]
    pairs,  # [chunks, H, 1 + PARTS, 2, C, C], from `low_rank_product_gradient_kernel`, like `diagonal`
    diagonal,  # [chunks, H, 2, C]
    states,  # [chunks, H, K, V], before each chunk
    dgk_part,  # [tokens, H, K], from `low_rank_write_gradient_kernel`
    dq,  # [tokens, H, K]
    da,  # [tokens, H, K]
    dgk,  # [tokens, H, K]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradients of queries, `a` and, if `dgk` is given, gates, launched like `low_rank_write_gradient_kernel`."""
    scale = in_float32(scale)
    q, k, a, b, gk = vectors
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * H + h
    if gk is not None:
        if (tl.load(factorisable_tiles + rh * tiles + tile) != 0) != FACTORISABLE:
            return
    first = (lo * H + h) * K
    first_v = (lo * H + h) * V
    PARTS: tl.constexpr = 1 if DOT == tl.float32 else 2
    # From the first parts of the pairs of `a` to the second, if there are any.
    REST: tl.constexpr = (PARTS - 1) * 2 * C * C
    pairs += rh * ((2 + 2 * PARTS) * C * C)
    diagonal += rh * 2 * C
    states += rh * K * V
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    d = numbers_of_tile(tile, BK)
    at = i, size, 0, d, H, K

    # 1. The reads of queries and `a`, through the state before the chunk.
    dq_, da_ = _state_dots(do + first_v, z + first_v, states, size, H, V, d, K, BV, DOT)
    dq_ *= scale
    # 2. The reads through the pairs of the chunk, and the gates that decay all reads.
    if FACTORISABLE:
        early_row = t == C // 2 - 1
        gk_, sums = load_sums(gk if gk is None else gk + first, i, size, d, H, K, DOT)
        from_start = tl.exp(tl.sum(tl.where(t < C // 2, gk_.to(tl.float32), 0.0), 0))[None, :]
        dq_ *= from_start
        da_ *= from_start
        if dgk is not None:
            d_start = load_tile(at_middle.q + first, *at) * dq_ + load_tile(at_middle.a + first, *at) * da_
            d_gates = tl.where(early_row, tl.sum(d_start, 0)[None, :], 0.0)
        pairs += t * C + s
        for writer in range(2):
            y = load_tile((at_middle.b if writer == 0 else at_middle.k) + first, *at)
            dq_, da_ = _two_dots(dq_, da_, pairs + writer * C * C, 2 * C * C, y, DOT)
            if PARTS == 2:
                da_ += dot(tl.load(pairs + (4 + writer) * C * C), y, DOT)
        if dgk is not None:
            d_read_a = load_tile(at_middle.a + first, *at) * da_
            d_rows = d_read_a + load_tile(at_middle.q + first, *at) * dq_
            d_gates = _gradient_of_gates(d_gates + tl.where(early_row, 0.0, d_rows), DOT)
            # The sum up to a read by `a` lacks the token's own gate.
            if READ_BEFORE:
                d_gates -= d_read_a
        dq_ *= tl.exp(sums)
        da_ *= tl.exp(sums_of_reads(gk_, sums, True, READ_BEFORE))
    else:
        gk_ = load_clamped_gates(gk + first, *at)
        q_ = load_tile(q + first, *at).to(tl.float32)
        a_ = load_tile(a + first, *at).to(tl.float32)
        dq_ *= tl.exp(select(s <= t, gk_, DOT))
        da_ *= tl.exp(select(reads_gate(t, s, READ_BEFORE), gk_, DOT))
        d_gates = tl.zeros([C, BK], dtype=tl.float32)
        if dgk is not None:
            d_gates = select(t <= s, q_ * dq_, DOT) + select(reads_gate(s, t, READ_BEFORE), a_ * da_, DOT)
        unused = tl.zeros([C, BK], dtype=tl.float32)
        for writer in range(2):
            y = load_tile((b if writer == 0 else k) + first, *at).to(tl.float32)
            dq_, _, _g = by_levels(q_, y, gk_, pairs, dq_, unused, d_gates, False, False, DOT)
            at_a = pairs + 2 * C * C
            da_, _, _g = by_levels(a_, y, gk_, at_a, da_, unused, d_gates, False, READ_BEFORE, DOT, REST)
            pairs += C * C
    # 3. The results, with the pair of a token with itself.
    if dgk is not None:
        store_tile(dgk + first, d_gates + load_tile(dgk_part + first, *at), *at)
    store_tile(da + first, da_, *at)
    dq_ += tl.load(diagonal + i)[:, None] * load_tile(b + first, *at)
    dq_ += tl.load(diagonal + C + i)[:, None] * load_tile(k + first, *at)
    store_tile(dq + first, dq_, *at)
