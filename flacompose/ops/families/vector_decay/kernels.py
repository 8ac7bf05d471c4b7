"""Triton kernels for vector decay: the sweep of states over chunks, the pairs within a chunk.

The chunked algorithm is that of `eager`, where it is explained. Here a chunk is one tile and a level of blocks a mask:
at each level every token plays one role, reader in an odd block or writer in an even one, with one weight and one row
of one matrix product. Local sums of gates are products with a 0/1 matrix, their gradient with its transpose.

Where the gates of a chunk are mild, the levels are not needed: a single product referred to the chunk's middle holds
all pairs, and half of its exponents may be positive (`_MILD` bounds them).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families._kernels import LOWEST_GATE, dot, load_tile, split_dot, store_tile

# Leaves float32 room for products of queries, keys, values and their gradients from 1e-18 to 1e18.
_MILD = tl.constexpr(45.0)


@triton.jit
def _gates(g, token, end, h, d, H, D):
    return tl.maximum(load_tile(g, token, end, h, d, H, D), LOWEST_GATE).to(g.dtype.element_ty)


@triton.jit
def _select(rows, x, DOT: tl.constexpr):
    """``rows @ x`` for a matrix of 0 and 1 (and -1), `x` to at least 16 bits."""
    if x.dtype != tl.float32:
        out = tl.dot(rows.to(x.dtype), x)
    elif DOT == tl.float32:
        out = tl.dot(rows.to(tl.float32), x, input_precision="tf32x3")
    else:
        high = x.to(DOT)
        low = (x - high.to(tl.float32)).to(DOT)
        out = tl.dot(rows.to(DOT), high, acc=tl.dot(rows.to(DOT), low))
    return out


@triton.jit
def _round(x, DOT: tl.constexpr):
    """`x` to the 11 bits that a TF32 product keeps; the hardware would cut the others off."""
    if DOT == tl.float32:
        out = x
    else:
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        out = tl.where(x == x, rounded, x)  # the sum wraps for a NaN
    return out


@triton.jit
def _fine_dot(a, b, DOT: tl.constexpr):
    """``a @ b`` for float32 factors, each in two parts: where gates are strong a few neighbours are all that counts."""
    return tl.dot(a, b, input_precision="tf32x3" if DOT == tl.float32 else "bf16x3")


@triton.jit
def _round_dot(a, b, DOT: tl.constexpr):
    """``a @ b`` for float32 factors, `b` as `_round` gives it."""
    if DOT == tl.float32:
        out = tl.dot(a, b, input_precision="tf32x3")
    else:
        out = tl.dot(_round(a, DOT), b, input_precision="tf32")
    return out


@triton.jit
def _reads(t, j, READ_BEFORE: tl.constexpr):
    """Whether the gate of token `j` lies between the start of a block and the read of token `t` in it."""
    if READ_BEFORE:
        return j < t
    return j <= t


@triton.jit
def _level(t, j, level, READ_BEFORE: tl.constexpr):
    """Whether gate `j` is in the local sum of token `t`: from its block's start if odd, to its block's end if even."""
    # Written in `level` throughout: what does not depend on it would be kept in registers across the levels.
    in_t = t & ((1 << level) - 1)
    in_j = j & ((1 << level) - 1)
    odd = ((t >> level) & 1) == 1
    return ((t >> level) == (j >> level)) & tl.where(odd, _reads(in_t, in_j, READ_BEFORE), in_j > in_t)


@triton.jit
def _meet(t, s, level):
    """Whether `t` and `s` are in sibling blocks, one the reader and one the writer."""
    return ((t >> level) ^ (s >> level)) == 1


@triton.jit
def _from_middle(t, j, C: tl.constexpr):
    """The sign of gate `j` in the sum from the chunk's middle to the write of token `t`; the other sums lack it."""
    late = t >= C // 2
    inside = late == (j >= C // 2)
    return tl.where(inside & (late == (t >= j)), tl.where(late, 1.0, -1.0), 0.0)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "SEGMENTS", "scale"])
def state_kernel(
    a,
    x,
    gk,
    gv,
    initial,  # [N, H, K, V]
    segment_state,  # [SEGMENTS, N, H, K, V]: each segment's end, begun at 0 (the first at `initial`)
    segment_gk,  # [SEGMENTS, N, H, K]: its summed gates
    segment_gv,  # [SEGMENTS, N, H, V]
    states,  # [rows, H, K, V]
    final,  # [N, H, K, V]
    row_start,
    row_end,
    first_row,
    last_row,
    scale,
    T,
    NT,
    N,
    H,
    K,
    V,
    SEGMENTS,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_GK: tl.constexpr,
    HAS_GV: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    REVERSE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """``S <- diag(exp sum gk) S diag(exp sum gv) + a^T x`` from chunk to chunk, `a` and `x` decayed to the chunk's end.

    One program sweeps one segment of one sequence. Not `WHOLE`: from zero, to find the segments' ends. `WHOLE`: from
    the true state, folded from those, storing the state before every chunk. `REVERSE` sweeps backwards in time.
    """
    tiles_v = tl.cdiv(V, BV)
    tiles = tl.cdiv(K, BK) * tiles_v
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % tiles
    segment = (pid // tiles) % SEGMENTS
    if not WHOLE and segment == SEGMENTS - 1:
        return
    nh = pid // tiles // SEGMENTS
    n = nh // H
    h = nh % H
    dk = (tile // tiles_v) * BK + tl.arange(0, BK)
    dv = (tile % tiles_v) * BV + tl.arange(0, BV)
    in_state = (dk < K)[:, None] & (dv < V)[None, :]
    at_state = dk[:, None] * V + dv[None, :]

    if PACKED:
        row0 = tl.load(first_row + n)
        rows = tl.load(last_row + n) - row0
        lo = tl.load(row_start + row0, mask=rows > 0, other=0)
        hi = tl.load(row_end + row0, mask=rows > 0, other=0)
    else:
        row0 = n * NT
        rows = NT + tl.zeros([], tl.int64)
        lo = n * T
        hi = lo + T
    per_segment = tl.cdiv(rows, SEGMENTS)
    begin = segment * per_segment
    stop = tl.minimum(begin + per_segment, rows)

    S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial + nh * K * V + at_state, mask=in_state & (segment == 0), other=0.0).to(tl.float32)
    if WHOLE and SPLIT:
        for i in range(segment):
            inh = i * N * H + nh
            if HAS_GK:
                S *= tl.exp(tl.load(segment_gk + inh * K + dk, mask=dk < K, other=0.0))[:, None]
            if HAS_GV:
                S *= tl.exp(tl.load(segment_gv + inh * V + dv, mask=dv < V, other=0.0))[None, :]
            S += tl.load(segment_state + inh * K * V + at_state, mask=in_state, other=0.0)
    sum_k = tl.zeros([BK], dtype=tl.float32)
    sum_v = tl.zeros([BV], dtype=tl.float32)

    t = tl.arange(0, C)
    for i in range(begin, stop):
        row = rows - 1 - i if REVERSE else i
        if WHOLE:
            at = states + ((row0 + row) * H + h) * K * V + at_state
            tl.store(at, S.to(states.dtype.element_ty), mask=in_state)
        token = lo + row * C + t
        at_k = (token * H + h)[None, :] * K + dk[:, None]
        in_k = (token < hi)[None, :] & (dk < K)[:, None]
        a_ = tl.load(a + at_k, mask=in_k, other=0.0)  # [BK, C]
        x_ = load_tile(x, token, hi, h, dv, H, V)  # [C, BV]
        if REVERSE:
            a_ = a_ * scale
        if HAS_GK:
            g = tl.maximum(tl.load(gk + at_k, mask=in_k, other=0.0), LOWEST_GATE).to(gk.dtype.element_ty)
            to_edge = _reads(t[:, None], t[None, :], READ_BEFORE) if REVERSE else t[None, :] > t[:, None]
            a_ = a_ * tl.exp(tl.trans(_select(to_edge, tl.trans(g), DOT)))
            total = tl.sum(g.to(tl.float32), 1)
            S *= tl.exp(total)[:, None]
            sum_k += total
        if HAS_GV:
            g = _gates(gv, token, hi, h, dv, H, V)
            to_edge = _reads(t[:, None], t[None, :], READ_BEFORE) if REVERSE else t[None, :] > t[:, None]
            x_ = x_ * tl.exp(_select(to_edge, g, DOT))
            total = tl.sum(g.to(tl.float32), 0)
            S *= tl.exp(total)[None, :]
            sum_v += total
        S += dot(a_, x_, DOT)

    if WHOLE:
        if segment == SEGMENTS - 1:
            tl.store(final + nh * K * V + at_state, S, mask=in_state)
    else:
        inh = segment * N * H + nh
        tl.store(segment_state + inh * K * V + at_state, S, mask=in_state)
        if HAS_GK:
            tl.store(segment_gk + inh * K + dk, sum_k, mask=dk < K)
        if HAS_GV:
            tl.store(segment_gv + inh * V + dv, sum_v, mask=dv < V)


@triton.jit
def _middle_sums(g, t, s, C: tl.constexpr, READ_BEFORE: tl.constexpr, DOT: tl.constexpr):
    """The sums of gates from the chunk's middle to each write and to each read."""
    write = _select(_from_middle(t, s, C), g, DOT)
    read = write
    if READ_BEFORE:
        # A read lacks the token's own. A difference of sums, but of sums below `_MILD` where it is used.
        read = write - g.to(tl.float32)
    return write, read


@triton.jit
def _size(g, write, read, DOT: tl.constexpr):
    """What is below `_MILD` where gates are mild: their sums, and a multiple of each.

    The gradient of a gate that lets through less than some exp(-4), or exp(-8) where products are rounded to bfloat16,
    would drown in the rounding of the pairs that it does not touch.
    """
    single = tl.abs(g.to(tl.float32)) * (_MILD / (4.0 if DOT == tl.float32 else 8.0))
    return tl.maximum(tl.maximum(tl.abs(write), tl.abs(read)), single)


@triton.jit
def _chunk(row, T, NT, row_start, row_end, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk and the end of its sequence."""
    if PACKED:
        lo = tl.load(row_start + row)
        hi = tl.load(row_end + row)
    else:
        n = row // NT
        lo = n * T + (row % NT) * C
        hi = (n + 1) * T
    return lo, hi


@triton.jit
def _pairs(a, b, g, t, s, LEVELS: tl.constexpr, READ_BEFORE: tl.constexpr, DOT: tl.constexpr):
    """``a_t . b_s``, decayed by any gates, for readers `t` and writers `s`, both ways: symmetric."""
    out = tl.where(t == s, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)[:, None], 0.0)
    for level in range(LEVELS):
        role = tl.where(((t >> level) & 1) == 1, a, b)
        role = role * tl.exp(_select(_level(t, s, level, READ_BEFORE), g, DOT))
        out += tl.where(_meet(t, s, level), _fine_dot(role, tl.trans(role), DOT), 0.0)
    return out


@triton.jit
def _own_pair(a, b, u, h, d, D):
    """``a_t . b_t``, weighted by any bonus ``u [H, D]``."""
    product = a.to(tl.float32) * b.to(tl.float32)
    if u is not None:
        product *= tl.load(u + h * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return tl.sum(product, 1)


@triton.jit(do_not_specialize=["T", "NT", "H", "scale"])
def score_kernel(
    a,  # [tokens, H, D]
    b,
    g,
    u,  # [H, D]
    P,  # [rows, H, C, C]
    mild,  # [rows, H], those to leave out
    row_start,
    row_end,
    scale,
    T,
    NT,
    H,
    D,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BD: tl.constexpr,
    HAS_G: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """``P[t, s] = scale * a_t . b_s`` within a chunk, decayed by `g`, for ``s <= t``, with `u` for ``s = t``.

    Only of chunks that are not `mild`, if that is given.
    """
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    pid = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0) // H
    row = pid % rows
    h = pid // rows
    lo, hi = _chunk(row, T, NT, row_start, row_end, C, PACKED)
    if lo >= hi:
        return
    if mild is not None:
        if tl.load(mild + row * H + h) != 0:
            return
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    token = lo + i
    lower = tl.zeros([C, C], dtype=tl.float32)
    own = tl.zeros([C], dtype=tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        a_ = load_tile(a, token, hi, h, d, H, D)
        b_ = load_tile(b, token, hi, h, d, H, D)
        if not HAS_G:
            lower += dot(a_, tl.trans(b_), DOT)
        else:
            g_ = _gates(g, token, hi, h, d, H, D)
            write, read = _middle_sums(g_, t, s, C, READ_BEFORE, DOT)
            if tl.max(_size(g_, write, read, DOT)) < _MILD:
                lower += _fine_dot(a_ * tl.exp(read), tl.trans(b_ * tl.exp(-write)), DOT)
            else:
                lower += _pairs(a_, b_, g_, t, s, LEVELS, READ_BEFORE, DOT)
        if READ_BEFORE and (HAS_G or u is not None):
            own += _own_pair(a_, b_, u, h, d, D)
    lower = tl.where(s <= t, lower, 0.0)
    if READ_BEFORE and (HAS_G or u is not None):
        # The gates of a read before the decay are not those of the write in the same token.
        lower = tl.where(t == s, own[:, None], lower)
    at = P + (row * H + h) * C * C + t * C + s
    tl.store(at, lower * scale)


@triton.jit(do_not_specialize=["T", "NT", "H", "scale"])
def plain_kernel(
    a,  # [tokens, H, D1]
    b,
    x,  # [tokens, H, D2]
    g,  # of the axis D1
    u,  # [H, D1]
    S,  # [rows, H, K, V]
    out,  # [tokens, H, D2]
    mild,  # [rows, H]
    row_start,
    row_end,
    scale,
    T,
    NT,
    H,
    D1,
    D2,
    stride1,
    stride2,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BD1: tl.constexpr,
    BD2: tl.constexpr,
    HAS_G: tl.constexpr,
    MILD: tl.constexpr,
    REVERSE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """``out_t = sum over s of (scale * a_t . b_s) x_s + scale * S^T a_t``, along an axis that no gate decays.

    `g` decays the products `a_t . b_s` and what is read from `S`, the state before the chunk, with strides for (D1,
    D2); `u` weighs in ``a_t . b_t``. `REVERSE`, backwards in time: later tokens `s`, and `S` the gradient of the state
    after the chunk, which holds `scale` already.

    With `g` it runs twice, for the chunks whose gates are mild (`MILD`), which it notes, and then for the others: one
    kernel for both would need twice the registers.
    """
    tiles = tl.cdiv(D2, BD2)
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    pid = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0) // (H * tiles)
    tile = pid % tiles
    row = pid // tiles % rows
    h = pid // tiles // rows
    lo, hi = _chunk(row, T, NT, row_start, row_end, C, PACKED)
    if lo >= hi:
        return
    if not MILD:
        if tl.load(mild + row * H + h) != 0:
            return
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    token = lo + i
    d2 = tile * BD2 + tl.arange(0, BD2)

    acc = tl.zeros([C, BD2], dtype=tl.float32)
    pairs = tl.zeros([C, C], dtype=tl.float32)
    own = tl.zeros([C], dtype=tl.float32)
    sizes = tl.zeros([C, BD1], dtype=tl.float32)
    for d in range(0, D1, BD1):
        d1 = d + tl.arange(0, BD1)
        a_ = load_tile(a, token, hi, h, d1, H, D1)
        b_ = load_tile(b, token, hi, h, d1, H, D1)
        if not HAS_G:
            pairs += dot(a_, tl.trans(b_), DOT)
        else:
            g_ = _gates(g, token, hi, h, d1, H, D1)
            if MILD:
                write, read = _middle_sums(g_, t, s, C, READ_BEFORE, DOT)
                sizes = tl.maximum(sizes, _size(g_, write, read, DOT))
                if REVERSE:
                    pairs += _fine_dot(a_ * tl.exp(-write), tl.trans(b_ * tl.exp(read)), DOT)
                else:
                    pairs += _fine_dot(a_ * tl.exp(read), tl.trans(b_ * tl.exp(-write)), DOT)
            elif REVERSE:
                pairs += _pairs(b_, a_, g_, t, s, LEVELS, READ_BEFORE, DOT)
            else:
                pairs += _pairs(a_, b_, g_, t, s, LEVELS, READ_BEFORE, DOT)
        if u is not None:
            own += _own_pair(a_, b_, u, h, d1, D1)
        if HAS_G:
            a_ = a_ * tl.exp(_select(s > t if REVERSE else _reads(t, s, READ_BEFORE), g_, DOT))
        at = (row * H + h) * D1 * D2 + d1[:, None] * stride1 + d2[None, :] * stride2
        acc += dot(a_, tl.load(S + at, mask=(d1 < D1)[:, None] & (d2 < D2)[None, :], other=0.0), DOT)
    if not REVERSE:
        acc *= scale

    if MILD and HAS_G:
        is_mild = tl.max(sizes) < _MILD
        tl.store(mild + row * H + h, is_mild.to(tl.int8))
        if not is_mild:
            return
    pairs = tl.where(_reads(s, t, READ_BEFORE) if REVERSE else _reads(t, s, READ_BEFORE), pairs * scale, 0.0)
    if u is not None:
        pairs = tl.where(t == s, own[:, None] * scale, pairs)
    acc += split_dot(pairs, load_tile(x, token, hi, h, d2, H, D2), DOT)
    store_tile(out, acc, token, hi, h, d2, H, D2)


@triton.jit(do_not_specialize=["T", "NT", "H", "scale"])
def gated_kernel(
    P,  # [rows, H, C, C], from `a` and `b` here if there is none
    a,  # [tokens, H, D1]
    b,
    x,  # [tokens, H, D2]
    y,
    g1,
    g2,
    u,  # [H, D2]
    S,  # [rows, H, K, V]
    dS,
    read,  # [tokens, H, D2]
    write,
    dg2,
    du,  # [rows, H, D2], the sums over chunks
    mild,  # [rows, H] if `KNOWN`, otherwise [rows, H, D2 / BD2]
    row_start,
    row_end,
    scale,
    T,
    NT,
    H,
    D1,
    D2,
    stride1,
    stride2,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BD1: tl.constexpr,
    BD2: tl.constexpr,
    HAS_G1: tl.constexpr,
    MILD: tl.constexpr,
    KNOWN: tl.constexpr,
    WRITE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """``read_t = sum over s of P[t, s] x_s + scale * S^T a_t``, along an axis that the gate `g2` decays.

    `S` is the state before the chunk, with strides for (D1, D2). `WRITE`: ``write_s = sum over t of P[t, s] y_t + dS^T
    b_s`` and the gradient of `g2` too, `dS` the gradient of the state after the chunk. `u` weighs in ``P[t, t]``, and
    gets its gradient.

    It runs twice, for the tiles whose gates are mild (`MILD`), which it notes unless that is `KNOWN`, and then for the
    others: one kernel for both would need twice the registers.
    """
    tiles = tl.cdiv(D2, BD2)
    scale = tl.cast(scale, tl.float32)  # float64 where Inductor launches
    pid = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0) // (H * tiles)
    tile = pid % tiles
    row = pid // tiles % rows
    h = pid // tiles // rows
    lo, hi = _chunk(row, T, NT, row_start, row_end, C, PACKED)
    if lo >= hi:
        return
    i = tl.arange(0, C)
    t = i[:, None]
    s = i[None, :]
    token = lo + i
    d2 = tile * BD2 + tl.arange(0, BD2)
    at_mild = mild + (row * H + h if KNOWN else (row * H + h) * tiles + tile)
    if KNOWN or not MILD:
        if (tl.load(at_mild) != 0) != MILD:
            return
    else:
        g = _gates(g2, token, hi, h, d2, H, D2)
        write_sum, read_sum = _middle_sums(g, t, s, C, READ_BEFORE, DOT)
        is_mild = tl.max(_size(g, write_sum, read_sum, DOT)) < _MILD
        tl.store(at_mild, is_mild.to(tl.int8))
        if not is_mild:
            return

    # From other chunks.
    before = tl.zeros([C, BD2], dtype=tl.float32)
    after = tl.zeros([C, BD2], dtype=tl.float32)
    through = tl.zeros([BD2], dtype=tl.float32)
    pairs = tl.zeros([C, C], dtype=tl.float32)
    for d in range(0, D1, BD1):
        d1 = d + tl.arange(0, BD1)
        at = (row * H + h) * D1 * D2 + d1[:, None] * stride1 + d2[None, :] * stride2
        in_state = (d1 < D1)[:, None] & (d2 < D2)[None, :]
        a_ = load_tile(a, token, hi, h, d1, H, D1)
        if P is None:
            pairs += dot(a_, tl.trans(load_tile(b, token, hi, h, d1, H, D1)), DOT)
        if HAS_G1:
            gate = _gates(g1, token, hi, h, d1, H, D1)
            a_ = a_ * tl.exp(_select(_reads(t, s, READ_BEFORE), gate, DOT))
        S_ = tl.load(S + at, mask=in_state, other=0.0)
        before += dot(a_, S_, DOT)
        if WRITE:
            b_ = load_tile(b, token, hi, h, d1, H, D1)
            if HAS_G1:
                b_ = b_ * tl.exp(_select(s > t, gate, DOT))
            dS_ = tl.load(dS + at, mask=in_state, other=0.0)
            after += dot(b_, dS_, DOT)
            kept = S_.to(tl.float32) * dS_.to(tl.float32)
            if HAS_G1:
                kept *= tl.exp(tl.sum(gate.to(tl.float32), 0))[:, None]
            through += tl.sum(kept, 0)
    before *= scale

    # From this chunk. The pair of a token with itself, which no gate decays, joins last: it would drown the others in
    # the gate's gradient. What is cheap to load again is: registers are short.
    if P is None:
        pairs = tl.where(s <= t, pairs * scale, 0.0)
    else:
        P += (row * H + h) * C * C
    g = _gates(g2, token, hi, h, d2, H, D2)
    if MILD:
        late = t >= C // 2
        write_sum, read_sum = _middle_sums(g, t, s, C, READ_BEFORE, DOT)
        writer = _round(load_tile(x, token, hi, h, d2, H, D2) * tl.exp(-write_sum), DOT)
        before *= tl.exp(tl.sum(tl.where(late, 0.0, g.to(tl.float32)), 0))[None, :]
        if WRITE:
            reader = _round(load_tile(y, token, hi, h, d2, H, D2) * tl.exp(read_sum), DOT)
            after *= tl.exp(tl.sum(tl.where(late, g.to(tl.float32), 0.0), 0))[None, :]
            through *= tl.exp(tl.sum(g.to(tl.float32), 0))
            late_sum = through + tl.sum(writer * after, 0)
            early_sum = through + tl.sum(reader * before, 0)
        if P is not None:
            pairs = tl.load(P + t * C + s)
        before += _round_dot(tl.where(t == s, 0.0, pairs), writer, DOT)
        if WRITE:
            after += _round_dot(tl.load(P + s * C + t, mask=t != s, other=0.0), reader, DOT)
            # A pair counts twice, with opposite signs: from the same rounded factors, so that it cancels.
            dg = tl.where(late, late_sum[None, :], early_sum[None, :])
            dg += _select(_from_middle(s, t, C), reader * before - writer * after, DOT)
            if READ_BEFORE:
                dg -= reader * before
            after *= tl.exp(-write_sum)
            store_tile(dg2, dg, token, hi, h, d2, H, D2)
        if read is not None and DOT != tl.float32:
            # What `_round` took from P; not before, as `dg` needs both products of the same factors.
            if P is not None:
                pairs = tl.load(P + t * C + s)
            rest = tl.where(t == s, 0.0, pairs - _round(pairs, DOT))
            before += dot(rest, writer, DOT)
        before *= tl.exp(read_sum)
    else:
        x_ = load_tile(x, token, hi, h, d2, H, D2)
        before *= tl.exp(_select(_reads(t, s, READ_BEFORE), g, DOT))
        if WRITE:
            y_ = load_tile(y, token, hi, h, d2, H, D2)
            after *= tl.exp(_select(s > t, g, DOT))
            dg = _select(_reads(s, t, READ_BEFORE), y_ * before, DOT) + _select(t > s, x_ * after, DOT)
            dg += (through * tl.exp(tl.sum(g.to(tl.float32), 0)))[None, :]
        for level in range(LEVELS):
            odd = ((t >> level) & 1) == 1
            weight = tl.exp(_select(_level(t, s, level, READ_BEFORE), g, DOT))
            # Readers and writers in one product: P where a reader is the row, its transpose where a writer is.
            at = tl.where(odd, t * C + s, s * C + t)
            met = tl.load(P + at, mask=_meet(t, s, level), other=0.0)
            role = tl.where(odd, y_, x_) if WRITE else tl.where(odd, 0.0, x_)
            out = weight * _round_dot(met, _round(role * weight, DOT), DOT)
            before += tl.where(odd, out, 0.0)
            if WRITE:
                after += tl.where(odd, 0.0, out)
                dg += _select(_level(s, t, level, READ_BEFORE), role * out, DOT)
        if WRITE:
            store_tile(dg2, dg, token, hi, h, d2, H, D2)
    own = tl.sum(tl.where(t == s, pairs, 0.0), 1)[:, None] if P is None else tl.load(P + i * C + i)[:, None]
    diagonal = own
    if u is not None:
        diagonal = own * tl.load(u + h * D2 + d2, mask=d2 < D2, other=0.0).to(tl.float32)[None, :]
    x_ = load_tile(x, token, hi, h, d2, H, D2)
    if read is not None:
        store_tile(read, before + diagonal * x_, token, hi, h, d2, H, D2)
    if WRITE:
        y_ = load_tile(y, token, hi, h, d2, H, D2)
        store_tile(write, after + diagonal * y_, token, hi, h, d2, H, D2)
        if u is not None:
            tl.store(du + (row * H + h) * D2 + d2, tl.sum(own * x_ * y_, 0), mask=d2 < D2)


@triton.jit(do_not_specialize=["N"])
def softmax_kernel(
    logits,  # [N, M]
    dp,
    out,
    N,
    M,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
):
    """The softmax of `logits` or, with `dp`, the gradient of `logits` from that of their softmax."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    m = tl.arange(0, BM)[None, :]
    at = row * M + m
    mask = (row < N) & (m < M)
    x = tl.where(m < M, tl.load(logits + at, mask=mask, other=0.0), float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    if dp is not None:
        p_dp = p * tl.load(dp + at, mask=mask, other=0.0).to(tl.float32)
        p = p_dp - p * tl.sum(p_dp, 1)[:, None]
    tl.store(out + at, p.to(out.dtype.element_ty), mask=mask)
