"""State passing forwards in time on Hopper, in Gluon: bfloat16, heads of 64 and 128 keys and values.

`hopper_head_state_passing_kernel` of `kernels` takes the matrices W and P of each chunk, which have to be written
and read. This one takes only Y, and only half of the triangular matrix. With ``A[t, s] = q_t . k_s``, decayed
by the gates between, it computes

    e = v - k_read S        u = diag(beta) Y e        o = scale * (q_read S + A u)        S <- decay S + k_write^T u

Where keys are alike, the terms of these products nearly cancel, so e, Y, u and A are in two parts.

The state and all intermediate results are transposed here too. Each left factor is the result of the product
before, in the same registers, and right factors are in shared memory. So threads wait for others only between
two chunks. The product of queries and keys does not depend on the state: it is computed one chunk ahead,
during the products with the state.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops._recurrences.matrix.delta_rule import kernels
from flacompose.ops._tiles import blocks
from flacompose.ops._tiles.hopper import async_load, barrier, parts, row_layout, wait_for_copies

split_program = gluon.jit(blocks.split_program.fn)
is_idle = gluon.jit(blocks.is_idle.fn)
chunks_of_segment = gluon.jit(blocks.chunks_of_segment.fn)
chunks_to_pass = gluon.jit(kernels.chunks_to_pass.fn)

# The number of chunks in shared memory. A later chunk overwrites the operands of one that no thread needs any
# more: keys are needed to the end of a chunk, and queries and values until all threads have waited there.
K_STAGES, Q_STAGES, V_STAGES = gl.constexpr(4), gl.constexpr(3), gl.constexpr(2)


@gluon.constexpr_function
def _products(width, warps):
    """The layout of results of tensor cores: each group of four warps has 64 rows of `width` numbers."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 16])


@gluon.constexpr_function
def _pairs(C, warps):
    """The layout of results with 64 rows: groups of four warps share the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * C // warps, 16])


@gluon.jit
def _size_of(chunk, tokens, stop, C: gl.constexpr):
    """The number of `tokens` of a sequence that are in a chunk; 0 from chunk `stop` on."""
    return gl.where(chunk < stop, gl.minimum(tokens - chunk * C, C), 0)


@gluon.jit
def _rows(x, chunk, stride, size, C: gl.constexpr, D: gl.constexpr, ROW_LAYOUT: gl.constexpr):
    """Pointers to the first `D` numbers of the rows of a chunk, and a mask of the rows within `size`.

    They are computed from `chunk` each time: no register is free to keep the offsets of rows within a chunk.
    """
    i = gl.arange(0, C, gl.SliceLayout(1, ROW_LAYOUT))[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    return x + (chunk * C + i).to(gl.int64) * stride + d, (i < size) & (d < D)


@gluon.jit
def _copy_rows(to, x, chunk, stride, size):
    ROW_LAYOUT: gl.constexpr = row_layout(to.shape[1], gl.num_warps())
    at, inside = _rows(x, chunk, stride, size, to.shape[0], to.shape[1], ROW_LAYOUT)
    async_load(to, at, mask=inside)


@gluon.jit
def _store_rows(x, rows_s, chunk, stride, size):
    ROW_LAYOUT: gl.constexpr = row_layout(rows_s.shape[1], gl.num_warps())
    at, inside = _rows(x, chunk, stride, size, rows_s.shape[0], rows_s.shape[1], ROW_LAYOUT)
    gl.store(at, rows_s.load(ROW_LAYOUT), mask=inside)


@gluon.jit
def _load_numbers(beta, sums, chunk, size, HV, C: gl.constexpr):
    """``beta``, the sums of gates and their total, of a chunk of `size` tokens; zeros if it has none."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, C, L)
    beta = gl.load(beta + (chunk * C + i).to(gl.int64) * HV, mask=i < size, other=0.0).to(gl.float32)
    sum = gl.zeros([C], gl.float32, L)
    total = 0.0
    if sums is not None:
        sums += chunk.to(gl.int64) * HV * C
        sum = gl.load(sums + i, mask=i < C * (size > 0), other=0.0)
        total = gl.load(sums + C - 1, mask=size > 0, other=0.0)
    return beta, sum, total


@gluon.jit
def _store_numbers(numbers_s, slot, beta, sum, total):
    """Stores the decays of a chunk's tokens from its start and to its end, `beta` and `sum`."""
    numbers_s[0].index(slot).store(gl.exp2(sum))
    numbers_s[1].index(slot).store(gl.exp2(total - sum))
    numbers_s[2].index(slot).store(beta)
    numbers_s[3].index(slot).store(sum)


@gluon.jit
def _load_inverse(Y, chunk, size, HV, C: gl.constexpr):
    """The matrix that `hopper_head_factor_kernel` has stored for a chunk, and zeros for a chunk without tokens."""
    ROW_LAYOUT: gl.constexpr = row_layout(C, gl.num_warps())
    s = gl.arange(0, C, gl.SliceLayout(1, ROW_LAYOUT))[:, None]
    t = gl.arange(0, C, gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    return gl.load(
        Y + chunk.to(gl.int64) * HV * C * C + s * C + t, mask=(s < C * (size > 0)) & (t < C), other=0.0
    )


@gluon.jit
def _store_inverse(Y_s, slot, Y):
    """Stores the larger and the smaller parts, the latter transposed, as two operands of products."""
    ROW_LAYOUT: gl.constexpr = Y.type.layout
    s = gl.arange(0, Y.shape[0], gl.SliceLayout(1, ROW_LAYOUT))[:, None]
    t = gl.arange(0, Y.shape[1], gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    zero = gl.zeros(Y.shape, gl.bfloat16, ROW_LAYOUT)
    Y_s[0].index(slot).store(gl.where(s <= t, Y, zero))
    Y_s[1].index(slot).store(gl.where(s > t, Y, zero))


@gluon.jit
def _products_of_pairs(k_s, q_s, no_pairs):
    """Begin the products of a chunk's keys, in rows, and its queries."""
    return warpgroup_mma(k_s, q_s.permute((1, 0)), no_pairs, use_acc=False, is_async=True)


@gluon.jit
def _sums_of_pairs(sums_s, L: gl.constexpr):
    """The sums of gates of the tokens in rows, and of the tokens in columns."""
    return sums_s.load(gl.SliceLayout(1, L)), sums_s.load(gl.SliceLayout(0, L))


@gluon.jit
def _decayed_pairs(qk, sums, scale):
    """``scale`` times the decayed products of keys, in rows, and later queries, in two parts."""
    L: gl.constexpr = qk.type.layout
    s = gl.arange(0, qk.shape[0], gl.SliceLayout(1, L))[:, None]
    t = gl.arange(0, qk.shape[1], gl.SliceLayout(0, L))[None, :]
    between = sums[0][:, None] - sums[1][None, :]
    return parts(gl.where(s <= t, qk * (gl.exp2(-gl.abs(between)) * scale), 0.0))


@gluon.jit
def _multiply(x, y, smaller, acc, USE_ACC: gl.constexpr = True):
    """Begin ``acc + x @ y`` for float32 `x`, in two parts, and stored `y`, in one or two."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    high, low = parts(x)
    high, low = gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)
    acc = warpgroup_mma(low, y, acc, use_acc=USE_ACC, is_async=True)
    if smaller is not None:
        acc = warpgroup_mma(high, smaller, acc, is_async=True)
    return warpgroup_mma(high, y, acc, is_async=True)


@gluon.jit(do_not_specialize=["T", "N", "HK", "HV", "SEGMENTS", "scale"])
def hopper_head_state_passing_kernel(
    # The parameters of `delta_state_passing_kernel` in `kernels`, with the same meanings, except Y and `beta`.
    factors,  # `WYFactors`: `q_read`, `k_read`, and Y from `hopper_head_factor_kernel`
    decays,  # `ChunkDecays`: sums and log_norm
    passed,  # `PassedStates`, without `states`
    v,  # [tokens, HV, V]; v_token elements, a multiple of 8, separate its tokens
    beta,  # [tokens, HV]
    o,  # [tokens, HV, V]
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    SEGMENTS,
    v_token,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    IDENTITY: gl.constexpr,
    WARM_STARTS: gl.constexpr,
):
    """State passing forwards in time: fills `o` and, from `initial`, `ends` and `final`, if given."""
    q_read, k_read, _, _, _, Y = factors
    sums, _, _, log_norm = decays
    initial, _, ends, final = passed
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = _products(C, WARPS)
    OF_STATE: gl.constexpr = _products(K, WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    PAIRS: gl.constexpr = _pairs(C, WARPS)
    TOKENS: gl.constexpr = gl.SliceLayout(0, L)
    scale = scale.to(gl.float32)
    v_token = v_token // 8 * 8  # tells Triton that it may copy 16 bytes at a time
    h, ns, _ = split_program(HV, N * SEGMENTS)
    segment = ns // N
    if is_idle(segment, SEGMENTS, ends, o is not None):
        return
    nh = ns % N * HV + h
    hk = h // (HV // HK)
    lo, hi, row0, chunks, begin, stop = chunks_of_segment(ns % N, segment, SEGMENTS, T, cu_seqlens, C)

    # 1. The chunks of this program, and the state before them.
    if log_norm is not None:
        log_norm += row0 * HV
    ASKING: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    ranges = (
        gl.arange(0, 64, gl.BlockedLayout([1], [32], [WARPS], [0])),
        gl.arange(0, kernels.CHUNKS_EXAMINED, gl.SliceLayout(1, ASKING)),
        gl.arange(0, kernels.MAX_WARM_START_HEADS, gl.SliceLayout(0, ASKING)),
    )
    ENDS: gl.constexpr = ends is not None
    begin, stop, is_last, one = chunks_to_pass(
        log_norm, h, HV, segment, SEGMENTS, chunks, begin, stop, ranges, ENDS, IDENTITY, WARM_STARTS
    )
    dv = gl.arange(0, V, gl.SliceLayout(1, OF_STATE))[:, None]
    dk = gl.arange(0, K, gl.SliceLayout(0, OF_STATE))[None, :]
    at_state = dk * V + dv
    at_end = (ns * HV + h) * K * V
    if IDENTITY:
        S = gl.where(dv == dk, one, 0.0)
    elif initial is None:
        S = gl.zeros([V, K], gl.float32, OF_STATE)
    else:
        S = gl.load(initial + at_end + at_state).to(gl.float32)

    # 2. The operands that the first chunks need. Each part is an array of its own: between two stores to one
    # array, Triton makes all threads wait.
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_s = gl.allocate_shared_memory(gl.bfloat16, [K_STAGES, C, K], KEYS)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [V_STAGES, C, V], VALUES)
    Y_s = (
        gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SQUARE),
        gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SQUARE),
    )
    numbers_s = (
        gl.allocate_shared_memory(gl.float32, [2, C], LINE),
        gl.allocate_shared_memory(gl.float32, [2, C], LINE),
        gl.allocate_shared_memory(gl.float32, [2, C], LINE),
        gl.allocate_shared_memory(gl.float32, [2, C], LINE),
    )
    q_s, o_s, A_s = k_s, v_s, Y_s
    if o is not None:
        q_s = gl.allocate_shared_memory(gl.bfloat16, [Q_STAGES, C, K], KEYS)
        o_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, V], VALUES)
        A_s = (
            gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SQUARE),
            gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SQUARE),
        )
    zeros = gl.zeros([V, C], gl.float32, L)
    no_pairs = gl.zeros([C, C], gl.float32, PAIRS)
    begin, stop, tokens = begin.to(gl.int32), stop.to(gl.int32), (hi - lo).to(gl.int32)
    of_head = h * V
    k_read += (lo * HK + hk) * K
    beta += lo * HV + h
    Y += (row0 * HV + h) * C * C
    if sums is not None:
        sums += (row0 * HV + h) * C
    if v is not None:
        v += lo * v_token + of_head
    if o is not None:
        q_read += (lo * HK + hk) * K
        o += lo * HV * V + of_head
    of_chunk, of_next = 1.0, 1.0
    for i in gl.static_range(3):
        chunk = begin + i
        size = _size_of(chunk, tokens, stop, C)
        _copy_rows(k_s.index(chunk % K_STAGES), k_read, chunk, HK * K, size)
        if o is not None:
            _copy_rows(q_s.index(chunk % Q_STAGES), q_read, chunk, HK * K, size)
        if i < 2:
            if v is not None:
                _copy_rows(v_s.index(chunk % V_STAGES), v, chunk, v_token, size)
            beta_, sum, total = _load_numbers(beta, sums, chunk, size, HV, C)
            _store_numbers(numbers_s, chunk % 2, beta_, sum, total)
            of_chunk, of_next = of_next, gl.exp2(total)
        if i == 0:
            _store_inverse(Y_s, chunk % 2, _load_inverse(Y, chunk, size, HV, C))
        commit_group()
    if o is not None:
        wait_for_copies(2)
        qk = _products_of_pairs(k_s.index(begin % K_STAGES), q_s.index(begin % Q_STAGES), no_pairs)
        qk = warpgroup_mma_wait(0, [qk])
        high, low = _decayed_pairs(qk, _sums_of_pairs(numbers_s[3].index(begin % 2), PAIRS), scale)
        A_s[0].index(begin % 2).store(high)
        A_s[1].index(begin % 2).store(low)

    for chunk in range(begin, stop):
        this, other = chunk % 2, (chunk + 1) % 2
        k_ = k_s.index(chunk % K_STAGES)
        wait_for_copies(1)  # all but the operands of the chunk after the next

        # 3. The reads of the state by keys and queries, and e.
        S_ = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        e = warpgroup_mma(S_, k_.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if o is not None:
            out = warpgroup_mma(
                S_, q_s.index(chunk % Q_STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            _store_rows(o, o_s.index(0), chunk - 1, HV * V, gl.where(chunk > begin, C, 0))
        from_start = numbers_s[0].index(this).load(TOKENS)[None, :]
        e = -warpgroup_mma_wait(0 if o is None else 1, [e]) * from_start
        if v is not None:
            e += v_s.index(this).permute((1, 0)).load(L).to(gl.float32)

        # 4. u. Meanwhile, the operands of the next chunk are loaded.
        u = _multiply(e, Y_s[0].index(this), Y_s[1].index(this).permute((1, 0)), zeros, False)
        if o is not None:
            out = warpgroup_mma_wait(3, [out]) * (from_start * scale)
            qk = _products_of_pairs(
                k_s.index((chunk + 1) % K_STAGES), q_s.index((chunk + 1) % Q_STAGES), no_pairs
            )
        S *= of_chunk
        Y_ = _load_inverse(Y, chunk + 1, _size_of(chunk + 1, tokens, stop, C), HV, C)
        size = _size_of(chunk + 2, tokens, stop, C)
        beta_, sum, total = _load_numbers(beta, sums, chunk + 2, size, HV, C)
        u = warpgroup_mma_wait(0 if o is None else 1, [u])
        u *= numbers_s[2].index(this).load(TOKENS)[None, :]

        # 5. The outputs and the state after the chunk.
        if o is not None:
            out = _multiply(u, A_s[0].index(this), A_s[1].index(this), out)
        u *= numbers_s[1].index(this).load(TOKENS)[None, :]
        S = _multiply(u, k_, None, S)

        # 6. Stores for other threads, and copies, over the operands that all threads have read.
        if o is not None:
            out, qk = warpgroup_mma_wait(2, [out, qk])
            sums_ = _sums_of_pairs(numbers_s[3].index(other), PAIRS)
        barrier()
        if o is not None:
            o_s.index(0).permute((1, 0)).store(out.to(gl.bfloat16))
            high, low = _decayed_pairs(qk, sums_, scale)
            A_s[0].index(other).store(high)
            A_s[1].index(other).store(low)
        _store_inverse(Y_s, other, Y_)
        _store_numbers(numbers_s, this, beta_, sum, total)
        of_chunk, of_next = of_next, gl.exp2(total)
        if v is not None:
            _copy_rows(v_s.index(this), v, chunk + 2, v_token, size)
        size = _size_of(chunk + 3, tokens, stop, C)
        _copy_rows(k_s.index((chunk + 3) % K_STAGES), k_read, chunk + 3, HK * K, size)
        if o is not None:
            _copy_rows(q_s.index(chunk % Q_STAGES), q_read, chunk + 3, HK * K, size)
        commit_group()
        S = warpgroup_mma_wait(0, [S])
    if o is not None:
        if begin < stop:
            barrier()
            _store_rows(o, o_s.index(0), stop - 1, HV * V, _size_of(stop - 1, tokens, stop, C))
    if ends is not None:
        gl.store(ends + at_end + at_state, S)
    if final is not None:
        if is_last:
            gl.store(final + nh * K * V + at_state, S)
