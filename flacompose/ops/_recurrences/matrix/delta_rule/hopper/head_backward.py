"""State passing backwards in time and the gradients of each chunk in one kernel, for Hopper, in Gluon.

For each chunk it does the work of `delta_backward_state_passing_kernel` of `kernels` and then of
`hopper_head_gradient_kernel` of `hopper/head_gradients`, with the same roundings. So the gradients of states are
never stored, and operands of both are read once.

Heads of 128 have two groups of four warps: each has half of the values of the state's gradient, and half of
the channels of the gradients of queries and keys. No register is free, and spilled registers are in the L2
cache, since shared memory of 217 KiB leaves next to no first-level cache. So operands of products are in
shared memory wherever possible, the next chunk is copied as soon as there is room, no address is kept from one
chunk to the next, and results are stored after the last fence of a chunk, since a fence waits for all stores.

`dq` may be the memory of `W`, and `dv` the memory of `r`: all threads have waited for the copies of a chunk's `W`
and `r` before any of them stores its gradients, and no other program reads them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops._recurrences.matrix.gates_of_heads import BEGINNING, ENDING, LEAVING
from flacompose.ops._tiles import blocks
from flacompose.ops._tiles.hopper import (
    barrier,
    copy,
    make_visible,
    parts,
    product,
    reinterpret,
    row_layout,
    store,
    wait_for_copies,
)

chunks_of_segment = gluon.jit(blocks.chunks_of_segment.fn)
split_program = gluon.jit(blocks.split_program.fn)


@gluon.jit
def _sum_tiles(x):
    """The sums of ``x [C, D]`` over each tile of 64 channels: ``[C, tiles]``."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 64, 64]), 2)


@gluon.jit
def _decayed(pairs, sums_s, scale, GATED: gl.constexpr):
    """The `pairs` of a token, in columns, and a later one, in rows, times `scale` and the decay between them.

    All other pairs are zero. They may have overflowed, so they are replaced, not multiplied by zero.
    """
    L: gl.constexpr = pairs.type.layout
    t = gl.arange(0, pairs.shape[0], gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, pairs.shape[1], gl.SliceLayout(0, L))[None, :]
    weights = gl.full(pairs.shape, 1.0, gl.float32, L)
    if GATED:
        sum_t, sum_s = sums_s.load(gl.SliceLayout(1, L)), sums_s.load(gl.SliceLayout(0, L))
        weights = gl.exp2(sum_t[:, None] - sum_s[None, :])
    return gl.where(s < t, product(pairs, weights * scale), 0.0)


@gluon.jit
def _store_parts(to, x):
    high, low = parts(x)
    to[0].store(high)
    to[1].store(low)


@gluon.jit
def _add_product(x, y_s, acc):
    """``acc + x @ y_s``, with `x` in two parts, from registers or shared memory; asynchronous."""
    high, low = x
    acc = warpgroup_mma(low, y_s, acc, is_async=True)
    return warpgroup_mma(high, y_s, acc, is_async=True)


@gluon.jit
def _add_transposed(x, y_s, acc):
    """``acc + x^T @ y_s``, with `x` in two parts, from shared memory; asynchronous."""
    return _add_product((x[0].permute((1, 0)), x[1].permute((1, 0))), y_s, acc)


@gluon.jit(do_not_specialize=["T", "N", "HV", "SEGMENTS", "scale"])
def hopper_head_backward_kernel(
    # The parameters of the kernels named above, with the same meanings.
    q,  # [tokens, HV / GROUP, D]
    k,  # [tokens, HV / GROUP, D]
    beta,  # [tokens, HV]
    sums,  # [chunks, HV, C]
    W,  # [tokens, HV, D]
    P,  # [chunks, HV, C, C], transposed
    r,  # [tokens, HV, D]
    do,  # [tokens, HV, D]
    states,  # [chunks, HV, D, D], before each chunk
    d_final,  # [SEGMENTS, N, HV, D, D], after each segment
    dq,  # [tokens, HV, D]
    dk,  # [tokens, HV, D]
    dv,  # [tokens, HV, D]
    dbeta,  # [tokens, tiles of keys, HV], to be added up
    d_sums,  # [chunks, 3 * tiles of keys, HV, C]
    d_total,  # [chunks, HV, D]
    d_initial,  # [N, HV, D, D]
    T,
    N,
    scale,
    HV,
    SEGMENTS,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    C: gl.constexpr,
):
    """One program goes backwards in time through one segment of one sequence and head of values.

    A `GROUP` of heads of values shares keys. Each has gradients of queries and keys of its own.
    """
    scale = scale.to(gl.float32)
    TILES: gl.constexpr = D // 64
    # Layouts of products by their shapes.
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * TILES, 1], [16, D, 16])  # [V, K]
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * TILES, 1], [16, C, 16])  # [V, C]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, TILES], [16, 64, 16])  # [C, K]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, TILES], [16, C // TILES, 16])  # [C, C]
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_VALUES: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ROW_LAYOUT: gl.constexpr = row_layout(D, gl.num_warps())
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, D], gl.bfloat16)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)

    h, ns, _ = split_program(HV, N * SEGMENTS)
    h = h.to(gl.int32)
    segment = ns // N
    nh = ns % N * HV + h
    HK, hk = HV // GROUP, h // GROUP
    lo, hi, row0, _, begin, stop = chunks_of_segment(ns % N, segment, SEGMENTS, T, None, C)
    # Numbers of tokens, and of tokens times heads, fit in 32 bits: their vectors would not fit on a GPU
    # otherwise.
    lo, hi, row0 = lo.to(gl.int32), hi.to(gl.int32), row0.to(gl.int32)
    begin, stop = begin.to(gl.int32), stop.to(gl.int32)

    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], SHARED)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], SHARED)
    W_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SHARED)
    P_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], SQUARE)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SHARED)
    r_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SHARED)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [1, D, D], SHARED)
    dv_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, D], SHARED)
    dS_s = gl.allocate_shared_memory(gl.bfloat16, [1, D, D], SHARED)
    weighted_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SQUARE)
    beta_s = gl.allocate_shared_memory(gl.float32, [1, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums_s = gl.allocate_shared_memory(gl.float32, [1, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    # The gradient of the state, [V, K].
    d2 = gl.arange(0, D, gl.SliceLayout(1, STATE))[:, None]
    d1 = gl.arange(0, D, gl.SliceLayout(0, STATE))[None, :]
    at_state = d2 + d1 * D
    dS = gl.zeros([D, D], gl.float32, STATE)
    if d_final is not None:
        dS += gl.load(d_final + (ns * HV + h) * D * D + at_state).to(gl.float32)

    is_itself = (
        gl.arange(0, C, gl.SliceLayout(0, PAIRS))[None, :]
        == gl.arange(0, C, gl.SliceLayout(1, PAIRS))[:, None]
    )
    channel = gl.arange(0, 32, gl.SliceLayout(1, ROW_LAYOUT))
    zeros = gl.zeros([C, D], gl.float32, L)
    no_pairs = gl.zeros([C, C], gl.float32, PAIRS)
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    each = gl.arange(0, C, EACH)
    if begin < stop:
        start = lo + (stop - 1) * C
        size = gl.minimum(hi - start, C)
        rh = (row0 + stop - 1) * HV + h
        of_rows = (start * HV + h).to(gl.int64) * D
        of_keys = (start * HK + hk).to(gl.int64) * D
        copy(W_s.index(0), W + of_rows, HV * D, size)
        copy(P_s.index(0), P + rh.to(gl.int64) * (C * C), C, C)
        copy(do_s.index(0), do + of_rows, HV * D, size)
        copy(q_s.index(0), q + of_keys, HK * D, size)
        copy(k_s.index(0), k + of_keys, HK * D, size)
        commit_group()
        copy(r_s.index(0), r + of_rows, HV * D, size)
        copy(S_s.index(0), states + rh.to(gl.int64) * (D * D), D, D)
        commit_group()
    for before in range(begin, stop):
        chunk = begin + stop - 1 - before
        size = gl.minimum(hi - lo - chunk * C, C)
        here = size >> 31  # 0, which the compiler does not know, as in `_tiles/hopper`
        chunk += here
        start = lo + chunk * C
        rh = (row0 + chunk) * HV + h
        first = start * HV + h
        now = (before - begin) % 2
        more = before < stop - 1
        next_rows = ((start - C) * HV + h).to(gl.int64) * D
        # Always C, since a chunk before another one is whole. It is not a constant, so that `copy` keeps no
        # offsets.
        full = gl.minimum(hi - start + C, C)
        q_, k_ = q_s.index(now), k_s.index(now)
        W_, P_, do_ = W_s.index(here), P_s.index(here), do_s.index(here)
        r_, S_ = r_s.index(here), S_s.index(here)
        dv_, dS_, beta_, sums_ = dv_s.index(here), dS_s.index(here), beta_s.index(here), sums_s.index(here)
        # Pairs of tokens in two parts. They overwrite W and P, which nothing reads after dv.
        pairs_ = reinterpret(W_s, gl.bfloat16, [TILES, C, C], SQUARE).index(here), P_
        weighted_ = weighted_s.index(here), weighted_s.index(here + 1)  # the same, weighted by `beta`
        beta_t = gl.load(beta + first + each * HV, mask=each < size, other=0.0)
        if sums is not None:
            sum_t = gl.load(sums + rh.to(gl.int64) * C + each)
        wait_for_copies(1)
        if more:
            next_keys = ((start - C) * HK + hk).to(gl.int64) * D
            copy(q_s.index(1 - now), q + next_keys, HK * D, full)
            copy(k_s.index(1 - now), k + next_keys, HK * D, full)

        # 1. dv, and the gradient of the state before the chunk, as in `delta_backward_state_passing_kernel`.
        # Other products begin.
        rounded = dS.to(gl.bfloat16)
        d_v = gl.zeros([D, C], gl.float32, VALUES)
        # This is the order of Triton's compiler in `delta_backward_state_passing_kernel`: another one would
        # change bits.
        by_state = gl.convert_layout(rounded, OF_STATE)
        d_v = warpgroup_mma(by_state, W_.permute((1, 0)), d_v, use_acc=False, is_async=True)
        d_v = warpgroup_mma(do_.permute((1, 0)), P_.permute((1, 0)), d_v, is_async=True)
        dS_.permute((1, 0)).store(rounded)
        beta_.store(beta_t.to(gl.float32))
        if sums is not None:
            sums_.store(sum_t)
        wait_for_copies(0)
        pairs = warpgroup_mma(do_, r_.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        dq_read = warpgroup_mma(do_, S_.permute((1, 0)), zeros, use_acc=False, is_async=True)
        do_read = do_.permute((1, 0)).load(OF_VALUES).to(gl.float32) * scale
        if sums is not None:
            do_read *= gl.exp2(sums_.load(gl.SliceLayout(0, OF_VALUES)))[None, :]
        do_read = do_read.to(gl.bfloat16)
        d_v = warpgroup_mma_wait(2, [d_v])
        dv_.permute((1, 0)).store(d_v.to(gl.bfloat16))
        d_v = -d_v
        if sums is not None:
            d_v *= gl.exp2(sums_.load(gl.SliceLayout(0, VALUES)))[None, :]
            total = gl.load(sums + rh.to(gl.int64) * C + C - 1)
            dS *= gl.exp2(total)
        dS = warpgroup_mma(do_read, q_, dS, is_async=True)
        high, low = parts(d_v)
        d_e = gl.convert_layout(high, OF_VALUES), gl.convert_layout(low, OF_VALUES)
        dS = _add_product(d_e, k_, dS)

        # 2. The reads of queries, with the gradient do, as in `hopper/head_gradients`, and likewise below.
        dS, pairs, dq_read = warpgroup_mma_wait(0, [dS, pairs, dq_read])
        diagonal = gl.sum(gl.where(is_itself, pairs, 0.0), 1) * scale
        diagonal = gl.convert_layout(diagonal, gl.SliceLayout(1, L))
        pairs = _decayed(pairs, sums_, scale, sums is not None)
        dq_read *= scale
        if sums is not None:
            dq_read *= gl.exp2(sums_.load(gl.SliceLayout(1, L)))[:, None]
        # No thread reads W and P any more: all of them have waited for each other in the sum for `diagonal`.
        _store_parts(pairs_, pairs)
        _store_parts(weighted_, product(pairs, beta_.load(gl.SliceLayout(0, PAIRS))[None, :]))
        make_visible()
        dv_pairs = warpgroup_mma(dv_, r_.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        in_chunk = _add_transposed(pairs_, q_, zeros)
        dq_read = _add_product(weighted_, k_, dq_read)

        # 3. The reads of keys, with the gradient -dv, and their writes, through the state after the chunk.
        pairs = warpgroup_mma_wait(4, [dv_pairs])
        pairs = _decayed(pairs, sums_, -1.0, sums is not None)
        in_chunk, dq_read = warpgroup_mma_wait(0, [in_chunk, dq_read])
        barrier()
        _store_parts(pairs_, pairs)
        _store_parts(weighted_, product(pairs, beta_.load(gl.SliceLayout(0, PAIRS))[None, :]))
        make_visible()
        dk_read = warpgroup_mma(dv_, S_.permute((1, 0)), zeros, use_acc=False, is_async=True)
        in_chunk = _add_transposed(pairs_, k_, in_chunk)
        store(dv + first.to(gl.int64) * D, dv_.load(ROW_LAYOUT), HV * D, size)
        ending = _sum_tiles(dq_read * q_.load(L).to(gl.float32))
        dq_read += (diagonal * beta_.load(gl.SliceLayout(1, L)))[:, None] * k_.load(L).to(gl.float32)
        # Through shared memory, a thread stores 16 bytes at a time, not 4.
        do_.store(dq_read.to(gl.bfloat16))
        barrier()
        store(dq + first.to(gl.int64) * D, do_.load(ROW_LAYOUT), HV * D, size)
        if d_total is not None:
            for tile in gl.static_range(D // 32):
                of_S = S_.slice(tile * 32, 32).load(ROW_LAYOUT).to(gl.float32)
                of_state = gl.sum(of_S * dS_.slice(tile * 32, 32).load(ROW_LAYOUT).to(gl.float32), 1)
                gl.store(d_total + rh.to(gl.int64) * D + tile * 32 + channel, of_state * gl.exp2(total))
        dk_read = warpgroup_mma_wait(2, [dk_read])
        dk_read = -dk_read
        if sums is not None:
            dk_read *= gl.exp2(sums_.load(gl.SliceLayout(1, L)))[:, None]
        written = warpgroup_mma(r_, dS_.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dk_read = _add_product(weighted_, k_, dk_read)
        in_chunk = warpgroup_mma_wait(3, [in_chunk])
        beginning = _sum_tiles(in_chunk * k_.load(L).to(gl.float32))
        in_chunk += diagonal[:, None] * q_.load(L).to(gl.float32)
        written, dk_read = warpgroup_mma_wait(0, [written, dk_read])
        OF_SUMS: gl.constexpr = ending.type.layout
        weights = beta_.load(gl.SliceLayout(1, OF_SUMS))[:, None]
        weight = beta_.load(gl.SliceLayout(1, L))[:, None]
        barrier()  # Other threads may still read the memory of do, and their products the weighted pairs.
        if more:
            copy(do_, do + next_rows, HV * D, full)
            copy(W_, W + next_rows, HV * D, full)
            copy(P_, P + (rh - HV).to(gl.int64) * (C * C), C, gl.maximum(full, C))
            commit_group()
            copy(r_, r + next_rows, HV * D, full)
            copy(S_, states + (rh - HV).to(gl.int64) * (D * D), D, gl.maximum(full, D))
            commit_group()

        # 4. The gradients of sums of gates, of `beta` and of keys.
        ending += _sum_tiles(dk_read * k_.load(L).to(gl.float32))
        if sums is not None:
            written *= gl.exp2(total - sums_.load(gl.SliceLayout(1, L)))[:, None]
        of_t = gl.arange(0, C, gl.SliceLayout(1, OF_SUMS))[:, None]
        tile_ = gl.arange(0, TILES, gl.SliceLayout(0, OF_SUMS))[None, :]
        if d_sums is not None:
            row = (row0 + chunk).to(gl.int64)
            of_sums = d_sums + (row * (3 * TILES) * HV + tile_ * HV + h) * C + of_t
            gl.store(of_sums + ENDING * TILES * HV * C, ending)
            gl.store(of_sums + BEGINNING * TILES * HV * C, beginning * weights)
            leaving = _sum_tiles(written * k_.load(L).to(gl.float32))
            gl.store(of_sums + LEAVING * TILES * HV * C, leaving * weights)
        written += in_chunk
        to = dbeta + (start * HV).to(gl.int64) * TILES + tile_ * HV + h + of_t * TILES * HV
        gl.store(to, _sum_tiles(written * k_.load(L).to(gl.float32)), mask=(of_t < size) & (tile_ < TILES))
        written *= weight
        written += dk_read
        dk_ = reinterpret(weighted_s, gl.bfloat16, [2 // TILES, C, D], SHARED).index(here)
        dk_.store(written.to(gl.bfloat16))
        barrier()
        store(dk + first.to(gl.int64) * D, dk_.load(ROW_LAYOUT), HV * D, size)
    if d_initial is not None:
        if segment == 0:
            gl.store(d_initial + nh * D * D + at_state, dS.to(d_initial.dtype.element_ty))
