"""The gradients of `head_gradients` on Hopper, in Gluon: bfloat16, heads of 64 and 128 keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops._recurrences.matrix import gates_of_heads
from flacompose.ops._recurrences.matrix.gates_of_heads import BEGINNING, ENDING, LEAVING
from flacompose.ops._tiles.hopper import (
    copy,
    make_visible,
    parts,
    product,
    row_layout,
    store,
    store_parts,
    tile_of_program,
    wait_for_copies,
)

sums_before = gluon.jit(gates_of_heads.sums_before.fn)


@gluon.jit
def _decayed(pairs, sums, scale, BEFORE: gl.constexpr):
    """The `pairs` of a token, in columns, and a later one, in rows, times `scale` and the decay between them.

    All other pairs are zero. They may have overflowed, so they are replaced, not multiplied by zero. If the
    later token reads `BEFORE` its own gate, no gate decays a pair of neighbours, and such pairs are zero too.
    """
    L: gl.constexpr = pairs.type.layout
    t = gl.arange(0, pairs.shape[0], gl.SliceLayout(1, L))
    s = gl.arange(0, pairs.shape[1], gl.SliceLayout(0, L))
    weights = gl.full(pairs.shape, 1.0, gl.float32, L)
    if BEFORE:
        weights = gl.exp2(sums_before(sums, t)[:, None] - gl.load(sums + s)[None, :])
        t -= 1
    elif sums is not None:
        weights = gl.exp2(gl.load(sums + t)[:, None] - gl.load(sums + s)[None, :])
    return gl.where(s[None, :] < t[:, None], product(pairs, weights * scale), 0.0)


@gluon.jit
def _of_next(x, L: gl.constexpr):
    """`_of_next` of `head_gradients`."""
    t = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    s = gl.arange(0, x.shape[0], gl.SliceLayout(0, L))
    x = gl.convert_layout(x, gl.SliceLayout(0, L))
    return gl.sum(gl.where(s[None, :] == t[:, None] + 1, x[None, :], 0.0), 1)


@gluon.jit
def _through_pairs(pairs, beta, pairs_s, reader_s, k_s, read, written):
    """`read` and `written` with the contributions of `pairs` to the gradients of readers and of writers.

    They are ``pairs diag(beta) k`` and ``pairs^T reader``.
    """
    store_parts(pairs_s, pairs)
    make_visible()
    high, low = parts(product(pairs, beta))
    LEFT: gl.constexpr = gl.DotOperandLayout(0, pairs.type.layout, 2)
    written = warpgroup_mma(pairs_s.index(1).permute((1, 0)), reader_s, written, is_async=True)
    written = warpgroup_mma(pairs_s.index(0).permute((1, 0)), reader_s, written, is_async=True)
    read = warpgroup_mma(gl.convert_layout(low, LEFT), k_s, read, is_async=True)
    read = warpgroup_mma(gl.convert_layout(high, LEFT), k_s, read, is_async=True)
    return warpgroup_mma_wait(0, [read, written])


@gluon.jit(do_not_specialize=["T", "N", "H", "HV", "of_group", "scale"])
def hopper_head_gradient_kernel(
    # The parameters of `delta_head_gradient_kernel` in `head_gradients`, with the same meanings.
    vectors,  # `KeyVectors`
    gates,  # `GateSums`, without `rest`
    values,  # `ValueVectors`
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it
    made,  # `KeyGradients`
    d_sums,  # [chunks, 3 * tiles of K, HV, C], for `head_gate_gradient_kernel`, like `d_total`
    d_total,  # [chunks, HV, K]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    of_group,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    BK: gl.constexpr,
    READ_BEFORE: gl.constexpr,
    ADDS: gl.constexpr,
):
    """The gradients of queries, keys, `beta` and sums of gates, for a chunk, a tile and a head of keys.

    A launch processes the head of number `of_group` among the heads of values that share these keys. With `ADDS`
    its gradients of queries, keys and `a` are added to the stored sums of the heads before it.
    """
    q, k, a, beta = vectors
    sums = gates.sums
    do, r, dv = values
    dq, dk, da, dbeta = made
    scale = scale.to(gl.float32)
    tiles: gl.constexpr = K // BK
    tile, row, hk, lo, hi = tile_of_program(tiles, T, N, H, cu_seqlens, C)
    if lo >= hi:
        return
    size = gl.minimum(hi - lo, C).to(gl.int32)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    ROW_LAYOUT: gl.constexpr = row_layout(V, gl.num_warps())
    OF_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    OF_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, BK], OF_K)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, BK], OF_K)
    of_keys = (lo * H + hk) * K + tile * BK
    copy(q_s, q + of_keys, H * K, size)
    copy(k_s, k + of_keys, H * K, size)
    t = gl.arange(0, C, gl.SliceLayout(1, L))
    s = gl.arange(0, C, gl.SliceLayout(0, L))
    zeros = gl.zeros([C, BK], gl.float32, L)
    pairs_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], OF_K)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [C, V], OF_V)
    r_s = gl.allocate_shared_memory(gl.bfloat16, [C, V], OF_V)
    dv_s = gl.allocate_shared_memory(gl.bfloat16, [C, V], OF_V)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [BK, V], OF_V)
    dS_s = gl.allocate_shared_memory(gl.bfloat16, [BK, V], OF_V)
    h = hk * (HV // H) + of_group
    rh = row * HV + h
    first = lo * HV + h
    at_state = (rh * K + tile * BK) * V
    copy(do_s, do + first * V, HV * V, size)
    copy(r_s, r + first * V, HV * V, size)
    copy(S_s, states + at_state, V, BK)
    commit_group()
    copy(dv_s, dv + first * V, HV * V, size)
    commit_group()
    copy(dS_s, d_states + at_state, V, BK)
    commit_group()
    beta_t = gl.load(beta + first + t * HV, mask=t < size, other=0.0).to(gl.float32)
    beta_s = gl.load(beta + first + s * HV, mask=s < size, other=0.0).to(gl.float32)[None, :]
    of_chunk = None
    if sums is not None:
        of_chunk = sums + rh * C
        sum_t = gl.load(of_chunk + t)
        total = gl.load(of_chunk + C - 1)
        from_start = gl.exp2(sum_t)[:, None]

    # 1. The reads of queries, with the gradient do.
    wait_for_copies(2)
    pairs = warpgroup_mma(do_s, r_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dq_read = warpgroup_mma(do_s, S_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    pairs, dq_read = warpgroup_mma_wait(0, [pairs, dq_read])
    # No gate decays the pair of a token with itself. It is added last, since it would drown the others in the
    # gate's gradient.
    diagonal = gl.sum(gl.where(s[None, :] == t[:, None], pairs, 0.0), 1)[:, None] * scale
    pairs = _decayed(pairs, of_chunk, scale, False)
    dq_read *= scale
    if sums is not None:
        dq_read *= from_start
    dq_read, in_chunk = _through_pairs(pairs, beta_s, pairs_s, q_s, k_s, dq_read, zeros)
    a_s = k_s
    if a is not None:
        # Not allocated at the start, so that it reuses the memory of `do_s`: otherwise two programs would not
        # fit side by side.
        a_s = gl.allocate_shared_memory(gl.bfloat16, [C, BK], OF_K)
        copy(a_s, a + of_keys, H * K, size)
        commit_group()
    ending = gl.sum(dq_read * q_s.load(L).to(gl.float32), 1)
    dq_read += diagonal * beta_t[:, None] * k_s.load(L).to(gl.float32)
    store(dq + of_keys, dq_read, H * K, size, ADDS)

    # 2. The reads of keys, or of `a`, with the gradient -dv.
    wait_for_copies(1 if a is None else 2)
    pairs = warpgroup_mma(dv_s, r_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dk_read = warpgroup_mma(dv_s, S_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    pairs, dk_read = warpgroup_mma_wait(0, [pairs, dk_read])
    if READ_BEFORE:
        # No gate decays the pair of a token with the one before it. It is added last, too.
        of_before = -gl.sum(gl.where(s[None, :] == t[:, None] - 1, pairs, 0.0), 1)
    pairs = _decayed(pairs, of_chunk, -1.0, READ_BEFORE)
    dk_read = -dk_read
    if READ_BEFORE:
        dk_read *= gl.exp2(sums_before(of_chunk, t))[:, None]
    elif sums is not None:
        dk_read *= from_start
    if a is not None:
        wait_for_copies(0)
    dk_read, in_chunk = _through_pairs(pairs, beta_s, pairs_s, a_s, k_s, dk_read, in_chunk)
    of_sums = gl.sum(dk_read * a_s.load(L).to(gl.float32), 1)
    ending += _of_next(of_sums, L) if READ_BEFORE else of_sums
    k_ = k_s.load(L).to(gl.float32)

    # 3. The writes of keys, through the state after the chunk.
    wait_for_copies(0)
    written = warpgroup_mma(r_s, dS_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if d_sums is not None:
        of_state = gl.sum(S_s.load(ROW_LAYOUT).to(gl.float32) * dS_s.load(ROW_LAYOUT).to(gl.float32), 1)
    written = warpgroup_mma_wait(0, [written])
    if sums is not None:
        written *= gl.exp2(total - sum_t)[:, None]
    # 4. The gradients of sums of gates, of `beta` and of keys.
    if d_sums is not None:
        d = gl.arange(0, BK, gl.SliceLayout(1, ROW_LAYOUT))
        gl.store(d_total + rh * K + tile * BK + d, of_state * gl.exp2(total))
        at = d_sums + ((row * 3 * tiles + tile) * HV + h) * C + t
        gl.store(at + ENDING * tiles * HV * C, ending)
        gl.store(at + BEGINNING * tiles * HV * C, gl.sum(in_chunk * k_, 1) * beta_t)
        gl.store(at + LEAVING * tiles * HV * C, gl.sum(written * k_, 1) * beta_t)
    written += in_chunk + diagonal * q_s.load(L).to(gl.float32)
    if READ_BEFORE:
        pairs = gl.where(s[None, :] == t[:, None] - 1, of_before[:, None], 0.0)
        dk_read, written = _through_pairs(pairs, beta_s, pairs_s, a_s, k_s, dk_read, written)
        k_ = k_s.load(L).to(gl.float32)  # again, as registers are scarce
    d_beta = gl.sum(written * k_, 1)
    gl.store(dbeta + (lo * tiles + tile) * HV + h + t * tiles * HV, d_beta, mask=t < size)
    written *= beta_t[:, None]
    if a is None:
        written += dk_read
    else:
        store(da + of_keys, dk_read, H * K, size, ADDS)
    store(dk + of_keys, written, H * K, size, ADDS)
