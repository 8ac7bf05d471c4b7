"""The Triton kernel of the delta rule's WY factors with a gate for each channel.

`delta_channel_factor_kernel` computes the factors of each chunk for the state passing of `kernels`. On Hopper,
`hopper_channel_factor_kernel` of `hopper/channel_factors` computes the chunks in which 8 tokens sum to above -45.
Queries and reading keys are stored decayed from the chunk's start, as `q_decayed` and `k_decayed`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.delta_rule.kernels import solve
from flacompose.ops._recurrences.matrix.gates_of_channels import (
    BLOCK_LEVELS,
    FACTORISABLE_BOUND,
    LEVELS,
    C,
    from_block_middle,
    in_local_sum,
    in_same_block,
    load_clamped_gates,
    middle_sums,
    scaled_gate_size,
    select,
    siblings,
)
from flacompose.ops._tiles.blocks import (
    chunk_of_program,
    clamp_gate,
    dot_in_parts,
    dot_of_parts,
    fine_dot,
    in_float32,
    in_parts,
    load_numbers,
    load_tile,
    size_of_chunk,
    store_tile,
)


@triton.jit
def _factorisable_sums(gk, i, size, d, HV, K: tl.constexpr, DOT: tl.constexpr):
    """The gates of channels `d`, their sums from a chunk's middle, and the size that must be bounded."""
    # Kept in float32 as well: rounding a number and widening it again takes slow instructions.
    g = clamp_gate(load_tile(gk, i, size, 0, d, HV, K)).to(tl.float32)
    middle, _ = middle_sums(g.to(gk.dtype.element_ty), i[:, None], i[None, :], False, DOT)
    return g, middle, tl.maximum(tl.max(tl.abs(middle), 1), tl.max(scaled_gate_size(g, DOT), 1))


@triton.jit
def _factorisable_pairs(
    g, middle, q, k, a, q_decayed, k_decayed, chunk_decay, qk, ak, i, size, d, H, HV, K: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """`qk` and `ak` with the products of channels `d`, the writing keys, and the late half's decay.

    The decayed queries and reading keys are stored, and so is `chunk_decay`.
    """
    at_q = i, size, 0, d, H, K
    at_g = i, size, 0, d, HV, K
    early = tl.sum(tl.where(i[:, None] < C // 2, g, 0.0), 0)
    late = tl.sum(tl.where(i[:, None] < C // 2, 0.0, g), 0)
    tl.store(chunk_decay + d, tl.exp(early + late), mask=d < K)
    to_middle = tl.exp(middle)
    from_start = tl.exp(early)[None, :]
    k_ = load_tile(k, *at_q)
    # Registers are scarce: the readers are in shared memory until the writer is computed.
    reader = load_tile(q, *at_q) * to_middle
    store_tile(q_decayed, reader * from_start, *at_g)
    reader_q = in_parts(tl.trans(reader), DOT)
    writer = k_ / to_middle
    if a is None:
        reader = k_ * to_middle
    else:
        reader = load_tile(a, *at_q) * to_middle
    store_tile(k_decayed, reader * from_start, *at_g)
    reader_k = in_parts(tl.trans(reader), DOT)
    qk = dot_of_parts(writer, reader_q, DOT, qk)
    ak = dot_of_parts(writer, reader_k, DOT, ak)
    return qk, ak, writer, tl.exp(late)


@triton.jit
def _pairs(q, k, a, g, s, t, IN_BLOCKS: tl.constexpr, DOT: tl.constexpr):
    """The products of `q` and of `a` with the writing keys `k`, at ``[s, t]``, decayed by any gates.

    At each level of blocks the readers are the rows of odd blocks, and the writers the rows of even ones.
    With `IN_BLOCKS` one product contains all pairs in blocks of 16 tokens, where gates are factorisable about
    the middle of the block.
    """
    qk = tl.where(s == t, tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None], 0.0)
    ak = tl.zeros([C, C], dtype=tl.float32)
    first = 0
    if IN_BLOCKS:
        middle = select(from_block_middle(s, t), g, DOT)
        if tl.max(tl.abs(middle)) < FACTORISABLE_BOUND:
            to_middle = tl.exp(middle)
            writer = in_parts(k / to_middle, DOT)
            within = in_same_block(s, t)
            qk = tl.where(within, dot_in_parts(writer, in_parts(tl.trans(q * to_middle), DOT), DOT), 0.0)
            ak = tl.where(within, dot_in_parts(writer, in_parts(tl.trans(a * to_middle), DOT), DOT), 0.0)
            first += BLOCK_LEVELS
    for level in range(first, LEVELS):
        weight = tl.exp(select(in_local_sum(s, t, level, False), g, DOT))
        odd = ((s >> level) & 1) == 1
        role = tl.where(odd, q, k) * weight
        qk += tl.where(siblings(s, t, level), fine_dot(role, tl.trans(role), DOT), 0.0)
        role = tl.where(odd, a, k) * weight
        ak += tl.where(siblings(s, t, level), fine_dot(role, tl.trans(role), DOT), 0.0)
    return qk, ak


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def delta_channel_factor_kernel(
    vectors,  # `KeyVectors`
    gk,  # [tokens, HV, K]
    W,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C], transposed
    Y,  # [chunks, HV, C, C], transposed, in float32
    q_decayed,  # [tokens, HV, K]
    k_decayed,  # [tokens, HV, K]
    chunk_decay,  # [chunks, HV, K]
    factorisable_chunks,  # [chunks, HV], whether gates are factorisable
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: tl.constexpr,
    BK: tl.constexpr,
    KEEP: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `W`, `P`, `q_decayed`, `k_decayed`, `chunk_decay` and, if given, `Y`.

    It is launched twice: with `FACTORISABLE` for the chunks whose gates are factorisable, which it marks in
    `factorisable_chunks`, and then for the others, because one kernel for both would need twice the registers. On
    Hopper another kernel replaces the first launch, and leaves the chunks that are not factorisable in blocks.
    `IN_BLOCKS` is false then, which takes less time to compile.

    If the gates are factorisable, all decays follow from the sums of gates to the chunk's middle. The sums to
    the chunk's start and to its end differ from them by one number per channel, the same for all tokens. With
    `KEEP` the writing keys, which are computed from these sums, are kept until the last product. Otherwise
    they are computed again.
    """
    beta = vectors.beta
    scale = in_float32(scale)
    row, h, lo, hi = chunk_of_program(T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    if not FACTORISABLE:
        if tl.load(factorisable_chunks + rh) != 0:
            return
    first = lo * HV + h
    q, k, a, _ = vectors
    of_keys = (lo * H + h // (HV // H)) * K
    q += of_keys
    k += of_keys
    if a is not None:
        a += of_keys
    gk += first * K
    W += first * K
    q_decayed += first * K
    k_decayed += first * K
    chunk_decay += rh * K
    i = tl.arange(0, C)
    s, t = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    # 1. The readers, and the products of pairs of tokens, if this launch computes the chunk. Rows are
    # writing tokens, columns reading tokens. The sums of gates are the same for both, because a token reads
    # after its gate.
    qk = tl.zeros([C, C], dtype=tl.float32)
    ak = tl.zeros([C, C], dtype=tl.float32)
    writers: tl.tuple = ()
    to_end: tl.tuple = ()
    if FACTORISABLE and KEEP:
        for d0 in tl.static_range(0, K, BK):
            d = d0 + tl.arange(0, BK)
            g, middle, largest = _factorisable_sums(gk, i, size, d, HV, K, DOT)
            if not tl.max(largest) < FACTORISABLE_BOUND:
                # The second launch overwrites all that is stored so far.
                tl.store(factorisable_chunks + rh, 0)
                return
            qk, ak, writer, late = _factorisable_pairs(
                g, middle, q, k, a, q_decayed, k_decayed, chunk_decay, qk, ak, i, size, d, H, HV, K, DOT
            )
            writers += (in_parts(writer, DOT),)
            to_end += (late,)
    elif FACTORISABLE:
        # A loop, because an unrolled body for many blocks would not fit in the instruction cache.
        largest = tl.zeros([C], dtype=tl.float32)
        for d0 in range(0, K, BK):
            d = d0 + tl.arange(0, BK)
            g, middle, of_block = _factorisable_sums(gk, i, size, d, HV, K, DOT)
            largest = tl.maximum(largest, of_block, propagate_nan=tl.PropagateNan.ALL)
            if tl.max(largest) < FACTORISABLE_BOUND:
                qk, ak, writer, late = _factorisable_pairs(
                    g, middle, q, k, a, q_decayed, k_decayed, chunk_decay, qk, ak, i, size, d, H, HV, K, DOT
                )
        if not tl.max(largest) < FACTORISABLE_BOUND:
            tl.store(factorisable_chunks + rh, 0)
            return
    else:
        for d0 in range(0, K, BK):
            d = d0 + tl.arange(0, BK)
            at_q = i, size, 0, d, H, K
            at_g = i, size, 0, d, HV, K
            g = clamp_gate(load_tile(gk, *at_g)).to(tl.float32)
            g_ = g.to(gk.dtype.element_ty)
            q_ = load_tile(q, *at_q)
            k_ = load_tile(k, *at_q)
            read = tl.exp(select(t <= s, g_, DOT))
            store_tile(q_decayed, q_ * read, *at_g)
            a_ = k_
            if a is not None:
                a_ = load_tile(a, *at_q)
            store_tile(k_decayed, a_ * read, *at_g)
            tl.store(chunk_decay + d, tl.exp(tl.sum(g, 0)), mask=d < K)
            of_block = _pairs(q_, k_, a_, g_, s, t, IN_BLOCKS, DOT)
            qk += of_block[0]
            ak += of_block[1]
    if FACTORISABLE:
        tl.store(factorisable_chunks + rh, 1)
    # 2. Y and P.
    beta_i = load_numbers(beta, first, i, size, HV)
    qk = tl.where(s <= t, qk * scale, 0.0)
    weighted = solve(qk, ak, beta_i, P + rh * C * C, None if Y is None else Y + rh * C * C, DOT)
    # 3. W.
    if FACTORISABLE and KEEP:
        for tile in tl.static_range(0, (K + BK - 1) // BK):
            d = tile * BK + tl.arange(0, BK)
            written = dot_of_parts(weighted, writers[tile], DOT) * to_end[tile][None, :]
            store_tile(W, written, i, size, 0, d, HV, K)
    else:
        for d0 in range(0, K, BK):
            d = d0 + tl.arange(0, BK)
            at_g = i, size, 0, d, HV, K
            written = load_tile(k, i, size, 0, d, H, K) * tl.exp(
                select(t > s, load_clamped_gates(gk, *at_g), DOT)
            )
            store_tile(W, fine_dot(weighted, written, DOT), *at_g)
