"""Triton kernels of the delta rule's gradients with a gate for each channel.

The second table of `plan` says which chunks and tiles they compute beside the kernels for Hopper.

The state has two reads per token: by the key, or by `a` where it is given, before the token writes and with
the gradient ``-dv``; and by the query, with the gradient ``do``. The key writes ``u = beta r``. `S` is the
state before a chunk, ``dS`` the gradient of the state after it, and ``D[t, s]`` the sum of the gates ``s +
1`` to `t`, one number for each channel. `delta_channel_product_gradient_kernel` computes the gradients of the
products of queries and keys, without the factor beta. They are the same for all channels:

    d_qk[t, s] = scale * do_t . r_s  for s <= t        d_ak[t, s] = -dv_t . r_s  for s < t

`delta_channel_gradient_kernel` multiplies them by the vectors:

    dq_t      = scale * exp(D[t, start]) S do_t + sum over s of beta_s d_qk[t, s] exp(D[t, s]) k_s
    dk_read_t =       - exp(D[t, start]) S dv_t + sum over s of beta_s d_ak[t, s] exp(D[t, s]) k_s
    written_s = exp(D[end, s]) dS r_s + sum over t of exp(D[t, s]) (d_qk[t, s] q_t + d_ak[t, s] a_t)
    da_t      = dk_read_t        dk_s = beta_s written_s        dbeta_s = written_s . k_s

Where `a` is the key, its gradient is the sum of both.

The gradient of a gate is the sum of all terms whose exponents contain it, each multiplied by its query or
key. As in channel decay, which explains this, one product relative to the chunk's middle contains all pairs if
the gates are factorisable. If they are not, there is one product for each level of blocks. Beta is a weight
of the writing keys, and never a divisor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.gates_of_channels import (
    FACTORISABLE_BOUND,
    LEVELS,
    C,
    from_middle,
    in_local_sum,
    load_clamped_gates,
    middle_sums,
    rounded_dot,
    scaled_gate_size,
    select,
    siblings,
    size_of_sums,
    tf32_rounded,
)
from flacompose.ops._tiles.blocks import (
    chunk_of_program,
    dot,
    in_float32,
    load_numbers,
    load_state,
    load_tile,
    numbers_of_tile,
    size_of_chunk,
    store_tile,
    tile_of_program,
)


@triton.jit(do_not_specialize=["T", "N", "HV", "scale"])
def delta_channel_product_gradient_kernel(
    values,  # `ValueVectors`
    stored,  # `StoredPairs`
    cu_seqlens,
    T,
    N,
    scale,
    HV,
    V: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """``d_qk[t, s] = scale * do_t . r_s`` for ``s <= t``, and ``d_ak[t, s] = -dv_t . r_s`` for ``s < t``.

    They are rounded here for products in TF32.
    """
    do, r, dv = values
    pairs, diagonal = stored.pairs, stored.diagonal
    scale = in_float32(scale)
    row, h, lo, hi = chunk_of_program(T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    first = (lo * HV + h) * V
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    d_qk = tl.zeros([C, C], dtype=tl.float32)
    d_ak = tl.zeros([C, C], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d = v0 + tl.arange(0, BV)
        r_ = tl.trans(load_tile(r + first, i, size, 0, d, HV, V))
        d_qk += dot(load_tile(do + first, i, size, 0, d, HV, V), r_, DOT)
        d_ak += dot(load_tile(dv + first, i, size, 0, d, HV, V), r_, DOT)
    d_qk *= scale
    rh = row * HV + h
    tl.store(diagonal + rh * C + i, tl.sum(tl.where(s == t, d_qk, 0.0), 1))
    pairs += rh * 2 * C * C + t * C + s
    tl.store(pairs, tf32_rounded(tl.where(s < t, d_qk, 0.0), DOT))
    tl.store(pairs + C * C, tf32_rounded(tl.where(s < t, -d_ak, 0.0), DOT))


@triton.jit
def of_state(x, S, size, HV, V: tl.constexpr, d, K: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr):
    """``x S^T`` of ``x [C, V]`` and the rows `d` of ``S [K, V]``."""
    out = tl.zeros([C, d.shape[0]], dtype=tl.float32)
    for v0 in range(0, V, BV):
        d2 = v0 + tl.arange(0, BV)
        x_ = load_tile(x, tl.arange(0, C), size, 0, d2, HV, V)
        out += dot(x_, load_state(S, d, d2, K, V), DOT)
    return out


@triton.jit
def by_levels(
    x, writer, g, pairs, d_reader, written, d_gates, GATES: tl.constexpr, READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr, rest: tl.constexpr = 0,
):  # fmt: skip
    """Adds the pairs of readers `x` and `writer`, one product for each level of blocks, to the three gradients.

    At each level, readers are the rows of odd blocks, and writers the rows of even ones. If the rounding
    errors of `pairs` are stored, they begin `rest` elements after `pairs`.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    for level in range(LEVELS):
        odd = ((t >> level) & 1) == 1
        weight = tl.exp(select(in_local_sum(t, s, level, READ_BEFORE), g, DOT))
        role = tl.where(odd, x, writer)
        # The pairs where a reader is the row, and their transpose where a writer is.
        pair = pairs + tl.where(odd, t * C + s, s * C + t)
        between = tl.load(pair, mask=siblings(t, s, level), other=0.0).to(tl.float32)
        if rest != 0:
            between += tl.load(pair + rest, mask=siblings(t, s, level), other=0.0).to(tl.float32)
        out = weight * rounded_dot(between, tf32_rounded(role * weight, DOT), DOT)
        d_reader += tl.where(odd, out, 0.0)
        written += tl.where(odd, 0.0, out)
        if GATES:
            d_gates += select(in_local_sum(s, t, level, READ_BEFORE), role * out, DOT)
    return d_reader, written, d_gates


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def delta_channel_gradient_kernel(
    # One kernel computes the gradients of readers and of writers, because both need the same gates, states
    # and pairs.
    vectors,  # `KeyVectors`
    gk,  # [tokens, HV, K]
    values,  # `ValueVectors`
    # `StoredPairs`, from `delta_channel_product_gradient_kernel` or `hopper_channel_block_gradient_kernel`
    stored,
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it
    made,  # `KeyGradients`
    dgk,  # [tokens, HV, K]
    factorisable_tiles,  # [chunks, HV, tiles of K], whether gates are factorisable, on Hopper in blocks or chunks
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The gradients of queries, keys, `beta` and, if given, of gates, for a chunk and a tile of channels.

    It is launched twice: with `FACTORISABLE` for the tiles whose gates are factorisable, which it marks in
    `factorisable_tiles`, and then for the others, because one kernel for both would need twice the registers. After
    the kernels for Hopper only the second launch is needed. Registers are scarce, so queries and keys are processed
    one after the other, and inputs are loaded again rather than kept.
    """
    beta = vectors.beta
    do, r, dv = values
    dq, dk, da, dbeta = made
    pairs, diagonal = stored.pairs, stored.diagonal
    scale = in_float32(scale)
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    factorisable_tiles += rh * tiles + tile
    if not FACTORISABLE:
        if tl.load(factorisable_tiles) != 0:
            return
    i = tl.arange(0, C)
    t, s = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    d = numbers_of_tile(tile, BK)
    first = lo * HV + h
    q, k, a, _ = vectors
    of_keys = (lo * H + h // (HV // H)) * K
    q += of_keys
    k += of_keys
    if a is not None:
        a += of_keys
    key_reader = k if a is None else a
    gk += first * K
    r += first * V
    do += first * V
    dv += first * V
    at_q = i, size, 0, d, H, K
    at_g = i, size, 0, d, HV, K
    g = load_clamped_gates(gk, *at_g)
    if FACTORISABLE:
        middle, middle_ = middle_sums(g, t, s, False, DOT)
        is_factorisable = (
            tl.max(tl.maximum(size_of_sums(middle, middle_), scaled_gate_size(g, DOT))) < FACTORISABLE_BOUND
        )
        tl.store(factorisable_tiles, is_factorisable.to(tl.int8))
        if not is_factorisable:
            return
    pairs += rh * 2 * C * C
    diagonal += rh * C
    states += rh * K * V
    d_states += rh * K * V
    beta_t = load_numbers(beta, first, i, size, HV)[:, None]

    # 1. The writes of keys, through the state after the chunk, and the gates that decay the state before it.
    written = of_state(r, d_states, size, HV, V, d, K, BV, DOT)
    d_total = tl.zeros([BK], dtype=tl.float32)
    if dgk is not None:
        # Not in the loop of the product: Triton 3.6 overwrites an operand that a product still reads if it is
        # read twice.
        for v0 in range(0, V, BV):
            d2 = v0 + tl.arange(0, BV)
            S = load_state(states, d, d2, K, V).to(tl.float32)
            d_total += tl.sum(S * load_state(d_states, d, d2, K, V), 0)
    d_total *= tl.exp(tl.sum(g.to(tl.float32), 0))

    d_reader = tl.zeros([C, BK], dtype=tl.float32)
    if FACTORISABLE:
        late = t >= C // 2
        to_middle = tl.exp(middle)
        writer = tf32_rounded(load_tile(k, *at_q) * beta_t * tl.exp(-middle), DOT)
        from_start = tl.exp(tl.sum(tl.where(late, 0.0, g.to(tl.float32)), 0))[None, :]
        written *= tl.exp(tl.sum(tl.where(late, g.to(tl.float32), 0.0), 0))[None, :]
        # A row of `d_gates` is the gradient of the sum of gates from the middle to its token. The last early
        # token has no gate in that sum, so its row holds the gradient that all early gates share. The last
        # sum contains all late gates.
        early_row = t == C // 2 - 1
        d_gates = tl.where(early_row, d_total[None, :], 0.0)
        d_gates += tl.where(t == C - 1, (d_total + tl.sum(writer * written, 0))[None, :], 0.0)
    else:
        from_start = tl.exp(select(s <= t, g, DOT))
        written *= tl.exp(select(s > t, g, DOT))
        d_gates = tl.zeros([C, BK], dtype=tl.float32) + d_total[None, :]
        if dgk is not None:
            d_gates += select(t > s, load_tile(k, *at_q) * beta_t * written, DOT)
    # 2. The reads of queries and keys, through the state before the chunk and through pairs. The pairs also
    # add to the writes of keys.
    for reader in range(2):
        is_query = reader == 0
        x = load_tile(q if is_query else key_reader, *at_q)
        d_reader = of_state(do if is_query else dv, states, size, HV, V, d, K, BV, DOT)
        d_reader *= (scale if is_query else -1.0) * from_start
        of_pairs = pairs + reader * C * C
        if FACTORISABLE:
            # A pair that a gate does not decay is added to its gradient and subtracted. Both times it is a
            # product of the same rounded factors, so it cancels.
            x = tf32_rounded(x * to_middle, DOT)
            if dgk is not None:
                d_gates += tl.where(early_row, tl.sum(x * d_reader, 0)[None, :], 0.0)
            d_reader += rounded_dot(tl.load(of_pairs + t * C + s), writer, DOT)
            written += rounded_dot(tl.load(of_pairs + s * C + t), x, DOT)
            if dgk is not None:
                d_gates += tl.where(early_row, 0.0, x * d_reader)
            d_reader *= to_middle
        else:
            if dgk is not None:
                d_gates += select(t <= s, x * d_reader, DOT)
            k_beta = load_tile(k, *at_q) * beta_t
            d_reader, written, d_gates = by_levels(
                x, k_beta, g, of_pairs, d_reader, written, d_gates, dgk is not None, False, DOT
            )
        if is_query:
            # No gate decays the pair of a token with itself. It is added last, here and below, since it would
            # drown the others in the gate's gradient.
            k_beta = load_tile(k, *at_q) * beta_t
            store_tile(dq + first * K, d_reader + tl.load(diagonal + i)[:, None] * k_beta, *at_g)
    # 3. The gradients of gates, keys and `beta`.
    if FACTORISABLE:
        if dgk is not None:
            writer = tf32_rounded(load_tile(k, *at_q) * beta_t * tl.exp(-middle), DOT)
            d_gates -= tl.where(early_row, 0.0, writer * written)
            sums = tl.where((s == C // 2 - 1) & (t < C // 2), 1.0, from_middle(s, t))
            d_gates = select(sums, d_gates, DOT)
        written *= tl.exp(-middle)
    if dgk is not None:
        store_tile(dgk + first * K, d_gates, *at_g)
    written += tl.load(diagonal + i)[:, None] * load_tile(q, *at_q)
    d_beta = tl.sum(written * load_tile(k, *at_q), 1)
    tl.store(dbeta + (lo * tiles + tile) * HV + h + i * tiles * HV, d_beta, mask=i < size)
    if a is None:
        store_tile(dk + first * K, d_reader + written * beta_t, *at_g)
    else:
        store_tile(dk + first * K, written * beta_t, *at_g)
        store_tile(da + first * K, d_reader, *at_g)
