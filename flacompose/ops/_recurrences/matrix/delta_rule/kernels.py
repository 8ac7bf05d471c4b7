"""Triton kernels of the delta rule: the WY factors of each chunk, and state passing in both directions.

The delta rule writes the error of each value, ``r_t = v_t - S'^T a_t``. In a chunk that begins with the state
S, the errors solve ``(I + A diag(beta)) r = e`` with ``e = v - k_read S``. ``A[t, s]`` is the product of the
reading key ``a`` of token `t`, which is its key unless `a` is given, and the key of a token ``s < t``,
decayed by the gates between them. `k_read` are the reading keys, decayed by the gates since the chunk's
start. (If ``a`` reads S before its decay, instead of S', the sum of gates of a reading key ends at the token
before it.) So the outputs and the update of the state are linear in ``e``:

    r = Y e, with Y = (I + A diag(beta))^-1        W = Y^T diag(beta) k_write        P = scale * (q . k) diag(beta) Y

`delta_factor_kernel` computes these WY factors for all chunks at once. State passing then takes two dependent
products a chunk. `delta_state_passing_kernel` passes the state from chunk to chunk, in registers:

    e = v - k_read S          o = scale * q_read S + P e          S <- decay S + W^T e

`delta_backward_state_passing_kernel` goes backwards in time, dS being the gradient of the state after a chunk:

    dv = P^T do + W dS        dS <- decay dS + scale * q_read^T do - k_read^T dv

In the low-rank recurrence other keys `b` write the values that the reading keys have read. It has WY factors
of its own and the same kernels of state passing, which then compute

    u = k_read S            o = scale * q_read S + P v            S <- decay S + b^T u + W^T v
    dv = P^T do + W dS      du = b dS                             dS <- decay dS + scale * q_read^T do + k_read^T du

and, instead of r, the sum ``u + Y v``.

Both kernels hold the state and all intermediate results transposed (`[V, K]`): the result of each product is
then the left factor of the next one, and stays in registers.

A long row is cut into segments, whose states are passed at the same time. Before that, one pass starts every
segment at zero, and another one at the identity matrix: together they give the transition of the segment.
`delta_join_kernel` computes the state before each segment from these transitions.

Where gates of heads are strong, the state at a segment's end does not depend on the state at its start. So
`delta_factor_kernel` also computes the log-norm bound of each chunk, `log_norm`: the logarithm of a bound of the norm
of its transition matrix. The two passes then cover only the chunks whose influence has not decayed to zero.

A row that is too short for two more passes is cut into segments too, if `WARM_STARTS` is set: the warm start. If
the state decays to zero in the last `CHUNKS_EXAMINED` chunks of a segment, for all heads, the next segment has programs
of its own, which start at the state that those chunks reach from zero. Otherwise the programs of the segment
continue through the next one.

A gate of a head scales whole rows, so it is applied to the products with the state. Gates of channels are
contained in `k_read` and `q_read` themselves, which `delta_channel_factor_kernel` stores in place of
`delta_factor_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.gates_of_channels import siblings
from flacompose.ops._recurrences.matrix.gates_of_heads import (
    decayed_pairs,
    decayed_pairs_before,
    decayed_rows,
    decays_of_reads,
)
from flacompose.ops._tiles.blocks import (
    chunks_of_segment,
    dot,
    dot_of_parts,
    find_segment,
    find_sequence,
    fine_dot,
    in_float32,
    in_parts,
    is_idle,
    load_numbers,
    load_tile,
    numbers_of_tile,
    size_of_chunk,
    split_dot,
    split_program,
    store_tile,
    tile_of_program,
)

BLOCK = tl.constexpr(16)  # tokens of the blocks that are inverted side by side
# The base-2 logarithm of a bound that no finite state below 2^43 survives in float32.
ZERO_BELOW = tl.constexpr(-193.0)
# How many chunks at a segment's end are examined before a warm start. They are processed twice, so a segment
# that needs more of them gains little by one.
CHUNKS_EXAMINED = tl.constexpr(16)
MAX_WARM_START_HEADS = tl.constexpr(64)  # of a row, because all of them are examined


@triton.jit
def inverse(upper, DOT: tl.constexpr):
    """``(I + upper)^-1``, where only the part of `upper` above the diagonal counts.

    The inverses of diagonal blocks of 1, 2, 4, ... tokens give the inverse. As in substitution, no
    intermediate result is much larger than the inverses themselves. A power series would lose all digits
    where keys are alike.
    """
    C: tl.constexpr = upper.shape[0]
    N: tl.constexpr = C // BLOCK
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    between_16 = in_parts(tl.where(siblings(i, j, 4) & (i < j), upper, 0.0), DOT)
    between_32 = in_parts(tl.where(siblings(i, j, 5) & (i < j), upper, 0.0), DOT)
    # Up to blocks of 16 tokens, one such product for each is enough.
    own = (tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(own, tl.reshape(upper, [N, BLOCK, N, BLOCK]), 0.0), 2)
    s = tl.arange(0, BLOCK)[None, :, None]
    t = tl.arange(0, BLOCK)[None, None, :]
    Y = tl.where(s == t, 1.0, 0.0) - tl.where(siblings(s, t, 0) & (s < t), blocks, 0.0)
    for level in range(1, 4):
        between = tl.where(siblings(s, t, level) & (s < t), blocks, 0.0)
        Y -= fine_dot(fine_dot(Y, between, DOT), Y, DOT)
    Y = tl.reshape(tl.where(own, Y[:, :, None, :], 0.0), [C, C])
    Y -= fine_dot(dot_of_parts(Y, between_16, DOT), Y, DOT)
    if C > 32:
        Y -= fine_dot(dot_of_parts(Y, between_32, DOT), Y, DOT)
    return Y


@triton.jit
def solve(qk, ak, beta, P, Y, DOT: tl.constexpr):
    """Solves a chunk's triangular system: fills `P` and, if given, `Y`; returns ``(diag(beta) Y)^T``.

    ``qk[s, t]`` and ``ak[s, t]`` are the products of the key of token s with the query and the reading
    key of token t.
    """
    C: tl.constexpr = ak.shape[0]
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    qk = in_parts(qk, DOT)
    solved = inverse(ak * beta[:, None], DOT)
    if Y is not None:
        tl.store(Y + at, solved)
    solved *= beta[None, :]
    tl.store(P + at, dot_of_parts(solved, qk, DOT).to(P.dtype.element_ty))
    return solved


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def delta_factor_kernel(
    vectors,  # `KeyVectors`
    gates,  # `GateSums`
    W,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C], transposed
    Y,  # [chunks, HV, C, C], transposed, in float32
    log_norm,  # [chunks, HV], the log-norm bound for `decays_to_zero`; only with `sums` and without `a`
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `W`, `P` and, if given, `Y` and `log_norm`."""
    q, k, a, beta = vectors
    scale = in_float32(scale)
    # Heads of values that share queries and keys are neighbours, so that queries and keys are read from
    # memory once.
    of_group, row, hk, lo, hi = tile_of_program(HV // H, T, N, H, cu_seqlens, C)
    h = hk * (HV // H) + of_group
    if lo >= hi:
        return
    rh = row * HV + h
    first = lo * HV + h
    of_keys = (lo * H + hk) * K
    i = tl.arange(0, C)
    s, t = i[:, None], i[None, :]
    size = size_of_chunk(lo, hi, C)
    beta_i = load_numbers(beta, first, i, size, HV)
    # 1. The products of pairs of tokens, decayed by the gates between them. Rows are writing tokens, columns
    # reading tokens.
    qk = tl.zeros([C, C], dtype=tl.float32)
    ak = tl.zeros([C, C], dtype=tl.float32)
    k_squared = tl.zeros([C], dtype=tl.float32)
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        q_ = load_tile(q + of_keys, i, size, 0, d, H, K)
        k_ = load_tile(k + of_keys, i, size, 0, d, H, K)
        qk += dot(k_, tl.trans(q_), DOT)
        a_ = k_ if a is None else load_tile(a + of_keys, i, size, 0, d, H, K)
        ak += dot(k_, tl.trans(a_), DOT)
        if log_norm is not None:
            # Not the diagonal of `ak`: Triton 3.6 does not compile its sum for Blackwell.
            k_squared += tl.sum(k_.to(tl.float32) * k_.to(tl.float32), 1)
    qk = tl.where(s <= t, qk * scale, 0.0)
    sums, rest = gates
    if sums is not None:
        sums += rh * C
        if rest is not None:
            rest += rh * C
        between = decayed_pairs(sums, rest, C)
        qk *= between
        if READ_BEFORE:
            between = decayed_pairs_before(sums, rest, C, 1)
        ak *= between
    if log_norm is not None:
        # A token multiplies a state by exp(g) (I - beta k k^T), whose norm is exp(g) max(1, |1 - beta k . k|).
        along_key = tl.abs(1.0 - beta_i * k_squared)
        total = tl.load(sums + C - 1)
        if rest is not None:
            total += tl.load(rest + C - 1)
        tl.store(log_norm + rh, total + tl.sum(tl.log2(tl.maximum(along_key, 1.0)), 0))
    # 2. Y and P.
    weighted = solve(qk, ak, beta_i, P + rh * C * C, None if Y is None else Y + rh * C * C, DOT)
    if sums is not None:
        from_start, to_end, of_chunk = decayed_rows(sums, rest, C)
        weighted *= to_end[None, :]
    # 3. W.
    for d0 in range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        written = split_dot(weighted, load_tile(k + of_keys, i, size, 0, d, H, K), DOT)
        store_tile(W + first * K, written, i, size, 0, d, HV, K)


@triton.jit
def _load_transposed(x, token, end, stride, d, D):
    """``[d, token]`` of one head of ``x [tokens, H, D]`` in float32; `stride` separates its tokens."""
    at = x + (token * stride)[None, :] + d[:, None]
    return tl.load(at, mask=(token < end)[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _store_transposed(x, value, token, end, h, d, H, D):
    at = x + (token * H + h)[None, :] * D + d[:, None]
    tl.store(at, value.to(x.dtype.element_ty), mask=(token < end)[None, :] & (d < D)[:, None])


@triton.jit
def _of_part(part: tl.constexpr, dv, K, V, BK: tl.constexpr):
    """The channels of a part of the keys, and offsets and mask of ``[dv, channels]`` in ``[K, V]``."""
    dk = part * BK + tl.arange(0, BK)
    return dk, dv[:, None] + dk[None, :] * V, (dv < V)[:, None] & (dk < K)[None, :]


@triton.jit
def _load_parts(x, dv, K: tl.constexpr, V, BK: tl.constexpr):
    """``x [K, V]`` transposed, one tile ``[dv, BK]`` for each part of the key axis; zeros if it is absent."""
    parts = ()
    for part in tl.static_range((K + BK - 1) // BK):
        if x is None:
            tile = tl.zeros([dv.shape[0], BK], tl.float32)
        else:
            _, at, inside = _of_part(part, dv, K, V, BK)
            tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        parts += (tile,)
    return parts


@triton.jit
def _store_parts(x, parts, dv, K: tl.constexpr, V, BK: tl.constexpr):
    for part in tl.static_range((K + BK - 1) // BK):
        _, at, inside = _of_part(part, dv, K, V, BK)
        tl.store(x + at, parts[part].to(x.dtype.element_ty), mask=inside)


@triton.jit
def _read_parts(
    x, y, parts, states, size, H, dv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """``S x_t`` and, if `y` is given, ``S y_t``, as ``[dv, tokens]``, of one head of ``x, y [tokens, H, K]``.

    The state in `parts` is also stored in `states`, if given. The parts are processed one after the other, so
    that the registers hold only one of them in the dtype of products.
    """
    i = tl.arange(0, C)
    of_x = tl.zeros([dv.shape[0], C], dtype=tl.float32)
    of_y = tl.zeros([dv.shape[0], C], dtype=tl.float32)
    for part in tl.static_range((K + BK - 1) // BK):
        dk, at, inside = _of_part(part, dv, K, V, BK)
        if states is not None:
            tl.store(states + at, parts[part].to(states.dtype.element_ty), mask=inside)
        of_x += dot(parts[part], tl.trans(load_tile(x, i, size, 0, dk, H, K)), DOT)
        if y is not None:
            of_y += dot(parts[part], tl.trans(load_tile(y, i, size, 0, dk, H, K)), DOT)
    return of_x, of_y


@triton.jit
def decays_to_zero(log_norm, HV, begin, stop, turns, REVERSE: tl.constexpr):
    """In how many last chunks of `begin` to `stop` a state decays to zero, and whether it does.

    In float32 the state after them then equals the state that they reach from zero. ``log_norm [chunks, HV]``,
    of one head, is the base-2 logarithm of a bound of the norm of each chunk's transition matrix. With
    `REVERSE` the first chunks are counted instead. If the state does not decay to zero, all chunks are
    counted.

    `turns` is a range from 0: the chunks that are examined at a time.
    """
    chunks = stop - begin
    count = chunks + 1
    before = 0.0
    for first in range(0, chunks, turns.shape[0]):
        i = first + turns
        chunk = begin + i if REVERSE else stop - 1 - i
        of_chunk = tl.load(log_norm + chunk * HV, mask=i < chunks, other=0.0)
        is_enough = before + tl.cumsum(of_chunk, 0) <= ZERO_BELOW
        count = tl.minimum(count, tl.min(tl.where(is_enough, i + 1, chunks + 1), 0))
        before += tl.sum(of_chunk, 0)
    return tl.minimum(count, chunks), count <= chunks


@triton.jit
def all_decay_to_zero(log_norm, HV, begin, stop, ranges, REVERSE: tl.constexpr):
    """Whether the states of all heads decay to zero in a segment's last `CHUNKS_EXAMINED` chunks.

    With `REVERSE`, in the first `CHUNKS_EXAMINED` chunks. ``log_norm [chunks, HV]`` has all heads, and `ranges` are
    as in `chunks_to_pass`. A head whose log-norm bound is NaN does not prevent a warm start. Its NaN still reaches
    the next segment: `decays_to_zero` is false for that head, so the state is passed through the whole segment.
    """
    _, asked, heads = ranges
    chunk = ((begin if REVERSE else tl.maximum(begin, stop - CHUNKS_EXAMINED)) + asked)[:, None]
    is_head = heads < HV
    of_chunks = tl.load(
        log_norm + chunk * HV + heads[None, :], mask=(chunk < stop) & is_head[None, :], other=0.0
    )
    is_kept = is_head & (tl.sum(of_chunks, 0) > ZERO_BELOW)
    return tl.max(is_kept.to(tl.int32), 0) == 0


@triton.jit
def chunks_of_program(log_norm, HV, segment, SEGMENTS, chunks, ranges, REVERSE: tl.constexpr):
    """The chunks that a segment's program covers with warm starts, and whether they include the last segment.

    ``log_norm [chunks, HV]`` has all heads, from the row's first chunk on. A program covers nothing unless the
    states of all heads decay to zero in the segment before its own: the program of an earlier segment
    continues through it. Otherwise it runs from its own segment to the end of the next one in which all
    states decay to zero. The condition concerns all heads, because a row is finished only when its slowest
    head is.
    """
    turn = (SEGMENTS - 1 - segment if REVERSE else segment).to(tl.int32)
    starts = turn == 0
    last = SEGMENTS - 1
    for i in range(tl.maximum(turn - 1, 0), SEGMENTS - 1):
        begin, stop = find_segment(SEGMENTS - 1 - i if REVERSE else i, SEGMENTS, chunks)
        is_zero = all_decay_to_zero(log_norm, HV, begin, stop, ranges, REVERSE)
        starts |= is_zero & (i < turn)
        last = tl.where(is_zero & (i >= turn), tl.minimum(last, i), last)
    begin, stop = find_segment(segment, SEGMENTS, chunks)
    if REVERSE:
        begin, _ = find_segment(SEGMENTS - 1 - last, SEGMENTS, chunks)
        begin = tl.where(starts, begin, stop)
    else:
        _, stop = find_segment(last, SEGMENTS, chunks)
        stop = tl.where(starts, stop, begin)
    return begin, stop, starts & (last == SEGMENTS - 1)


@triton.jit
def chunks_that_count(log_norm, h, HV, begin, stop, ranges, REVERSE: tl.constexpr, WARM_STARTS: tl.constexpr):
    """How many chunks of a segment determine the state of head `h` at its end, if it starts at zero.

    With `REVERSE`, the state at its start. Also whether every earlier state decays to zero in these chunks.
    With warm starts the number is 0 unless the states of all heads decay to zero: the next segment has no
    programs of its own then, so nothing reads the result.
    """
    count, is_zero = decays_to_zero(log_norm + h, HV, begin, stop, ranges[0], REVERSE)
    if WARM_STARTS:
        count = tl.where(all_decay_to_zero(log_norm, HV, begin, stop, ranges, REVERSE), count, 0)
    return count, is_zero


@triton.jit
def chunks_to_pass(
    log_norm, h, HV, segment, SEGMENTS, chunks, begin, stop, ranges, ENDS: tl.constexpr,
    IDENTITY: tl.constexpr, WARM_STARTS: tl.constexpr,
):  # fmt: skip
    """The chunks of a segment, from `begin` to `stop`, that the forward state passing covers.

    Also whether this program reaches the end of the row, and the number on the diagonal of the matrix at
    which an `IDENTITY` pass starts: 0 if every state decays to zero in the segment. A pass for `ENDS`
    computes the segment's transition: the state reached from zero or, with `IDENTITY`, the matrix. `ranges`
    are three ranges from 0: the 64 chunks that `decays_to_zero` examines at a time; `CHUNKS_EXAMINED` chunks,
    along the first axis of a matrix; and `MAX_WARM_START_HEADS` heads, along its second.
    """
    one = 1.0
    is_last = segment == SEGMENTS - 1
    if WARM_STARTS and not ENDS:
        begin, stop, is_last = chunks_of_program(log_norm, HV, segment, SEGMENTS, chunks, ranges, False)
    elif log_norm is not None:
        count, is_zero = chunks_that_count(log_norm, h, HV, begin, stop, ranges, False, WARM_STARTS)
        if IDENTITY:  # the matrix is zero
            count = tl.where(is_zero, 0, count)
            one = tl.where(is_zero, 0.0, 1.0)
        begin = stop - count
    return begin, stop, is_last, one


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "SEGMENTS", "scale"])
def delta_state_passing_kernel(
    # One kernel for all recurrences that erase, because only their factors differ: gates of heads or of
    # channels, and the keys that write.
    factors,  # `WYFactors`
    decays,  # `ChunkDecays`
    passed,  # `PassedStates`
    v,  # [tokens, HV, V], zeros if absent; v_token elements separate its tokens
    o,  # [tokens, HV, V]
    r,  # [tokens, HV, V]
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    SEGMENTS,
    v_token,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IDENTITY: tl.constexpr,
    WARM_STARTS: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """State passing forwards in time: fills `o`, `r` and, from `initial`, the other states of `passed`, if given.

    One program passes the state through one segment of one sequence, or with `WARM_STARTS` through the segments
    that `chunks_of_program` returns; the `ends` of segments in which not all heads decay to zero are then
    meaningless. Without `initial` it starts at zero or, with `IDENTITY`, at the identity matrix. The state is
    a tuple with one tile for each `BK` keys.
    """
    q_read, k_read, W, b, P, Y = factors
    sums, rest, chunk_decay, log_norm = decays
    initial, states, ends, final = passed
    scale = in_float32(scale)
    tile, h, ns = split_program(tl.cdiv(V, BV), HV)
    segment = ns // N
    if not IDENTITY:  # the pass backwards in time needs the last segment's matrix
        if is_idle(segment, SEGMENTS, ends, o is not None or r is not None or states is not None):
            return
    nh = ns % N * HV + h
    at_end = (ns * HV + h) * K * V
    hk = h // (HV // HK)
    dv = numbers_of_tile(tile, BV)
    lo, hi, row0, chunks, begin, stop = chunks_of_segment(ns % N, segment, SEGMENTS, T, cu_seqlens, C)
    S = _load_parts(None if initial is None else initial + at_end, dv, K, V, BK)
    if log_norm is not None:
        log_norm += row0 * HV
    ranges = tl.arange(0, 64), tl.arange(0, CHUNKS_EXAMINED), tl.arange(0, MAX_WARM_START_HEADS)
    ENDS: tl.constexpr = ends is not None
    begin, stop, is_last, one = chunks_to_pass(
        log_norm, h, HV, segment, SEGMENTS, chunks, begin, stop, ranges, ENDS, IDENTITY, WARM_STARTS
    )
    if IDENTITY:
        S = ()
        for part in tl.static_range((K + BK - 1) // BK):
            S += (tl.where(dv[:, None] == (part * BK + tl.arange(0, BK))[None, :], one, 0.0),)
    i = tl.arange(0, C)
    at_pair = i[:, None] * C + i[None, :]
    for chunk in range(begin, stop):
        rh = (row0 + chunk) * HV + h
        start = lo + chunk * C
        size = size_of_chunk(start, hi, C)
        at_k = (start * HK + hk) * K
        first = start * HV + h
        # 1. The reads of the state by keys and queries, and e.
        read_by_k, read = _read_parts(
            k_read + at_k, None if o is None else q_read + at_k, S,
            None if states is None else states + rh * K * V, size, HK, dv, K, V, BK, C, DOT,
        )  # fmt: skip
        if b is None:
            e = -read_by_k
        else:
            e = tl.zeros([BV, C], dtype=tl.float32)
        if sums is not None:
            rest_ = None if rest is None else rest + rh * C
            from_start, to_end, of_chunk = decayed_rows(sums + rh * C, rest_, C)
            e *= decays_of_reads(sums + rh * C, rest_, from_start, READ_BEFORE, C)[None, :]
        if v is not None:
            e += _load_transposed(v + start * v_token + h * V, i, size, v_token, dv, V)
        # 2. r and o.
        if r is not None:
            if b is None:
                # In two parts: where keys are alike, gradients are sums of `r` whose terms nearly cancel.
                r_ = fine_dot(e, tl.load(Y + rh * C * C + at_pair), DOT)
            else:
                r_ = read_by_k + dot(e, tl.load(Y + rh * C * C + at_pair), DOT)
            _store_transposed(r + first * V, r_, i, size, 0, dv, HV, V)
        if o is not None:
            read *= scale
            if sums is not None:
                read *= from_start[None, :]
            o_ = read + dot(e, tl.load(P + rh * C * C + at_pair), DOT)
            _store_transposed(o + first * V, o_, i, size, 0, dv, HV, V)
        # 3. The state after the chunk.
        before, S = S, ()
        for part in tl.static_range((K + BK - 1) // BK):
            dk = part * BK + tl.arange(0, BK)
            S_ = before[part]
            if sums is not None:
                S_ *= of_chunk
            if chunk_decay is not None:
                S_ *= tl.load(chunk_decay + rh * K + dk, mask=dk < K, other=0.0)[None, :]
            W_ = None if v is None and b is not None else load_tile(W + first * K, i, size, 0, dk, HV, K)
            if b is None:
                S_ = split_dot(e, W_, DOT, S_)
            else:
                S_ = split_dot(read_by_k, load_tile(b + first * K, i, size, 0, dk, HV, K), DOT, S_)
                if v is not None:
                    S_ += dot(e, W_, DOT)
            S += (S_,)
    if ends is not None:
        _store_parts(ends + at_end, S, dv, K, V, BK)
    if final is not None:
        if is_last:
            _store_parts(final + nh * K * V, S, dv, K, V, BK)


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "SEGMENTS", "scale"])
def delta_backward_state_passing_kernel(
    factors,  # `WYFactors`
    decays,  # `ChunkDecays`
    passed,  # `PassedGradients`
    do,  # [tokens, HV, V]
    dv,  # [tokens, HV, V]; it may be W, because W of a chunk is not read after its dv is stored
    du,  # [tokens, HV, V], with `b`: its product with the gradient of the state
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    SEGMENTS,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WARM_STARTS: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """State passing backwards in time: fills `dv`, `du` and, from `d_final`, the others of `passed`, if given.

    `WARM_STARTS` is as in `delta_state_passing_kernel`.
    """
    q_read, k_read, W, b, P, _ = factors
    sums, rest, chunk_decay, log_norm = decays
    d_final, d_states, ends, d_initial = passed
    scale = in_float32(scale)
    tile, h, ns = split_program(tl.cdiv(V, BV), HV)
    segment = ns // N
    if is_idle(SEGMENTS - 1 - segment, SEGMENTS, ends, dv is not None or d_states is not None):
        return
    nh = ns % N * HV + h
    at_end = (ns * HV + h) * K * V
    hk = h // (HV // HK)
    d2 = numbers_of_tile(tile, BV)
    lo, hi, row0, chunks, begin, stop = chunks_of_segment(ns % N, segment, SEGMENTS, T, cu_seqlens, C)
    dS = _load_parts(None if d_final is None else d_final + at_end, d2, K, V, BK)
    is_last = segment == 0
    if log_norm is not None:
        log_norm += row0 * HV
    ranges = tl.arange(0, 64), tl.arange(0, CHUNKS_EXAMINED), tl.arange(0, MAX_WARM_START_HEADS)
    if WARM_STARTS and ends is None:
        begin, stop, is_last = chunks_of_program(log_norm, HV, segment, SEGMENTS, chunks, ranges, True)
    elif log_norm is not None:
        count, _ = chunks_that_count(log_norm, h, HV, begin, stop, ranges, True, WARM_STARTS)
        # A segment without chunks may begin past the last chunk, before which a load looks ahead.
        stop = tl.minimum(begin + count, stop)
    i = tl.arange(0, C)
    at_pair = i[:, None] * C + i[None, :]
    # Loaded one chunk ahead into registers, because a pipeline would hold in shared memory all factors of
    # products with states, and these fill it.
    P += h * C * C + at_pair
    P_ = tl.load(P + (row0 + tl.maximum(stop - 1, 0)) * HV * C * C)
    for before in range(begin, stop):
        chunk = begin + stop - 1 - before
        rh = (row0 + chunk) * HV + h
        start = lo + chunk * C
        size = size_of_chunk(start, hi, C)
        at_k = (start * HK + hk) * K
        first = start * HV + h
        # 1. dv, and du: the product of `b` with the gradient of the state.
        do_ = _load_transposed(do + first * V, i, size, HV * V, d2, V)
        d_state = None if d_states is None else d_states + rh * K * V
        b_ = None if b is None else b + first * K
        written, read_by_b = _read_parts(W + first * K, b_, dS, d_state, size, HV, d2, K, V, BK, C, DOT)
        dv_ = dot(do_, tl.trans(P_), DOT) + written
        if dv is not None:
            _store_transposed(dv + first * V, dv_, i, size, 0, d2, HV, V)
        do_ *= scale
        if b is None:
            dv_ = -dv_
        else:
            dv_ = read_by_b
            if du is not None:
                _store_transposed(du + first * V, read_by_b, i, size, 0, d2, HV, V)
        if sums is not None:
            rest_ = None if rest is None else rest + rh * C
            from_start, to_end, of_chunk = decayed_rows(sums + rh * C, rest_, C)
            do_ *= from_start[None, :]
            dv_ *= decays_of_reads(sums + rh * C, rest_, from_start, READ_BEFORE, C)[None, :]
        # 2. The gradient of the state before the chunk.
        after, dS = dS, ()
        for part in tl.static_range((K + BK - 1) // BK):
            dk = part * BK + tl.arange(0, BK)
            dS_ = after[part]
            if sums is not None:
                dS_ *= of_chunk
            if chunk_decay is not None:
                dS_ *= tl.load(chunk_decay + rh * K + dk, mask=dk < K, other=0.0)[None, :]
            dS_ += dot(do_, load_tile(q_read + at_k, i, size, 0, dk, HK, K), DOT)
            dS += (split_dot(dv_, load_tile(k_read + at_k, i, size, 0, dk, HK, K), DOT, dS_),)
        P_ = tl.load(P + (row0 + tl.maximum(chunk - 1, 0)) * HV * C * C)
    if ends is not None:
        _store_parts(ends + at_end, dS, d2, K, V, BK)
    if d_initial is not None:
        if is_last:
            _store_parts(d_initial + nh * K * V, dS, d2, K, V, BK)


@triton.jit(do_not_specialize=["T", "N", "HV", "SEGMENTS"])
def delta_join_kernel(
    transitions,  # [SEGMENTS, N, HV, K, K]: each segment takes a state S to ``transition S + end``
    ends,  # [SEGMENTS, N, HV, K, V], zeros if there are none
    initial,  # [N, HV, K, V]
    starts,  # [SEGMENTS, N, HV, K, V]
    cu_seqlens,
    T,
    N,
    HV,
    SEGMENTS,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `starts` with the state before each segment. `ends` are the states that segments reach from zero.

    With `REVERSE`, with the gradient of the state after each segment, from the last segment to the first.
    """
    tile, nh, _ = split_program(tl.cdiv(V, BV), N * HV)
    dv = numbers_of_tile(tile, BV)
    lo, hi, _ = find_sequence(nh // HV, T, cu_seqlens, C)
    S = _load_parts(None if initial is None else initial + nh * K * V, dv, K, V, BK)
    for i in range(SEGMENTS):
        segment = SEGMENTS - 1 - i if REVERSE else i
        row = segment * N * HV + nh
        start = starts + row * K * V
        _store_parts(start, S, dv, K, V, BK)
        begin, stop = find_segment(segment, SEGMENTS, tl.cdiv(hi - lo, C))
        # A segment without tokens leaves every bit of the state as it is. No segment starts after the last
        # one.
        if (begin < stop) & (i < SEGMENTS - 1):
            # In blocks of the contracted axis, which other threads have stored.
            tl.debug_barrier()
            S = _load_parts(None if ends is None else ends + row * K * V, dv, K, V, BK)
            for d0 in range(0, K, BD):
                d = d0 + tl.arange(0, BD)
                S_ = tl.load(
                    start + dv[:, None] + d[None, :] * V, mask=(dv < V)[:, None] & (d < K)[None, :], other=0.0
                )
                before, S = S, ()
                for part in tl.static_range((K + BK - 1) // BK):
                    dk = part * BK + tl.arange(0, BK)
                    at = d[:, None] * K + dk[None, :] if REVERSE else d[:, None] + dk[None, :] * K
                    M = tl.load(
                        transitions + row * K * K + at, mask=(d < K)[:, None] & (dk < K)[None, :], other=0.0
                    )
                    S += (before[part] + fine_dot(S_, M, DOT),)
