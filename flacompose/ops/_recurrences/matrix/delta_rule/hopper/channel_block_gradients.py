"""Gradients of tiles whose gates of channels are factorisable in blocks of 16 tokens, on Hopper, in Gluon.

All gates from -5 to 0 are factorisable in such blocks, but in a whole chunk only weak ones are. Each reader is
multiplied by the decay from its block's middle, and each writing key by the decay to it. The decay between two
middles is one factor per channel, the same for all tokens of both blocks. So one product contains the
contributions of one block of keys to all readers, and each block of readers is then multiplied by its factor. In
the same way another product contains the contributions of one block of readers to all keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops._recurrences.matrix import gates_of_channels
from flacompose.ops._recurrences.matrix.delta_rule.hopper.channel_chunk_gradients import (
    store_gradients_of_keys,
)
from flacompose.ops._recurrences.matrix.delta_rule.hopper.gate_tables import (
    BLOCKS,
    FACTORISABLE_IN_CHUNK,
    TABLE_LAYOUT,
    decay_of,
    decayed,
    from_block_middle,
    load_gates,
    load_row,
    per_block,
    scaled_gate_size,
    sums_of_halves,
    table,
    with_row,
)
from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_factors import (
    begin_product,
    halves,
    left_parts,
    products,
)
from flacompose.ops._recurrences.matrix.gates_of_channels import BLOCK, FACTORISABLE_BOUND, C
from flacompose.ops._tiles.hopper import (
    barrier,
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

tf32_rounded = gluon.jit(gates_of_channels.tf32_rounded.fn)

# The kinds of decay that the tokens of a block share. The first three are from the middle of block 0, 1 or 2 to the
# middle of the token's block, and the next three from there to the middle of block 1, 2 or 3. A kind is 1 if its
# end is not later than its beginning. The last two are from the chunk's start to the middle, and from there to
# the chunk's end.
TO_BLOCK = gl.constexpr(2)  # added to 1, 2 or 3
GRADIENT_FROM_START = gl.constexpr(6)
GRADIENT_TO_END = gl.constexpr(7)
GRADIENT_KINDS = gl.constexpr(8)


@gluon.constexpr_function
def _is_decayed_by(half, kind, block):
    """Whether the gates of a half block, 0 to 7, belong to the decay of this `kind` of `block`."""
    middle = 2 * block + 1
    if kind == GRADIENT_FROM_START.value:
        return int(half < middle)
    if kind == GRADIENT_TO_END.value:
        return int(half >= middle)
    if kind <= TO_BLOCK.value:
        return int(2 * kind + 1 <= half < middle)
    return int(middle <= half < 2 * (kind - TO_BLOCK.value) + 1)


@gluon.jit
def _store_roots(roots_s, halves_s):
    """The root of the decay of each kind and block, in ``roots_s [32, D]``, for `decayed`.

    Gradients are accumulated for vectors that gates have decayed from or to their block's middle, so they are
    up to exp(45) times larger or smaller than gradients of the inputs. Float32 loses bits of numbers below
    exp(-87). So of vectors and gradients of size 1, it may not hold the gradients of pairs of tokens that
    gates weaken to less than exp(-42). That shows only in a tensor whose gradients are all as weak.
    """
    roots_s.store(decay_of(0.5 * sums_of_halves(halves_s, _is_decayed_by, GRADIENT_KINDS)))


@gluon.jit
def _store_gradients_of_halves(halves_s, sums_s, d_total):
    """The gradients of the sums of gates of half blocks: of all decays that contain them.

    They follow from the sums over each block of the gradients of these decays, ``sums_s [32, D]``, without
    the kinds to later blocks: the decay between a reader and a key is counted once, with the reader.
    """
    D: gl.constexpr = halves_s.shape[1]
    L: gl.constexpr = table(2 * BLOCKS)
    rows = gl.zeros([2 * BLOCKS, D], gl.float32, L)
    for half in gl.static_range(2 * BLOCKS):
        gradient = d_total
        for kind in gl.static_range(GRADIENT_KINDS):
            for block in gl.static_range(BLOCKS):
                if (kind <= TO_BLOCK or kind >= GRADIENT_FROM_START) and _is_decayed_by(half, kind, block):
                    gradient += load_row(sums_s, kind * BLOCKS + block, L)
        rows = with_row(rows, half, gradient)
    halves_s.store(rows)


@gluon.jit
def _add_sums(sums_s, x):
    """Add the sum over each block of the rows of `x`."""
    sums = gl.sum(per_block(x, BLOCK), 1)
    sums_s.store(sums_s.load(sums.type.layout) + sums)


@gluon.jit
def _product(a, b_s, block, zeros):
    """``a @ b`` of both parts of `a` and of this block of rows of `b`, smallest products first."""
    OUT: gl.constexpr = zeros.type.layout
    D: gl.constexpr = b_s.shape[2]
    OF_BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], gl.bfloat16)
    # Both parts are cut into blocks, which lie one after the other, because a row has at most 128 bytes.
    blocks_s = reinterpret(b_s, gl.bfloat16, [2 * BLOCKS, BLOCK, D], OF_BLOCK)
    high_s, low_s = blocks_s.index(block), blocks_s.index(BLOCKS + block)
    high, low = left_parts(a, OUT)
    # `begin_product` omits the product of the smaller parts. It counts in gradients of gates, which are
    # differences.
    out = warpgroup_mma(low, low_s, zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [begin_product((high, low), (high_s, low_s), out)])


@gluon.jit
def _blocks(x):
    """`x`, split into the columns of each block."""
    left, right = halves(x)
    first, second = halves(left)
    third, fourth = halves(right)
    return first, second, third, fourth


@gluon.jit
def _pairs(do_s, r_s, weight, L: gl.constexpr):
    """The gradient of the product of each two tokens, at both places, and of each token with itself."""
    C: gl.constexpr = do_s.shape[0]
    t = gl.arange(0, C, gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, L))[None, :]
    zeros = gl.zeros([C, C], gl.float32, L)
    # Both add up the same products in the same order, at transposed places.
    lower = warpgroup_mma(do_s, r_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    upper = warpgroup_mma(r_s, do_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lower, upper = warpgroup_mma_wait(0, [lower, upper])
    on_diagonal = weight * gl.sum(gl.where(s == t, lower, 0.0), 1)
    return weight * gl.where(s < t, lower, gl.where(s > t, upper, 0.0)), on_diagonal


@gluon.jit
def _through_pairs(pairs, roots_s, x_s, writer_s, read, written, sums_s, GATES: gl.constexpr):
    """`read` and `written` plus the gradients of readers and writers through a chunk's `pairs`.

    Both are gradients of vectors that gates have decayed from or to their block's middle, like those in `x_s`
    and `writer_s`. Between a reader's block and a writer's, the decay is one factor for each channel.

    A pair that a gate does not decay is added to the gradient of the gate and subtracted. Both times it is a
    product of the same rounded factors, with all parts, so it cancels.
    """
    OUT: gl.constexpr = read.type.layout
    L: gl.constexpr = products(BLOCK)
    t = gl.arange(0, read.shape[0], gl.SliceLayout(1, L))[:, None]
    s = gl.arange(0, BLOCK, gl.SliceLayout(0, L))[None, :]
    zeros = gl.zeros(read.shape, gl.float32, OUT)
    of_block, second, third, fourth = _blocks(pairs)
    # Loops, here and over readers: the kernel takes three times as long if its instructions do not fit in
    # their cache.
    for block in range(BLOCKS):
        out = _product(gl.where(s < t - block * BLOCK, of_block, 0.0), writer_s, block, zeros)
        # Only its own tokens read the last block. Kind 3 has the decay 1 for them, and its sums are not used.
        out = decayed(out, roots_s.index(block))
        if GATES:
            _add_sums(sums_s.index(block), sum_of_parts(x_s, OUT) * out)
        read += out
        out = _product(gl.where(s > t - block * BLOCK, of_block, 0.0), x_s, block, zeros)
        # Only its own keys write for the readers of the first block. Kind 2 has the decay 1 for them.
        written += decayed(out, roots_s.index(TO_BLOCK + block))
        of_block, second, third, fourth = second, third, fourth, of_block
    return read, written


@gluon.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def hopper_channel_block_gradient_kernel(
    # The parameters of `delta_channel_gradient_kernel` in `channel_gradients`, with the same meanings, and
    # `factorisable_chunks`. As there, one kernel computes all gradients.
    vectors,  # `KeyVectors`
    gk,  # [tokens, HV, K]
    values,  # `ValueVectors`
    stored,  # `StoredPairs`, stored for tiles that are left to Triton's kernel
    states,  # [chunks, HV, K, V], before each chunk
    d_states,  # [chunks, HV, K, V], after it
    made,  # `KeyGradients`
    dgk,  # [tokens, HV, K]
    factorisable_chunks,  # [chunks, HV]; `hopper/channel_chunk_gradients` computes `FACTORISABLE_IN_CHUNK`
    # [chunks, HV, tiles of K], whether `hopper/channel_chunk_gradients` or this kernel computes the tile
    factorisable_tiles,
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

    Tiles whose gates are not factorisable in blocks are left to the kernel of `channel_gradients`.
    """
    q, k, a, beta = vectors
    do, r, dv = values
    dq, dk, da, dbeta = made
    pairs, diagonal = stored.pairs, stored.diagonal
    scale = scale.to(gl.float32)
    tiles: gl.constexpr = K // BK
    tile, row, h, lo, hi = tile_of_program(tiles, T, N, HV, cu_seqlens, C)
    if lo >= hi:
        return
    size = gl.minimum(hi - lo, C).to(gl.int32)
    rh = row * HV + h
    factorisable_tiles += rh * tiles + tile
    if gl.load(factorisable_chunks + rh) == FACTORISABLE_IN_CHUNK:
        gl.store(factorisable_tiles, 1)
        return
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
    GATES: gl.constexpr = dgk is not None
    key_reader = k
    if a is not None:
        key_reader = a
    g = load_gates(gk + first_gate, HV * K, size, ROW_LAYOUT, C, BK)
    # `x_s` first holds the gradient of the state, and then queries and keys as they arrive. The sums of
    # gradients replace the writing keys, which are read again at the end. After the readers have been used,
    # the second part of `x_s` holds their gradient, and then the third part of the gradient of gates.
    sums_s = gl.allocate_shared_memory(gl.float32, [GRADIENT_KINDS, BLOCKS, BK], TABLE_LAYOUT)
    roots_s = gl.allocate_shared_memory(gl.float32, [GRADIENT_KINDS, BLOCKS, BK], TABLE_LAYOUT)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    of_values_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], OF_V)  # `do` and `dv`
    writer_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], OF_K)
    r_s = gl.allocate_shared_memory(gl.bfloat16, [C, V], OF_V)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [BK, V], OF_V)
    dS_s = reinterpret(x_s, gl.bfloat16, [2 * C // V, BK, V], OF_V).index(0)
    k_s = reinterpret(sums_s, gl.bfloat16, [C, BK], OF_K)
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

    # 1. The sums of gates from each block's middle, and whether they are factorisable. A gate of -inf makes
    # NaNs of sums, which a maximum ignores: only its own size leaves the tile to Triton's kernel.
    PARTS: gl.constexpr = 2 if g.dtype == gl.float32 else 1
    largest = gl.max(gl.max(scaled_gate_size(g.to(gl.float32), gl.bfloat16), 1), 0)
    store_parts(writer_s, g.to(gl.float32), PARTS)
    make_visible()
    middle = select(from_block_middle(t[:, None], s), writer_s, zeros, PARTS)
    largest = gl.maximum(gl.max(gl.max(gl.abs(middle), 1), 0), largest)
    is_factorisable = largest < FACTORISABLE_BOUND
    gl.store(factorisable_tiles, is_factorisable.to(gl.int8))
    wait_for_copies(0)
    if not is_factorisable:
        at = pairs + rh * 2 * C * C + t[:, None] * C + s
        d_qk, on_diagonal = _pairs(of_values_s.index(0), r_s, scale, L)
        gl.store(diagonal + rh * C + t, on_diagonal)
        gl.store(at, tf32_rounded(gl.where(s < t[:, None], d_qk, 0.0), gl.bfloat16))
        d_ak, _ = _pairs(of_values_s.index(1), r_s, -1.0, L)
        gl.store(at + C * C, tf32_rounded(gl.where(s < t[:, None], d_ak, 0.0), gl.bfloat16))
        return
    g = writer_s.index(0).load(L).to(gl.float32)
    if PARTS == 2:
        g = sum_of_parts(writer_s, L)
    halves_s = reinterpret(roots_s, gl.float32, [GRADIENT_KINDS // 2, 2 * BLOCKS, BK], TABLE_LAYOUT).index(0)
    halves_s.store(gl.sum(per_block(g, BLOCK // 2), 1))
    all_roots_s = reinterpret(roots_s, gl.float32, [GRADIENT_KINDS * BLOCKS, BK], TABLE_LAYOUT)
    all_sums_s = reinterpret(sums_s, gl.float32, [GRADIENT_KINDS * BLOCKS, BK], TABLE_LAYOUT)
    _store_roots(all_roots_s, halves_s)
    HALVES: gl.constexpr = table(2 * BLOCKS)
    d_total = gl.zeros([1, BK], gl.float32, HALVES)
    if GATES:
        # All gates decay the state before the chunk.
        d_total = gl.sum(S_s.load(V_ROW_LAYOUT).to(gl.float32) * dS_s.load(V_ROW_LAYOUT).to(gl.float32), 1)
        d_total = gl.convert_layout(d_total, gl.SliceLayout(0, HALVES))[None, :]
        for kind in gl.static_range(GRADIENT_FROM_START, GRADIENT_KINDS):
            root = load_row(all_roots_s, kind * BLOCKS, HALVES)
            d_total *= root * root

    # 2. The writes of keys, through the state after the chunk.
    written = warpgroup_mma(r_s, dS_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    store_parts(writer_s, k_s.load(L).to(gl.float32) * beta_t * decay_of(-middle))
    to_middle = decay_of(middle)
    if GATES:
        all_sums_s.store(gl.zeros([GRADIENT_KINDS * BLOCKS, BK], gl.float32, ROW_LAYOUT))
    written = warpgroup_mma_wait(0, [written])
    barrier()  # a warp has waited for its own part of the product only, and the copy overwrites its operand
    copy(x_s.index(0), q + of_keys, H * K, size)
    commit_group()
    written = decayed(written, roots_s.index(GRADIENT_TO_END))
    if GATES:
        _add_sums(sums_s.index(GRADIENT_TO_END), sum_of_parts(writer_s, L) * written)

    # 3. The reads of queries, and then of keys, or `a`: through the state before the chunk and through its
    # pairs.
    d_reader, d_gates, d_diagonal = zeros, zeros, gl.zeros_like(beta_t)
    for reader in range(2):
        wait_for_copies(0)
        x = x_s.index(0).load(L).to(gl.float32) * to_middle
        store_parts(x_s, x)
        weight = gl.where(reader == 0, scale, -1.0)
        do_s = of_values_s.index(reader)
        d_reader = warpgroup_mma(do_s, S_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_reader = decayed(weight * warpgroup_mma_wait(0, [d_reader]), roots_s.index(GRADIENT_FROM_START))
        if GATES:
            _add_sums(sums_s.index(GRADIENT_FROM_START), sum_of_parts(x_s, L) * d_reader)
        of_pairs, on_diagonal = _pairs(do_s, r_s, weight, L)
        make_visible()
        d_reader, written = _through_pairs(of_pairs, roots_s, x_s, writer_s, d_reader, written, sums_s, GATES)
        d_gates += d_reader * sum_of_parts(x_s, L)
        d_reader *= to_middle
        barrier()  # a warp has waited for its own products only, and their operands are overwritten
        needed_next = q
        if reader == 0:
            needed_next = key_reader
            # No gate decays the pair of a token with itself. It is added last, since it would drown the
            # others in the gate's gradient. The key is recovered from the writer, to 16 bits.
            d_diagonal = on_diagonal[:, None]
            dq_ = d_reader + d_diagonal * (sum_of_parts(writer_s, L) * to_middle)
            x_s.index(1).store(dq_.to(gl.bfloat16))
            store(dq + first_gate, x_s.index(1).load(ROW_LAYOUT), HV * K, size)
        copy(x_s.index(0), needed_next + of_keys, H * K, size)
        commit_group()

    # 4. The gradients of gates, `beta` and keys.
    k_s = reinterpret(of_values_s, gl.bfloat16, [2 * V // BK, C, BK], OF_K).index(0)
    copy(k_s, k + of_keys, H * K, size)
    commit_group()
    if GATES:
        # A row of `d_gates` is the gradient of the sum of gates from its block's middle to its token. Terms
        # that a gate does not decay cancel between rows and halves, so all bits of rows count.
        d_gates -= sum_of_parts(writer_s, L) * written
        store_three_parts(writer_s, x_s.index(1), d_gates)
        d_halves_s = reinterpret(
            roots_s, gl.float32, [GRADIENT_KINDS // 2, 2 * BLOCKS, BK], TABLE_LAYOUT
        ).index(0)
        _store_gradients_of_halves(d_halves_s, all_sums_s, d_total)
        make_visible()
        choice = from_block_middle(s, t[:, None])
        d_gates = per_block(select(choice, writer_s, zeros, 2, x_s.index(1)), BLOCK // 2)
        of_half = d_halves_s.load(gl.SliceLayout(1, d_gates.type.layout))
        store(dgk + first_gate, (d_gates + of_half[:, None, :]).reshape([C, BK]), HV * K, size)
    wait_for_copies(0)
    written = written / to_middle + d_diagonal * x_s.index(0).load(L).to(gl.float32)
    d_beta = dbeta + (lo * tiles + tile) * HV + h + t * tiles * HV
    store_gradients_of_keys(written, d_reader, k_s, beta_t, d_beta, dk, da, first_gate, HV * K, size)
