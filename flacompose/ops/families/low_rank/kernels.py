"""The Triton kernel for diagonal plus low rank that comes before the sweeps: the pairs of each chunk.

Within a chunk that begins with the state S, what the vectors `a` read, ``u_t = S*^T a_t``, solves the triangular system
``(I - A_ab) u = a_read S + A_ak v``. Here ``A_ab[t, s]`` is the product of ``a`` of token `t` and ``b`` of ``s < t``,
decayed by the gates between them, `a_read` are the vectors ``a``, decayed by the gates since the chunk's start, and
``b_write`` and ``k_write`` those that write, decayed by the gates up to its end. So what the chunk adds to the state
and to the outputs is linear in S and v:

    Y = (I - A_ab)^-1        M = Y A_ak        W_a = Y a_read        Q = q_read + A_qb Y a_read
    W = k_write + M^T b_write                  P = scale * (A_qk + A_qb M)

    u = W_a S + M v        o = scale * Q S + P v        S <- total S + b_write^T (W_a S) + W^T v

`pair_kernel` makes these matrices for all chunks at once. The sweeps are those of the delta rule, with keys that write
what is read. The backward also takes Y and ``Z = scale * (A_qb Y)^T``, with which the gradient of ``a_read S + A_ak v``
is ``z = Z do + Y^T b_write dS``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import (
    dot,
    dot_of_parts,
    find_chunk,
    fine_dot,
    in_parts,
    load_tile,
    split_program,
    store_tile,
)
from flacompose.ops.families.delta_rule.kernels import inverse
from flacompose.ops.families.vector_decay.gates import (
    MILD_BOUND,
    C,
    exact_pairs,
    from_middle,
    load_gates,
    reads_gate,
    select,
)


@triton.jit
def load_sums(gk, i, size, h, d, H, K: tl.constexpr, DOT: tl.constexpr):
    """The gates of channels `d`, and their sums from the chunk's middle to each write."""
    if gk is None:
        g = tl.zeros([C, d.shape[0]], dtype=tl.float32)
        sums = g
    else:
        g = load_gates(gk, i, size, h, d, H, K)
        sums = select(from_middle(i[:, None], i[None, :]), g, DOT)
    return g, sums


@triton.jit
def sums_of_reads(g, sums, of_a, READ_BEFORE: tl.constexpr):
    """The sums of gates from the chunk's middle to each read, by `a` if `of_a` says so, and else by the query."""
    if READ_BEFORE:
        # A read stops before the token's gate. This difference of sums is used where both are below `MILD_BOUND`.
        sums = sums - tl.where(of_a, g.to(tl.float32), 0.0)
    return sums


@triton.jit
def _pairs_with(
    x, b, k, gk, of_b, of_k, i, size, d, H,
    K: tl.constexpr, MILD: tl.constexpr, OF_A: tl.constexpr, READ_BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """`of_b` and `of_k` with the products of channels `d` of readers `x` with ``b`` and keys, and their sums' size.

    Rows are tokens that write, columns tokens that read. The products of `a` are in two parts, as a system is solved
    with them: where keys are alike, its solution is a small difference of large terms.
    """
    at = i, size, 0, d, H, K
    g, sums = load_sums(gk, i, size, 0, d, H, K, DOT)
    sums_of_x = sums_of_reads(g, sums, OF_A, READ_BEFORE)
    largest = tl.max(tl.maximum(tl.abs(sums), tl.abs(sums_of_x)))
    if MILD:
        reader = tl.trans(load_tile(x, *at) * tl.exp(sums_of_x))
        to_middle = tl.exp(-sums)
        if OF_A:
            parts = in_parts(reader, DOT)
            of_b = dot_of_parts(load_tile(b, *at) * to_middle, parts, DOT, of_b)
            of_k = dot_of_parts(load_tile(k, *at) * to_middle, parts, DOT, of_k)
        else:
            of_b += dot(load_tile(b, *at) * to_middle, reader, DOT)
            of_k += dot(load_tile(k, *at) * to_middle, reader, DOT)
    else:
        s = i[:, None]
        t = i[None, :]
        reader = load_tile(x, *at)
        of_b += exact_pairs(reader, load_tile(b, *at), g, s, t, OF_A and READ_BEFORE, DOT)
        of_k += exact_pairs(reader, load_tile(k, *at), g, s, t, OF_A and READ_BEFORE, DOT)
    return of_b, of_k, largest


@triton.jit(do_not_specialize=["T", "N", "H", "scale"])
def pair_kernel(
    # More than 25 parameters, as one program makes all that the sweeps take from the vectors of its chunk.
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    a,  # [tokens, H, K]
    b,  # [tokens, H, K]
    gk,  # [tokens, H, K]
    Q,  # [tokens, H, K]
    W_a,  # [tokens, H, K]
    W,  # [tokens, H, K]
    b_write,  # [tokens, H, K]
    total,  # [chunks, H, K]
    P,  # [chunks, H, C, C], transposed
    M,  # [chunks, H, C, C], transposed, as are the following
    Y,  # [chunks, H, C, C]
    Z,  # [chunks, H, C, C]
    mild,  # [chunks, H]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    MILD: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `Q`, `W_a`, `W`, `b_write`, `P`, `total` where there are gates, and what is given of the following.

    It runs twice where there are gates, for the chunks whose gates are mild (`MILD`), which it notes, and for the
    others: one kernel for both would need twice the registers. These are scarce, so that gates are summed again for
    each of the three steps.
    """
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    row, h, _ = split_program(tl.num_programs(0) // H, H)
    lo, hi = find_chunk(row, T, N, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * H + h
    if not MILD:
        if tl.load(mild + rh) != 0:
            return
    # Tokens are counted from the chunk's first, so that offsets in the chunk need 32 bits and not 64.
    first = (lo * H + h) * K
    q += first
    k += first
    a += first
    b += first
    if gk is not None:
        gk += first
    i = tl.arange(0, C)
    s = i[:, None]
    t = i[None, :]
    at_pair = rh * C * C + s * C + t
    size = tl.minimum(hi - lo, C).to(tl.int32)

    # 1. What `a` reads: A_ab, A_ak, and with them Y and M.
    of_b = tl.zeros([C, C], dtype=tl.float32)
    of_k = tl.zeros([C, C], dtype=tl.float32)
    largest = tl.zeros([], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        of_b, of_k, of_block = _pairs_with(
            a, b, k, gk, of_b, of_k, i, size, d, H, K, MILD, True, READ_BEFORE, DOT
        )
        largest = tl.maximum(largest, of_block, propagate_nan=tl.PropagateNan.ALL)
    if MILD and gk is not None:
        tl.store(mild + rh, (largest < MILD_BOUND).to(tl.int8))
        if not largest < MILD_BOUND:
            return
    solved = inverse(-of_b, DOT)  # Y, transposed
    of_u = fine_dot(tl.where(s < t, of_k, 0.0), solved, DOT)  # M, transposed
    if M is not None:
        tl.store(M + at_pair, of_u.to(M.dtype.element_ty))

    # 2. What queries read: A_qb, A_qk, and with them P and Z.
    of_b = tl.zeros([C, C], dtype=tl.float32)
    of_k = tl.zeros([C, C], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        of_b, of_k, of_block = _pairs_with(
            q, b, k, gk, of_b, of_k, i, size, d, H, K, MILD, False, READ_BEFORE, DOT
        )
    of_b = tl.where(s <= t, of_b, 0.0)
    of_k = tl.where(s <= t, of_k, 0.0)
    tl.store(P + at_pair, (fine_dot(of_u, of_b, DOT, of_k) * scale).to(P.dtype.element_ty))
    of_b = fine_dot(solved, of_b, DOT)  # A_qb Y, transposed
    if Y is not None:
        tl.store(Y + at_pair, solved.to(Y.dtype.element_ty))
        tl.store(Z + at_pair, (of_b * scale).to(Z.dtype.element_ty))

    # 3. What meets the state: W_a, Q, b_write and W, one after the other, as registers are scarce.
    solved = tl.trans(solved)
    of_b = tl.trans(of_b)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        at = i, size, 0, d, H, K
        g, sums = load_sums(gk, i, size, 0, d, H, K, DOT)
        if MILD:
            early = tl.exp(tl.sum(tl.where(s < C // 2, g.to(tl.float32), 0.0), 0))[None, :]
            late = tl.exp(tl.sum(tl.where(s < C // 2, 0.0, g.to(tl.float32)), 0))[None, :]
            if gk is not None:
                tl.store(total + rh * K + d[None, :], early * late, mask=d[None, :] < K)
            a_ = load_tile(a, *at) * tl.exp(sums_of_reads(g, sums, True, READ_BEFORE))
            parts = in_parts(a_, DOT)
            store_tile(W_a + first, dot_of_parts(solved, parts, DOT) * early, *at)
            q_ = load_tile(q, *at) * tl.exp(sums)
            store_tile(Q + first, dot_of_parts(of_b, parts, DOT, q_) * early, *at)
            to_middle = tl.exp(-sums)
            b_ = load_tile(b, *at) * to_middle
            store_tile(b_write + first, b_ * late, *at)
            k_ = load_tile(k, *at) * to_middle
            store_tile(W + first, fine_dot(of_u, b_, DOT, k_) * late, *at)
        else:
            tl.store(total + rh * K + d, tl.exp(tl.sum(g.to(tl.float32), 0)), mask=d < K)
            a_ = load_tile(a, *at) * tl.exp(select(reads_gate(s, t, READ_BEFORE), g, DOT))
            store_tile(W_a + first, fine_dot(solved, a_, DOT), *at)
            q_ = load_tile(q, *at) * tl.exp(select(t <= s, g, DOT))
            store_tile(Q + first, fine_dot(of_b, a_, DOT, q_), *at)
            to_end = tl.exp(select(t > s, g, DOT))
            b_ = load_tile(b, *at) * to_end
            store_tile(b_write + first, b_, *at)
            k_ = load_tile(k, *at) * to_end
            store_tile(W + first, fine_dot(of_u, b_, DOT, k_), *at)
