"""Building blocks of the Triton kernels, and the token kernel of all recurrences with a matrix state."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Its exponential is 0 in float32. So a sum of gates that includes it gives a weight of 0, like one with -inf.
LOWEST_GATE = tl.constexpr(-128.0)
LOWEST_RATE = tl.constexpr(-3.4028234663852886e38)  # the lowest number of float32
DECAYS_TO_ZERO = tl.constexpr(-1e31)  # the bound of `decays_to_zero` in `_tensors/gate_formulas.py`
LOG2_E = tl.constexpr(1.4426950408889634)
SOFTPLUS_THRESHOLD = tl.constexpr(20.0)  # PyTorch's softplus is the identity above it


@triton.jit
def clamp_gate(g):
    """The gate `g`, at least `LOWEST_GATE`. A NaN stays NaN, unlike in the hardware's maximum."""
    return tl.maximum(g, LOWEST_GATE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite(A):
    """Rates with the lowest number in place of -inf, which times a step of 0 would be NaN."""
    return tl.maximum(A, LOWEST_RATE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split_program(first, second):
    """The coordinates of this program in a grid of `first` times `second` times any number, `first` varying fastest."""
    pid = tl.program_id(0).to(tl.int64)
    return pid % first, pid // first % second, pid // first // second


@triton.jit
def in_float32(number):
    """`number` in float32. Inductor's launches pass float64."""
    return tl.cast(number, tl.float32)


@triton.jit
def find_sequence(n, T, cu_seqlens, C: tl.constexpr):
    """The first token of sequence `n`, its end, and the row of its first chunk of `C` tokens.

    Chunks are rows of memory, in the order of their sequences. Packed sequence `n` begins at row
    ``cu_seqlens[n] // C + n``, which leaves room for all chunks of the sequences before it, and sometimes one
    row more.
    """
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + n)
        end = tl.load(cu_seqlens + n + 1)
        row = start // C + n
    else:
        start = n * T
        end = start + T
        row = n * tl.cdiv(T, C)
    return start, end, row


@triton.jit
def sequence_of_chunk(row, T, N, cu_seqlens, C: tl.constexpr):
    """The sequence that has the chunk `row`, or that begins at this row without tokens."""
    if cu_seqlens is not None:
        # The last sequence that begins at this row or before is between `n` and `after`.
        n = tl.cast(0, tl.int64)
        after = tl.cast(N, tl.int64)
        while after - n > 1:
            middle = (n + after) // 2
            begins = tl.load(cu_seqlens + middle) // C + middle <= row
            n = tl.where(begins, middle, n)
            after = tl.where(begins, after, middle)
    else:
        n = row // tl.cdiv(T, C)
    return n


@triton.jit
def find_chunk(row, T, N, cu_seqlens, C: tl.constexpr):
    """The first token of the chunk in `row`, and the end of its sequence: not after it if the chunk is empty."""
    n = sequence_of_chunk(row, T, N, cu_seqlens, C)
    first_token, end, first_row = find_sequence(n, T, cu_seqlens, C)
    start = first_token + (row - first_row) * C
    # A row before the first sequence has no tokens.
    return start, tl.where(start < first_token, start, end)


@triton.jit
def chunk_of_program(T, N, H, cu_seqlens, C: tl.constexpr):
    """The row and the head of this program, one for each chunk and head, and the chunk's first token and end."""
    row, h, _ = split_program(tl.num_programs(0) // H, H)
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    return row, h, start, end


@triton.jit
def tile_of_program(tiles, T, N, H, cu_seqlens, C: tl.constexpr):
    """This program's tile, of `tiles` per chunk and head, and the results of `chunk_of_program`."""
    tile, row, h = split_program(tiles, tl.num_programs(0) // (H * tiles))
    start, end = find_chunk(row, T, N, cu_seqlens, C)
    return tile, row, h, start, end


@triton.jit
def size_of_chunk(start, end, C: tl.constexpr):
    """The number of tokens of a chunk. Offsets from its first token need only 32 bits."""
    return tl.minimum(end - start, C).to(tl.int32)


@triton.jit
def numbers_of_tile(tile, B: tl.constexpr):
    """The numbers of an axis in one of its tiles, which have `B` numbers each."""
    return tile.to(tl.int32) * B + tl.arange(0, B)


@triton.jit
def find_segment(segment, SEGMENTS, chunks):
    """The first of a sequence's `chunks` in `segment`, one of `SEGMENTS` parts, and the end of the segment."""
    per_segment = tl.cdiv(chunks, SEGMENTS)
    begin = segment * per_segment
    return begin, tl.minimum(begin + per_segment, chunks)


@triton.jit
def is_idle(segment, SEGMENTS, ends, STORES: tl.constexpr):
    """Whether the program of a segment has no work.

    A pass for the `ends` of segments leaves out the last one. A pass that `STORES` results of tokens or
    chunks processes all segments, and any other pass only the last.
    """
    if ends is not None:
        idle = segment == SEGMENTS - 1
    elif STORES:
        idle = False
    else:
        idle = segment < SEGMENTS - 1
    return idle


@triton.jit
def chunks_of_segment(n, segment, SEGMENTS, T, cu_seqlens, C: tl.constexpr, FROM_LAST: tl.constexpr = False):
    """Sequence `n`: its first token, its end, its first chunk's row and its number of chunks; and a segment's chunks.

    These are the first chunk of the segment and the one after its last, counted from the sequence's first.
    Segments are counted from the first in time, or `FROM_LAST`.
    """
    start, end, row = find_sequence(n, T, cu_seqlens, C)
    segment = SEGMENTS - 1 - segment if FROM_LAST else segment
    chunks = tl.cdiv(end - start, C)
    begin, stop = find_segment(segment, SEGMENTS, chunks)
    return start, end, row, chunks, begin, stop


@triton.jit
def load_tile(x, token, end, h, d, H, D):
    """The vectors of tokens `token` and head `h` in ``x [tokens, H, D]``, zero from `end` on."""
    at = x + (token * H + h)[:, None] * D + d[None, :]
    return tl.load(at, mask=(token < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, token, end, h, d, H, D):
    at = x + (token * H + h)[:, None] * D + d[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(token < end)[:, None] & (d < D)[None, :])


@triton.jit
def load_numbers(x, first, token, end, H):
    """One number for each token of a head of ``x [tokens, H]``, from element `first` on; 0 for tokens from `end` on."""
    return tl.load(x + first + token * H, mask=token < end, other=0.0).to(tl.float32)


@triton.jit
def load_state(state, d, d2, K, V):
    """``[d2, d]`` of ``state [K, V]``."""
    at = state + d[None, :] * V + d2[:, None]
    return tl.load(at, mask=(d < K)[None, :] & (d2 < V)[:, None], other=0.0)


@triton.jit
def dot(a, b, DOT: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="tf32x3")


@triton.jit
def _parts(x):
    """Two bfloat16 numbers whose sum is float32 `x` to 16 bits.

    The first is truncated rather than rounded, which takes fewer and faster instructions.
    """
    high = (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def split_dot(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for float32 `a`, in two parts, and `b`, rounded to the dtype of products."""
    if DOT == tl.float32:
        out = tl.dot(a, b.to(tl.float32), acc=acc, input_precision="tf32x3")
    else:
        high, rest = _parts(a)
        out = tl.dot(high, b.to(DOT), acc=tl.dot(rest, b.to(DOT), acc=acc))
    return out


@triton.jit
def dot_split(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for `a` of the inputs' dtype and float32 `b`, in two parts."""
    if DOT == tl.float32:
        out = tl.dot(a.to(tl.float32), b, acc=acc, input_precision="tf32x3")
    else:
        high, rest = _parts(b)
        out = tl.dot(a.to(DOT), high, acc=tl.dot(a.to(DOT), rest, acc=acc))
    return out


@triton.jit
def fine_dot(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for float32 factors, both in two parts: errors of few pairs do not average out."""
    return dot_of_parts(a, in_parts(b, DOT), DOT, acc)


@triton.jit
def in_parts(x, DOT: tl.constexpr):
    """Float32 `x` as a factor of `dot_of_parts`. A right factor stays in shared memory, not in registers."""
    if DOT == tl.float32:
        parts = x, x
    else:
        parts = _parts(x)
    return parts


@triton.jit
def dot_of_parts(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for float32 `a` and `b`, given `in_parts`."""
    return dot_in_parts(in_parts(a, DOT), b, DOT, acc)


@triton.jit
def dot_in_parts(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for `a` as (larger, smaller) part, and `b` likewise or in one part.

    In float32 the first part is the whole factor, and the second is not used.
    """
    high, low = a
    if DOT == tl.float32:
        acc = tl.dot(high, b[0], acc=acc, input_precision="tf32x3")
    else:
        acc = tl.dot(low, b[0], acc=acc)
        if len(b) == 2:
            acc = tl.dot(high, b[1], acc=acc)
        acc = tl.dot(high, b[0], acc=acc)
    return acc


@triton.jit
def expm1_near_0(g):
    """``exp(g) - 1``, exact to float32 from -0.1 to 0."""
    return g * (1 + g * (1 / 2 + g * (1 / 6 + g * (1 / 24 + g * (1 / 120)))))


@triton.jit
def decayed(h, g):
    """``exp(g) * h`` without an ``exp(g)`` near 1, whose rounding errors add up over tokens."""
    g = g.to(tl.float32)
    nearly_all = tl.where(tl.abs(h) == float("inf"), h, h + h * expm1_near_0(g))  # inf - inf would be NaN
    return tl.where(g > -0.1, nearly_all, h * tl.exp(g))


@triton.jit
def softplus(x):
    """``log(1 + e^x)``, precise where ``1 + e^x`` rounds: the logarithm is corrected by the rounded sum."""
    e = tl.exp(tl.minimum(x, SOFTPLUS_THRESHOLD))
    u = 1.0 + e
    log = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x <= SOFTPLUS_THRESHOLD, log, x)  # NaN if x is NaN, which the minimum above drops


@triton.jit
def sigmoid(x):
    """``1 / (1 + e^-x)``, in fewer instructions than a division takes."""
    root = tl.rsqrt(1 + tl.exp2(x.to(tl.float32) * -LOG2_E))
    return root * root


@triton.jit
def state_number(left, count, stride):
    """The number of the stored state after a token that `left` tokens follow; -1 if there is none.

    The last stored state follows the last token. Each of the others is `stride` tokens before the next.
    """
    number = count - 1 - left // stride
    return tl.where(left % stride == 0, tl.maximum(number, -1), -1)


class TokenVectors(NamedTuple):
    q: Any  # [tokens, H, K]; q_token elements separate its tokens
    k: Any  # [tokens, H, K], likewise
    v: Any  # [tokens, HV, V], likewise
    q_token: Any
    k_token: Any
    v_token: Any


class TokenGates(NamedTuple):
    g: Any  # [tokens, HV]
    gamma: Any  # [HV], added to `g` at every token
    gk: Any  # [tokens, HG, K]
    gv: Any  # [tokens, HV, V]


class TokenStates(NamedTuple):
    initial: Any  # [N, HV, K, V]
    final: Any  # [N, HV, K, V], or [N, count, HV, K, V]
    count: Any  # the number of stored states, see `state_number`; None for the final one alone
    stride: Any


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "HG", "scale"])
def matrix_token_kernel(
    # One kernel computes all recurrences with a matrix state, because a token of each takes only a few lines.
    vectors,  # `TokenVectors`
    gates,  # `TokenGates`
    states,  # `TokenStates`
    beta,  # [tokens, HV], the strength of writes; with the delta rule, the replaced part of the value
    u,  # [H, K]
    a,  # [tokens, H, K], reads the state for `b` or for the delta rule; `k` if None
    b,  # [tokens, H, K], writes the read of `a`
    o,  # [tokens, HV, V]
    cu_seqlens,
    T,
    N,
    scale,
    norm_eps,  # added to the squared norms that divide queries and keys; None without division
    H,
    HV,
    HG,
    K,
    V,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DELTA_RULE: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """The recurrence token by token, one program per sequence, head and block of the value axis."""
    q, k, v, q_token, k_token, v_token = vectors
    g, gamma, gk, gv = gates
    initial, final, count, stride = states
    scale = in_float32(scale)
    tile, hv, n = split_program(tl.cdiv(V, BV), HV)
    nh = n * HV + hv
    h = hv // (HV // H)
    hg = hv // (HV // HG)
    dk = tl.arange(0, BK)
    dv = tile * BV + tl.arange(0, BV)
    in_k = dk < K
    in_v = dv < V
    in_state = in_k[:, None] & in_v[None, :]
    at_state = nh * K * V + dk[:, None] * V + dv[None, :]
    start, end, _ = find_sequence(n, T, cu_seqlens, 1)

    # 1. The state before the first token.
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if initial is not None:
        S = tl.load(initial + at_state, mask=in_state, other=0.0).to(tl.float32)
    if u is not None:
        u_ = tl.load(u + h * K + dk, mask=in_k, other=0.0).to(tl.float32)
    if gamma is not None:
        gamma_ = tl.load(gamma + hv).to(tl.float32)
    for token in range(start, end):
        # 2. The token's query, key and value. With a bonus, the query reads the state before it.
        at_v = (token * HV + hv) * V + dv
        q_ = tl.load(q + token * q_token + h * K + dk, mask=in_k, other=0.0).to(tl.float32)
        if norm_eps is not None:
            q_ *= tl.rsqrt(tl.sum(q_ * q_, 0) + in_float32(norm_eps))
        if SOFTMAX:
            q_ = tl.where(in_k, q_, float("-inf"))
            q_ = tl.exp(q_ - tl.max(q_, 0))
            q_ /= tl.sum(q_, 0)
        q_ *= scale
        k_ = tl.load(k + token * k_token + h * K + dk, mask=in_k, other=0.0).to(tl.float32)
        if norm_eps is not None:
            k_ *= tl.rsqrt(tl.sum(k_ * k_, 0) + in_float32(norm_eps))
        v_ = tl.load(v + token * v_token + hv * V + dv, mask=in_v, other=0.0).to(tl.float32)
        if u is not None:
            o_ = tl.sum(S * q_[:, None], 0) + tl.sum(q_ * u_ * k_, 0) * v_
        # 3. The state decays. `a` reads it, before or after that, and `b` writes the read or the delta rule
        # replaces it.
        if READ_BEFORE and (b is not None or DELTA_RULE):
            a_ = k_
            if a is not None:
                a_ = tl.load(a + (token * H + h) * K + dk, mask=in_k, other=0.0).to(tl.float32)
            read = tl.sum(S * a_[:, None], 0)
        if g is not None:
            g_ = tl.load(g + token * HV + hv).to(tl.float32)
            if gamma is not None:
                g_ += gamma_
            S = decayed(S, g_)
        elif gamma is not None:
            S = decayed(S, gamma_)
        if gk is not None:
            S = decayed(S, tl.load(gk + (token * HG + hg) * K + dk, mask=in_k, other=0.0)[:, None])
        if gv is not None:
            S = decayed(S, tl.load(gv + at_v, mask=in_v, other=0.0)[None, :])
        if b is not None:
            if not READ_BEFORE:
                a_ = tl.load(a + (token * H + h) * K + dk, mask=in_k, other=0.0).to(tl.float32)
                read = tl.sum(S * a_[:, None], 0)
            b_ = tl.load(b + (token * H + h) * K + dk, mask=in_k, other=0.0).to(tl.float32)
            S += b_[:, None] * read[None, :]
        # 4. The write of the token. The delta rule first subtracts the read of its key, or of `a`.
        if DELTA_RULE:
            if not READ_BEFORE:
                a_ = k_
                if a is not None:
                    a_ = tl.load(a + (token * H + h) * K + dk, mask=in_k, other=0.0).to(tl.float32)
                read = tl.sum(S * a_[:, None], 0)
            v_ -= read
        if beta is not None:
            v_ *= tl.load(beta + token * HV + hv).to(tl.float32)
        S += k_[:, None] * v_[None, :]
        # 5. Without a bonus, the query reads the new state. The results are stored.
        if u is None:
            o_ = tl.sum(S * q_[:, None], 0)
        tl.store(o + at_v, o_.to(o.dtype.element_ty), mask=in_v)
        if count is not None:
            i = state_number(end - 1 - token, count, stride)
            if i >= 0:
                from_first = ((n * count + i) * HV + hv - nh) * K * V
                tl.store(final + from_first + at_state, S, mask=in_state)
    if count is None:
        tl.store(final + at_state, S, mask=in_state)
    if cu_seqlens is not None:
        # The programs share the tokens before the first sequence and after the last, whose output is 0.
        before = tl.load(cu_seqlens)
        last = tl.load(cu_seqlens + N)
        for i in range(n, before + T - last, N):
            token = tl.where(i < before, i, last + i - before)
            tl.store(o + (token * HV + hv) * V + dv, tl.zeros([BV], o.dtype.element_ty), mask=in_v)
