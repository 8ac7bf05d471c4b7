"""The kernel of gradients of `channel_kernels` for Hopper where gates are mild in blocks of 16 tokens, in Gluon.

All gates from -5 to 0 are mild there, while those of a whole chunk are mild only if they are weak. One product,
referred to the middle of each block, holds the pairs of tokens in the same block. For pairs across blocks, the two
largest levels of `channel_kernels` are left, of blocks of 16 and of 32 tokens. There each token has its gates up to its
block's middle or from there. All further gates have the same factor for all tokens of a block.

A warp has the rows of one block. So sums over a block stay in a warp, and what is different for each block is a row of
a table in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops.families._gluon import (
    arrived,
    barrier,
    copy,
    make_visible,
    parts,
    reinterpret,
    rows_of,
    selected,
    store,
    store_parts,
    store_rest,
    sum_of_parts,
    tile_of_program,
)
from flacompose.ops.families.delta_rule.hopper_channels import load_gates, store_gradients_of_keys
from flacompose.ops.families.vector_decay import gates
from flacompose.ops.families.vector_decay.gates import BLOCK, BLOCK_LEVELS, LEVELS, MILD_BOUND, C

from_block_middle = gluon.jit(gates.from_block_middle.fn)
in_same_block = gluon.jit(gates.in_same_block.fn)
siblings = gluon.jit(gates.siblings.fn)
tf32_rounded = gluon.jit(gates.tf32_rounded.fn)
size_of_gate = gluon.jit(gates.size_of_gate.fn)

BLOCKS = gl.constexpr(C.value // BLOCK.value)  # of a chunk
# The kinds of decay that the tokens of a block have in common. The first two are those of the levels between blocks of
# 16 and of 32 tokens. The others are from the chunk's start, and to its end.
LEVEL_COUNT = gl.constexpr(LEVELS.value - BLOCK_LEVELS.value)
FROM_START = gl.constexpr(2)
TO_END = gl.constexpr(3)
KINDS = gl.constexpr(4)


@gluon.constexpr_function
def _is_decayed_by(half, kind, block):
    """Whether the gates of a half of a block, from 0 to 7, belong to the decay of this `kind` of the tokens of `block`.

    A token has its own gates only up to its block's middle, or from there. For one that reads, those between the start
    of a group of 1, 2 or all 4 blocks and that middle are left, and for one that writes, those between that middle and
    the end of the group.
    """
    middle = 2 * block + 1
    blocks = 2**kind if kind < LEVEL_COUNT.value else BLOCKS.value
    reads = kind == FROM_START.value or (kind < LEVEL_COUNT.value and block // blocks % 2 == 1)
    start = block // blocks * blocks * 2
    return start <= half < middle if reads else middle <= half < start + 2 * blocks


@gluon.constexpr_function
def _one_row():
    """How threads share out one number of each channel."""
    return gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])


@gluon.jit
def _row(table, kind: gl.constexpr, block: gl.constexpr):
    """The row of a table for this `kind` of decay of the tokens of `block`."""
    return table.index(kind).slice(block, 1)


@gluon.jit
def _store_decays(decays_s, halves_s):
    """Of each kind and block, what the gates leave up to the block's middle or from there.

    The decay of a token is this, times that between the token and the middle, and so a product of two exponentials. It
    is exact to float32's rounding of sums of up to 148. Beyond that the first factor is 0: decays below exp(-58) are
    lost, which no result shows.
    """
    D: gl.constexpr = halves_s.shape[1]
    for kind in gl.static_range(KINDS):
        for block in gl.static_range(BLOCKS):
            total = gl.zeros([1, D], gl.float32, _one_row())
            for half in gl.static_range(2 * BLOCKS):
                if _is_decayed_by(half, kind, block):
                    total += halves_s.slice(half, 1).load(_one_row())
            _row(decays_s, kind, block).store(gl.exp(total))


@gluon.jit
def _store_gradients_of_halves(halves_s, sums_s, d_total):
    """The gradients of the sums of gates of halves of blocks: of all that they decay, as `_store_decays` has it."""
    for half in gl.static_range(2 * BLOCKS):
        gradient = d_total
        for kind in gl.static_range(KINDS):
            for block in gl.static_range(BLOCKS):
                if _is_decayed_by(half, kind, block):
                    gradient += _row(sums_s, kind, block).load(_one_row())
        halves_s.slice(half, 1).store(gradient)


@gluon.jit
def _per_block(x, rows: gl.constexpr):
    """`x`, cut into blocks of `rows`."""
    return x.reshape([x.shape[0] // rows, rows, x.shape[1]])


@gluon.jit
def _decayed(x, decays_s):
    """`x`, each block of its rows times what the gates leave."""
    of_blocks = _per_block(x, BLOCK)
    ROW: gl.constexpr = gl.SliceLayout(1, of_blocks.type.layout)
    decay = decays_s.load(ROW)
    return gl.convert_layout(
        (of_blocks * decay[:, None, :]).reshape(x.shape), x.type.layout, assert_trivial=True
    )


@gluon.jit
def _add_sums(sums_s, x):
    """Add the sum over each block of the rows of `x`."""
    sums = gl.sum(_per_block(x, BLOCK), 1)
    sums_s.store(sums_s.load(sums.type.layout) + sums)


@gluon.jit
def _product(a, b_s, out):
    """``out + a @ b`` of both parts of `a`, which is in registers, and of `b`, the smallest products first."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
    high, low = parts(a)
    high, low = gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)
    out = warpgroup_mma(low, b_s.index(1), out, is_async=True)
    out = warpgroup_mma(low, b_s.index(0), out, is_async=True)
    out = warpgroup_mma(high, b_s.index(1), out, is_async=True)
    out = warpgroup_mma(high, b_s.index(0), out, is_async=True)
    return warpgroup_mma_wait(0, [out])


@gluon.jit
def _pairs(do_s, r_s, weight, L: gl.constexpr):
    """The gradient of the product of each two tokens, at both places, and of each token with itself."""
    C: gl.constexpr = do_s.shape[0]
    t = gl.arange(0, C, gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, L))[None, :]
    zeros = gl.zeros([C, C], gl.float32, L)
    # At transposed places both add up the same products in the same order.
    lower = warpgroup_mma(do_s, r_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    upper = warpgroup_mma(r_s, do_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lower, upper = warpgroup_mma_wait(0, [lower, upper])
    on_diagonal = weight * gl.sum(gl.where(s == t, lower, 0.0), 1)
    return weight * gl.where(s < t, lower, gl.where(s > t, upper, 0.0)), on_diagonal


@gluon.jit
def _reader(x, do_s, r_s, S_s, weight, decays_s, x_s, writer_s, role_s, written, sums_s, GATES: gl.constexpr):
    """The gradient of readers `x` that meet the gradient `do`, and `written` with what they add to that of writers.

    Both are those of vectors that gates have decayed from or to their block's middle. The third result is the gradient
    of the product of each token with itself. `role_s` may have the memory of `do_s`.

    Within a block, a pair that a gate does not decay is added to the gradient of the gate and subtracted. Both times it
    is a product of the same rounded factors, without a part left out, so that it cancels.
    """
    L: gl.constexpr = x.type.layout
    t = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, x.shape[0], gl.SliceLayout(0, L))[None, :]
    zeros = gl.zeros(x.shape, gl.float32, L)
    store_parts(x_s, x)
    read = warpgroup_mma(do_s, S_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    read = _decayed(weight * warpgroup_mma_wait(0, [read]), decays_s.index(FROM_START))
    pairs, on_diagonal = _pairs(do_s, r_s, weight, L)
    if GATES:
        _add_sums(sums_s.index(FROM_START), sum_of_parts(x_s, L) * read)
    make_visible()
    within = in_same_block(t, s)
    read = _product(gl.where(within & (s < t), pairs, 0.0), writer_s, read)
    written = _product(gl.where(within & (s > t), pairs, 0.0), x_s, written)
    # Loops over levels and, below, over readers: the kernel takes three times as long where its instructions do not fit
    # in their cache.
    for kind in range(LEVEL_COUNT):
        level = BLOCK_LEVELS + kind
        odd = ((t >> level) & 1) == 1
        role = gl.where(odd, sum_of_parts(x_s, L), sum_of_parts(writer_s, L))
        role = _decayed(role, decays_s.index(kind))
        store_parts(role_s, role)
        make_visible()
        out = _product(gl.where(siblings(t, s, level), pairs, 0.0), role_s, zeros)
        if GATES:
            _add_sums(sums_s.index(kind), sum_of_parts(role_s, L) * out)
        out = _decayed(out, decays_s.index(kind))
        read += gl.where(odd, out, 0.0)
        written += gl.where(odd, 0.0, out)
    return read, written, on_diagonal[:, None]


@gluon.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def channel_block_kernel(
    # The parameters of `channel_kernel` in `channel_kernels`, with the same meanings, and `mild_chunks`. As there, one
    # kernel makes all gradients, so it has more than 25 parameters.
    q,  # [tokens, H, K]
    k,  # [tokens, H, K]
    a,  # [tokens, H, K]
    beta,  # [tokens, HV]
    gk,  # [tokens, HV, K]
    r,  # [tokens, HV, V]
    do,  # [tokens, HV, V]
    dv,  # [tokens, HV, V]
    pairs,  # [chunks, HV, 2, C, C], stored for tiles that are left to Triton's kernel, as `diagonal` is
    diagonal,  # [chunks, HV, C]
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it
    dq,  # [tokens, HV, K]
    dk,  # [tokens, HV, K]
    da,  # [tokens, HV, K]
    dbeta,  # [tokens, tiles of K, HV], to be added up
    dgk,  # [tokens, HV, K]
    mild_chunks,  # [chunks, HV], those that `hopper_channels` computes
    mild,  # [chunks, HV, tiles of K]: these, and what is computed here
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
    """The gradients of queries, keys, `beta` and, if given, of gates, for a chunk and a tile of channels.

    Tiles whose gates are not mild in blocks are left to Triton's kernel.
    """
    scale = scale.to(gl.float32)
    tiles: gl.constexpr = K // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    size = gl.minimum(hi - lo, C).to(gl.int32)
    rh = row * HV + h
    mild += rh * tiles + tile
    if gl.load(mild_chunks + rh) != 0:
        gl.store(mild, 1)
        return
    first = lo * HV + h
    of_gates = first * K + tile * BK
    of_keys = (lo * H + h // (HV // H)) * K + tile * BK
    at_state = (rh * K + tile * BK) * V
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, L)
    ROWS: gl.constexpr = rows_of(BK, gl.num_warps())
    ROWS_OF_V: gl.constexpr = rows_of(V, gl.num_warps())
    OF_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    OF_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    GATES: gl.constexpr = dgk is not None
    key_reader = k
    if a is not None:
        key_reader = a
    g = load_gates(gk + of_gates, HV * K, size, ROWS, C, BK)
    # `x_s` has the gradient of the state first, and then queries and keys as they arrive.
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, BK], OF_K)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    of_values_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], OF_V)  # `do` and `dv`
    writer_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    decays_s = gl.allocate_shared_memory(gl.float32, [KINDS, BLOCKS, BK], TABLE)
    sums_s = gl.allocate_shared_memory(gl.float32, [KINDS, BLOCKS, BK], TABLE)
    dS_s = reinterpret(x_s, gl.bfloat16, [BK, V], OF_V)
    if V == 2 * BK:
        role_s = reinterpret(
            of_values_s, gl.bfloat16, [2, C, BK], OF_K
        )  # in place of `do`, which is read first
    else:
        role_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    r_s = gl.allocate_shared_memory(gl.bfloat16, [C, V], OF_V)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [BK, V], OF_V)
    copy(k_s, k + of_keys, H * K, size)
    copy(r_s, r + first * V, HV * V, size)
    copy(dS_s, d_states + at_state, V, BK)
    copy(S_s, states + at_state, V, BK)
    copy(of_values_s.index(0), do + first * V, HV * V, size)
    copy(of_values_s.index(1), dv + first * V, HV * V, size)
    commit_group()
    t = gl.arange(0, C, gl.SliceLayout(1, L))
    s = gl.arange(0, C, COLUMNS)[None, :]
    beta_t = gl.load(beta + first + t * HV, mask=t < size, other=0.0).to(gl.float32)[:, None]
    zeros = gl.zeros([C, BK], gl.float32, L)

    # 1. The sums of gates from each block's middle, and whether they are mild. A gate of -inf makes NaNs of sums, which
    # a maximum ignores: its size alone leaves the tile to Triton's kernel.
    PARTS: gl.constexpr = 2 if g.dtype == gl.float32 else 1
    largest = gl.max(gl.max(size_of_gate(g.to(gl.float32), gl.bfloat16), 1), 0)
    store_parts(writer_s, g.to(gl.float32), PARTS)
    make_visible()
    middle = selected(from_block_middle(t[:, None], s), writer_s, zeros, PARTS)
    largest = gl.maximum(gl.max(gl.max(gl.abs(middle), 1), 0), largest)
    is_mild = largest < MILD_BOUND
    gl.store(mild, is_mild.to(gl.int8))
    arrived(0)
    if not is_mild:
        at = pairs + rh * 2 * C * C + t[:, None] * C + s
        of_q, on_diagonal = _pairs(of_values_s.index(0), r_s, scale, L)
        gl.store(diagonal + rh * C + t, on_diagonal)
        gl.store(at, tf32_rounded(gl.where(s < t[:, None], of_q, 0.0), gl.bfloat16))
        of_k, _ = _pairs(of_values_s.index(1), r_s, -1.0, L)
        gl.store(at + C * C, tf32_rounded(gl.where(s < t[:, None], of_k, 0.0), gl.bfloat16))
        return
    g = writer_s.index(0).load(L).to(gl.float32)
    if PARTS == 2:
        g = sum_of_parts(writer_s, L)
    halves_s = reinterpret(sums_s, gl.float32, [2 * BLOCKS, BK], TABLE)
    halves_s.store(gl.sum(_per_block(g, BLOCK // 2), 1))
    _store_decays(decays_s, halves_s)
    d_total = gl.zeros([1, BK], gl.float32, _one_row())
    if GATES:
        # All gates decay the state before the chunk.
        d_total = gl.sum(S_s.load(ROWS_OF_V).to(gl.float32) * dS_s.load(ROWS_OF_V).to(gl.float32), 1)
        d_total = gl.convert_layout(d_total, gl.SliceLayout(0, _one_row()))[None, :]
        d_total *= _row(decays_s, FROM_START, 0).load(_one_row()) * _row(decays_s, TO_END, 0).load(_one_row())
        all_sums_s = reinterpret(sums_s, gl.float32, [KINDS * BLOCKS, BK], TABLE)
        all_sums_s.store(gl.zeros([KINDS * BLOCKS, BK], gl.float32, ROWS))

    # 2. What keys write, through the state after the chunk.
    written = warpgroup_mma(r_s, dS_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    to_middle = gl.exp(middle)
    store_parts(writer_s, k_s.load(L).to(gl.float32) * beta_t / to_middle)
    written = warpgroup_mma_wait(0, [written])
    barrier()  # a warp waits for its own part of the product, and the copy takes the place of what all parts read
    copy(x_s.index(0), q + of_keys, H * K, size)
    commit_group()
    written = _decayed(written, decays_s.index(TO_END))
    if GATES:
        _add_sums(sums_s.index(TO_END), sum_of_parts(writer_s, L) * written)

    # 3. What queries read, and then keys, or `a`: through the state before the chunk and through its pairs.
    d_reader, d_gates, of_itself = zeros, zeros, gl.zeros_like(beta_t)
    for reader in range(2):
        arrived(0)
        x = x_s.index(0).load(L).to(gl.float32) * to_middle
        weight = gl.where(reader == 0, scale, -1.0)
        of_reader_s = of_values_s.index(reader)
        d_reader, written, diagonal_ = _reader(
            x, of_reader_s, r_s, S_s, weight, decays_s, x_s, writer_s, role_s, written, sums_s, GATES
        )
        d_gates += d_reader * sum_of_parts(x_s, L)
        d_reader *= to_middle
        needed_next = q
        if reader == 0:
            needed_next = key_reader
            # No gate decays the pair of a token with itself. It joins last: it would drown the others in the gradient
            # of the gate.
            of_itself = diagonal_
            of_q = d_reader + of_itself * beta_t * k_s.load(L).to(gl.float32)
            role_s.index(0).store(of_q.to(gl.bfloat16))
            store(dq + of_gates, role_s.index(0).load(ROWS), HV * K, size)
        copy(x_s.index(0), needed_next + of_keys, H * K, size)
        commit_group()

    # 4. The gradients of gates, `beta` and keys.
    if GATES:
        # A row of `d_gates` is the gradient of the sum of gates from its block's middle to its token. What a gate does
        # not decay cancels between rows and halves, so all bits of rows count.
        d_gates -= sum_of_parts(writer_s, L) * written
        rest_s = x_s.index(1)
        store_parts(role_s, d_gates)
        store_rest(rest_s, d_gates)
        d_halves_s = reinterpret(decays_s, gl.float32, [2 * BLOCKS, BK], TABLE)
        _store_gradients_of_halves(d_halves_s, sums_s, d_total)
        make_visible()
        d_gates = _per_block(selected(from_block_middle(s, t[:, None]), role_s, zeros, 2, rest_s), BLOCK // 2)
        of_half = d_halves_s.load(gl.SliceLayout(1, d_gates.type.layout))
        store(dgk + of_gates, (d_gates + of_half[:, None, :]).reshape([C, BK]), HV * K, size)
    arrived(0)
    written = written / to_middle + of_itself * x_s.index(0).load(L).to(gl.float32)
    d_beta = dbeta + (lo * tiles + tile) * HV + h + t * tiles * HV
    store_gradients_of_keys(written, d_reader, k_s, beta_t, d_beta, dk, da, of_gates, HV * K, size)
