"""Gradients of chunks with factorisable gates of channels on Hopper, in Gluon: bfloat16, heads of 64 and 128.

The kernel computes the chunks that `hopper_channel_factor_kernel` has marked as `FACTORISABLE_IN_CHUNK`,
including the gradients of pairs. The kernels of `hopper/channel_block_gradients` and `channel_gradients` compute
the other chunks. A product of two float32 factors is one of bfloat16 parts, because a product in TF32 requires
the contracted axis to be the last of both operands in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops._recurrences.matrix import gates_of_channels
from flacompose.ops._recurrences.matrix.delta_rule.hopper.gate_tables import (
    FACTORISABLE_IN_CHUNK,
    decay_of,
    load_gates,
)
from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_factors import products
from flacompose.ops._tiles.hopper import (
    copy,
    make_visible,
    reinterpret,
    row_layout,
    select,
    store,
    store_parts,
    store_three_parts,
    sum_of_parts,
    tile_of_program,
    wait_for_copies,
)

from_middle = gluon.jit(gates_of_channels.from_middle.fn)


@gluon.jit
def _products(a_s, b_s, out, ACROSS: gl.constexpr):
    """Begin ``out + a @ b``, with ``a^T`` if `ACROSS`, of both parts, smallest products first."""
    for part in gl.static_range(2):
        a = a_s.index(1 - part)
        if ACROSS:
            a = a.permute((1, 0))
        out = warpgroup_mma(a, b_s.index(1), out, is_async=True)
        out = warpgroup_mma(a, b_s.index(0), out, is_async=True)
    return out


@gluon.jit
def _sums_of_gates(g, g_s, L: gl.constexpr):
    """The sums of gates from the chunk's middle, and the decays of both halves."""
    C: gl.constexpr = g.shape[0]
    PARTS: gl.constexpr = 2 if g.dtype == gl.float32 else 1
    g = g.to(gl.float32)
    store_parts(g_s, g, PARTS)
    make_visible()
    t = gl.arange(0, C, gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, L))[None, :]
    middle = select(from_middle(t, s), g_s, gl.zeros([C, g.shape[1]], gl.float32, L), PARTS)
    is_early = gl.arange(0, C, gl.SliceLayout(1, g.type.layout))[:, None] < C // 2
    early = gl.sum(gl.where(is_early, g, 0.0), 0)
    late = gl.sum(gl.where(is_early, 0.0, g), 0)
    return middle, decay_of(early), decay_of(late), is_early


@gluon.jit
def _read(do_s, r_s, S_s, zeros):
    """``do r^T`` and ``do S^T``."""
    pairs = warpgroup_mma(do_s, r_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    read = warpgroup_mma(do_s, S_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [pairs, read])


@gluon.jit
def _sum_over_tokens(x, ROW_LAYOUT: gl.constexpr):
    """The sum of the rows of `x`, first over the rows of each warp: `gl.sum` of all needs more registers."""
    of_warps = gl.sum(x.reshape([4, x.shape[0] // 4, x.shape[1]]), 1)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    of_warps_s = gl.allocate_shared_memory(gl.float32, [4, x.shape[1]], layout, of_warps)
    return gl.sum(of_warps_s.load(ROW_LAYOUT), 0)


@gluon.jit
def _reader(x, do_s, r_s, S_s, weight, from_start, x_s, pairs_s, writer_s, written):
    """The gradients of readers `x`, with the gradient `do`, and of writers, from the chunk's middle.

    Also the diagonal of the pairs, the readers' gradient times `x`, and the sum over tokens of its part from
    the state.

    A pair that a gate does not decay is added to its gradient and subtracted. Both times it is a product of
    the same rounded factors, with all parts, so it cancels.
    """
    L: gl.constexpr = x.type.layout
    t = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, x.shape[0], gl.SliceLayout(0, L))[None, :]
    store_parts(x_s, x)
    pairs, read = _read(do_s, r_s, S_s, gl.zeros(x.shape, gl.float32, L))
    pairs *= weight
    on_diagonal = gl.sum(gl.where(s == t, pairs, 0.0), 1)[:, None]
    store_parts(pairs_s, gl.where(s < t, pairs, 0.0))
    make_visible()
    read *= weight * gl.convert_layout(from_start, gl.SliceLayout(0, L))[None, :]
    ROW_LAYOUT: gl.constexpr = from_start.type.layout.parent
    by_state = _sum_over_tokens(sum_of_parts(x_s, L) * read, ROW_LAYOUT)
    read = _products(pairs_s, writer_s, read, False)
    written = _products(pairs_s, x_s, written, True)
    read, written = warpgroup_mma_wait(0, [read, written])
    return read, written, on_diagonal, read * sum_of_parts(x_s, L), by_state


@gluon.jit
def store_gradients_of_keys(written, d_reader, k_s, beta_t, dbeta, dk, da, first, stride, size):
    """Store the gradients of `beta`, of keys and, at `da`, of `a`. Without `da` keys also read, and both are added.

    `written` is the gradient of each key times its `beta`, and `d_reader` the gradient of the readers.
    `dbeta` has an address for each token.
    """
    L: gl.constexpr = written.type.layout
    t = gl.arange(0, written.shape[0], gl.SliceLayout(1, L))
    gl.store(dbeta, gl.sum(written * k_s.load(L).to(gl.float32), 1), mask=t < size)
    written *= beta_t
    if da is None:
        store(dk + first, d_reader + written, stride, size)
    else:
        store(dk + first, written, stride, size)
        store(da + first, d_reader, stride, size)


@gluon.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def hopper_channel_chunk_gradient_kernel(
    # The parameters of `delta_channel_gradient_kernel` in `channel_gradients`, with the same meanings, and
    # `factorisable_chunks`.
    vectors,  # `KeyVectors`
    gk,  # [tokens, HV, K]
    values,  # `ValueVectors`
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it
    made,  # `KeyGradients`
    dgk,  # [tokens, HV, K]
    factorisable_chunks,  # [chunks, HV], the marks from `hopper_channel_factor_kernel`
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
):
    """The gradients of queries, keys, `beta` and gates, for a factorisable chunk and a tile of channels."""
    q, k, a, beta = vectors
    do, r, dv = values
    dq, dk, da, dbeta = made
    C: gl.constexpr = gates_of_channels.C
    scale = scale.to(gl.float32)
    tiles: gl.constexpr = K // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    rh = row * HV + h
    if gl.load(factorisable_chunks + rh) != FACTORISABLE_IN_CHUNK:
        return
    size = gl.minimum(hi - lo, C).to(gl.int32)
    first = lo * HV + h
    first_gate = first * K + tile * BK
    of_keys = (lo * H + h // (HV // H)) * K + tile * BK
    at_state = (rh * K + tile * BK) * V
    L: gl.constexpr = products(BK)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, L)
    ROW_LAYOUT: gl.constexpr = row_layout(BK, gl.num_warps())
    V_ROW_LAYOUT: gl.constexpr = row_layout(V, gl.num_warps())
    OF_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    OF_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    OF_GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.float32)
    g = load_gates(gk + first_gate, HV * K, size, ROW_LAYOUT, C, BK)
    # The buffers of two-part operands first hold tensors that are needed before those operands exist.
    qk_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    of_q_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    of_k_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    writer_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    q_s, k_s = qk_s.index(0), qk_s.index(1)
    dS_s = reinterpret(x_s, gl.bfloat16, [2 * C // V, BK, V], OF_V).index(0)
    do_s = reinterpret(of_q_s, gl.bfloat16, [2 * BK // V, C, V], OF_V).index(0)
    r_s = gl.allocate_shared_memory(gl.bfloat16, [C, V], OF_V)
    dv_s = reinterpret(of_k_s, gl.bfloat16, [2 * BK // V, C, V], OF_V).index(0)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [BK, V], OF_V)
    copy(k_s, k + of_keys, H * K, size)
    copy(r_s, r + first * V, HV * V, size)
    copy(dS_s, d_states + at_state, V, BK)
    copy(S_s, states + at_state, V, BK)
    commit_group()
    copy(do_s, do + first * V, HV * V, size)
    copy(q_s, q + of_keys, H * K, size)
    copy(dv_s, dv + first * V, HV * V, size)
    commit_group()
    t = gl.arange(0, C, gl.SliceLayout(1, L))
    s = gl.arange(0, C, COLUMNS)[None, :]
    beta_t = gl.load(beta + first + t * HV, mask=t < size, other=0.0).to(gl.float32)[:, None]
    zeros = gl.zeros([C, BK], gl.float32, L)

    # 1. The sums of gates from the chunk's middle.
    middle, from_start, to_end, is_early = _sums_of_gates(g, writer_s, L)
    wait_for_copies(1)
    if dgk is not None:
        # All gates decay the state before the chunk. All early gates also decay its reads, and all late gates
        # the writes to the state after the chunk.
        of_early = gl.sum(S_s.load(V_ROW_LAYOUT).to(gl.float32) * dS_s.load(V_ROW_LAYOUT).to(gl.float32), 1)
        of_early = gl.convert_layout(of_early, gl.SliceLayout(0, ROW_LAYOUT)) * from_start * to_end

    # 2. The writes of keys, through the state after the chunk.
    written = warpgroup_mma(r_s, dS_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    store_parts(writer_s, k_s.load(L).to(gl.float32) * beta_t * decay_of(-middle))
    to_middle = decay_of(middle)
    written = warpgroup_mma_wait(0, [written]) * gl.convert_layout(to_end, COLUMNS)[None, :]
    if dgk is not None:
        of_late = of_early + _sum_over_tokens(sum_of_parts(writer_s, L) * written, ROW_LAYOUT)
    wait_for_copies(0)

    # 3. The reads of queries, through the state before the chunk and through its pairs.
    x = q_s.load(L).to(gl.float32) * to_middle
    d_reader, written, on_diagonal, d_gates, by_state = _reader(
        x, do_s, r_s, S_s, scale, from_start, x_s, of_q_s, writer_s, written
    )
    if a is not None:
        copy(x_s.index(0), a + of_keys, H * K, size)
        commit_group()
    # No gate decays the pair of a token with itself. It is added last, since it would drown the others in the
    # gate's gradient.
    d_reader = d_reader * to_middle + on_diagonal * beta_t * k_s.load(L).to(gl.float32)
    of_q_s.index(0).store(d_reader.to(gl.bfloat16))
    store(dq + first_gate, of_q_s.index(0).load(ROW_LAYOUT), HV * K, size)
    if dgk is not None:
        of_early += by_state
        d_gates_s = reinterpret(of_q_s, gl.float32, [C, BK], OF_GATES)
        d_gates_s.store(d_gates)  # registers are scarce

    # 4. The reads of keys, or of `a`.
    if a is not None:
        wait_for_copies(0)
        x = x_s.index(0).load(L).to(gl.float32) * to_middle
    else:
        x = k_s.load(L).to(gl.float32) * to_middle
    d_reader, written, _, d_gates, by_state = _reader(
        x, dv_s, r_s, S_s, -1.0, from_start, x_s, of_k_s, writer_s, written
    )
    d_reader *= to_middle

    # 5. The gradients of gates, `beta` and keys.
    if dgk is not None:
        # A row of `d_gates` is the gradient of the sum of gates from the middle to its token. Terms that a
        # gate does not decay cancel between rows and `of_early` or `of_late`, so all bits of rows count.
        d_gates += d_gates_s.load(L) - sum_of_parts(writer_s, L) * written
        rest_s = of_k_s.index(0)
        store_three_parts(x_s, rest_s, d_gates)
        make_visible()
        d_gates = gl.convert_layout(select(from_middle(s, t[:, None]), x_s, zeros, 2, rest_s), ROW_LAYOUT)
        d_gates += gl.where(is_early, (of_early + by_state)[None, :], of_late[None, :])
        store(dgk + first_gate, d_gates, HV * K, size)
    written = written / to_middle + on_diagonal * q_s.load(L).to(gl.float32)
    d_beta = dbeta + (lo * tiles + tile) * HV + h + t * tiles * HV
    store_gradients_of_keys(written, d_reader, k_s, beta_t, d_beta, dk, da, first_gate, HV * K, size)
