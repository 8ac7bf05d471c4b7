"""Triton kernels of diagonal plus low rank: the WY factors of each chunk, before state passing.

In a chunk that begins with the state S, the reads of the vectors `a`, ``u_t = S*^T a_t``, solve the
triangular system ``(I - A_ab) u = a_read S + A_ak v``. ``A_ab[t, s]`` is the product of ``a`` of token `t`
and ``b`` of ``s < t``, decayed by the gates between them. `a_read` are the vectors ``a``, decayed by the
gates since the chunk's start; ``b_write`` and ``k_write`` are the writing vectors, decayed by the gates up to
its end. So the outputs and the update of the state are linear in S and v:

    Y = (I - A_ab)^-1        M = Y A_ak        X = A_qb Y                    P = scale * (A_qk + A_qb M)
    W_a = Y a_read           Q = q_read + X a_read                           W = k_write + M^T b_write

    u = W_a S + M v          o = scale * Q S + P v          S <- decay S + b_write^T (W_a S) + W^T v

`low_rank_product_kernel` computes the products of pairs of tokens, in the first row, for all chunks at once, and
`low_rank_factor_kernel` the factors of the state, in the second row. State passing is that of the delta rule, with
keys `b` that write the reads. The backward also needs Y and X: the gradient of ``a_read S + A_ak v`` is ``z =
Y^T (scale * A_qb^T do + b_write dS)``.

Where keys are alike, all of these are small differences of large terms. So Y, M and X are stored in two
parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.delta_rule.kernels import inverse
from flacompose.ops._recurrences.matrix.gates_of_channels import (
    FACTORISABLE_BOUND,
    C,
    exact_pairs,
    from_middle,
    load_clamped_gates,
    reads_gate,
    scaled_gate_size,
    select,
)
from flacompose.ops._tiles.blocks import (
    chunk_of_program,
    dot_in_parts,
    dot_of_parts,
    fine_dot,
    in_float32,
    in_parts,
    load_tile,
    numbers_of_tile,
    size_of_chunk,
    split_dot,
    store_tile,
    tile_of_program,
)


class Vectors(NamedTuple):
    q: Any  # [tokens, H, K], like all
    k: Any
    a: Any
    b: Any
    gk: Any = None


class Products(NamedTuple):
    Y: Any  # [chunks, H, C, C], transposed, like all
    M: Any
    X: Any
    Y_rest: Any  # the rounding errors, if Y, M and X are not in float32
    M_rest: Any
    X_rest: Any


class Factors(NamedTuple):
    Q: Any  # [tokens, H, K], like all
    W_a: Any
    W: Any
    b_write: Any


@triton.jit
def load_sums(gk, i, size, d, H, K: tl.constexpr, DOT: tl.constexpr):
    """The gates of channels `d`, and their sums from the chunk's middle to each write."""
    if gk is None:
        gk_ = tl.zeros([C, d.shape[0]], dtype=tl.float32)
        sums = gk_
    else:
        gk_ = load_clamped_gates(gk, i, size, 0, d, H, K)
        sums = select(from_middle(i[:, None], i[None, :]), gk_, DOT)
    return gk_, sums


@triton.jit
def sums_of_reads(gk_, sums, by_a, READ_BEFORE: tl.constexpr):
    """The sums of gates from the chunk's middle to each read: by `a` if `by_a`, otherwise by the query."""
    if READ_BEFORE:
        # A read stops before the token's gate. The difference is used only where both sums are below
        # `FACTORISABLE_BOUND`.
        sums = sums - tl.where(by_a, gk_.to(tl.float32), 0.0)
    return sums


@triton.jit
def _pairs_with(
    x, b, k, gk, A_b, A_k, i, size, d, H,
    K: tl.constexpr, FACTORISABLE: tl.constexpr, BY_A: tl.constexpr, READ_BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """`A_b` and `A_k` plus the products of `x` with `b` and `k` over channels `d`, and the largest sum of gates.

    `x` is `a` with `BY_A`, otherwise `q`. Rows are writing tokens, columns reading tokens. Where keys are alike,
    `b` erases nearly all that they write, so `b` and `k` are multiplied in two parts. So is `a`, as a system is
    solved with its products. A query is rounded once, wherever it is multiplied: the error is of the query alone.
    """
    at = i, size, 0, d, H, K
    gk_, sums = load_sums(gk, i, size, d, H, K, DOT)
    read_sums = sums_of_reads(gk_, sums, BY_A, READ_BEFORE)
    largest = tl.max(tl.maximum(tl.abs(sums), tl.abs(read_sums)))
    if FACTORISABLE:
        x_ = tl.trans(load_tile(x, *at) * tl.exp(read_sums))
        to_middle = tl.exp(-sums)
        if BY_A:
            parts = in_parts(x_, DOT)
            A_b = dot_of_parts(load_tile(b, *at) * to_middle, parts, DOT, A_b)
            A_k = dot_of_parts(load_tile(k, *at) * to_middle, parts, DOT, A_k)
        else:
            A_b = split_dot(load_tile(b, *at) * to_middle, x_, DOT, A_b)
            A_k = split_dot(load_tile(k, *at) * to_middle, x_, DOT, A_k)
    else:
        s = i[:, None]
        t = i[None, :]
        x_ = load_tile(x, *at)
        for writer in range(2):  # a loop halves the code that is compiled
            A_y = exact_pairs(
                x_, load_tile(b if writer == 0 else k, *at), gk_, s, t, BY_A and READ_BEFORE, DOT
            )
            A_b += tl.where(writer == 0, A_y, 0.0)
            A_k += tl.where(writer == 0, 0.0, A_y)
    return A_b, A_k, largest


@triton.jit
def _store_in_parts(x, rest, at, value):
    """Stores float32 `value` in `x`, and its rounding error in `rest`, if given."""
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + at, rounded)
    if rest is not None:
        tl.store(rest + at, (value - rounded.to(tl.float32)).to(rest.dtype.element_ty))


@triton.jit
def _dot_with_stored(x, rest, at, b, DOT: tl.constexpr, acc=None):
    """``acc + x @ b`` for a stored `x` in parts, and float32 `b`."""
    high = tl.load(x + at)
    b = in_parts(b, DOT)
    return dot_in_parts((high, high if rest is None else tl.load(rest + at)), b, DOT, acc)


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def low_rank_product_kernel(
    vectors,  # `Vectors`
    P,  # [chunks, H, C, C], transposed, like `Products`
    products,  # `Products`
    factorisable_chunks,  # [chunks, H], whether gates are factorisable
    cu_seqlens,
    T,
    N,
    scale,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills the products of pairs of tokens.

    With gates it is launched twice: with `FACTORISABLE` for the chunks whose gates are factorisable, which it marks
    in `factorisable_chunks`, and then for the others, because one kernel for both would need twice the registers.
    Registers are scarce, so sums of gates are computed again for the second step.
    """
    q, k, a, b, gk = vectors
    Y, M, X, Y_rest, M_rest, X_rest = products
    scale = in_float32(scale)
    row, h, lo, hi = chunk_of_program(T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * H + h
    if not FACTORISABLE:
        if tl.load(factorisable_chunks + rh) != 0:
            return
    first = (lo * H + h) * K
    q += first
    k += first
    a += first
    b += first
    if gk is not None:
        gk += first
    i = tl.arange(0, C)
    s, t = i[:, None], i[None, :]
    at = rh * C * C + s * C + t
    size = size_of_chunk(lo, hi, C)

    # 1. The reads by `a`: A_ab, A_ak, and with them Y and M.
    A_ab = tl.zeros([C, C], dtype=tl.float32)
    A_ak = tl.zeros([C, C], dtype=tl.float32)
    largest = tl.zeros([], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        A_ab, A_ak, largest_of_block = _pairs_with(
            a, b, k, gk, A_ab, A_ak, i, size, d, H, K, FACTORISABLE, True, READ_BEFORE, DOT
        )
        largest = tl.maximum(largest, largest_of_block, propagate_nan=tl.PropagateNan.ALL)
    if FACTORISABLE and gk is not None:
        tl.store(factorisable_chunks + rh, (largest < FACTORISABLE_BOUND).to(tl.int8))
        if not largest < FACTORISABLE_BOUND:
            return
    Y_ = inverse(-A_ab, DOT)
    M_ = fine_dot(tl.where(s < t, A_ak, 0.0), Y_, DOT)
    _store_in_parts(Y, Y_rest, at, Y_)
    _store_in_parts(M, M_rest, at, M_)

    # 2. The reads by queries: A_qb, A_qk, and with them P and X.
    A_qb = tl.zeros([C, C], dtype=tl.float32)
    A_qk = tl.zeros([C, C], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        A_qb, A_qk, _largest = _pairs_with(
            q, b, k, gk, A_qb, A_qk, i, size, d, H, K, FACTORISABLE, False, READ_BEFORE, DOT
        )
    A_qb = tl.where(s <= t, A_qb, 0.0)
    A_qk = tl.where(s <= t, A_qk, 0.0)
    tl.store(P + at, (fine_dot(M_, A_qb, DOT, A_qk) * scale).to(P.dtype.element_ty))
    _store_in_parts(X, X_rest, at, fine_dot(Y_, A_qb, DOT))


@triton.jit(do_not_specialize=["T", "N", "H"])
def low_rank_factor_kernel(
    vectors,  # `Vectors`
    products,  # `Products`, from `low_rank_product_kernel`, like `factorisable_chunks`
    factorisable_chunks,  # [chunks, H]
    factors,  # `Factors`
    chunk_decay,  # [chunks, H, K]
    at_middle,  # `Vectors`, decayed to the chunk's middle, for `gradients`
    factorisable_tiles,  # [chunks, H, tiles of K], whether gates are factorisable for their gradient too
    cu_seqlens,
    T,
    N,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    FACTORISABLE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills the factors of the state and, with factorisable gates, the given others, for a tile.

    It is launched as often as `low_rank_product_kernel`.
    """
    q, k, a, b, gk = vectors
    Y, M, X, Y_rest, M_rest, X_rest = products
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * H + h
    if gk is not None:
        if (tl.load(factorisable_chunks + rh) != 0) != FACTORISABLE:
            return
    first = (lo * H + h) * K
    if gk is not None:
        gk += first
    i = tl.arange(0, C)
    s, t = i[:, None], i[None, :]
    as_stored = rh * C * C + s * C + t
    transposed = rh * C * C + t * C + s
    size = size_of_chunk(lo, hi, C)
    d = numbers_of_tile(tile, BK)
    at = i, size, 0, d, H, K
    gk_, sums = load_sums(gk, i, size, d, H, K, DOT)
    FILLS_MIDDLE: tl.constexpr = FACTORISABLE and at_middle.q is not None

    # 1. The decays: from the chunk's middle where gates are factorisable; `early` and `late` extend them to
    # the chunk's start and end.
    if FACTORISABLE:
        early = tl.exp(tl.sum(tl.where(s < C // 2, gk_.to(tl.float32), 0.0), 0))[None, :]
        late = tl.exp(tl.sum(tl.where(s < C // 2, 0.0, gk_.to(tl.float32)), 0))[None, :]
        decay_a = tl.exp(sums_of_reads(gk_, sums, True, READ_BEFORE))
        if gk is not None:
            tl.store(chunk_decay + rh * K + d[None, :], early * late, mask=d[None, :] < K)
            if factorisable_tiles is not None:
                # `low_rank_product_kernel` has found the sums, also those to reads by `a`, below the bound. For the
                # gradient each gate must be, too.
                is_factorisable = (
                    tl.max(tl.maximum(tl.abs(sums), scaled_gate_size(gk_, DOT))) < FACTORISABLE_BOUND
                )
                tl.store(factorisable_tiles + rh * tiles + tile, is_factorisable.to(tl.int8))
    else:
        early = tl.full([1, BK], 1.0, tl.float32)
        late = early
        decay_a = tl.exp(select(reads_gate(s, t, READ_BEFORE), gk_, DOT))
        tl.store(chunk_decay + rh * K + d, tl.exp(tl.sum(gk_.to(tl.float32), 0)), mask=d < K)
        if factorisable_tiles is not None:
            tl.store(factorisable_tiles + rh * tiles + tile, 0)

    # 2. The readers.
    a_ = load_tile(a + first, *at) * decay_a
    if FILLS_MIDDLE:
        store_tile(at_middle.a + first, a_, *at)
    store_tile(factors.W_a + first, _dot_with_stored(Y, Y_rest, transposed, a_, DOT) * early, *at)
    if FACTORISABLE:
        decay_q = tl.exp(sums)
    else:
        decay_q = tl.exp(select(t <= s, gk_, DOT))
    q_ = load_tile(q + first, *at) * decay_q
    if FACTORISABLE:
        q_ = q_.to(DOT).to(tl.float32)  # as `low_rank_product_kernel` multiplies it
    if FILLS_MIDDLE:
        store_tile(at_middle.q + first, q_, *at)
    store_tile(factors.Q + first, _dot_with_stored(X, X_rest, transposed, a_, DOT, q_) * early, *at)

    # 3. The writers.
    if FACTORISABLE:
        decay_writes = tl.exp(-sums)
    else:
        decay_writes = tl.exp(select(t > s, gk_, DOT))
    b_ = load_tile(b + first, *at) * decay_writes
    if FILLS_MIDDLE:
        store_tile(at_middle.b + first, b_, *at)
    store_tile(factors.b_write + first, b_ * late, *at)
    k_ = load_tile(k + first, *at) * decay_writes
    if FILLS_MIDDLE:
        store_tile(at_middle.k + first, k_, *at)
    store_tile(factors.W + first, _dot_with_stored(M, M_rest, as_stored, b_, DOT, k_) * late, *at)
