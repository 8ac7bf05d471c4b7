"""WY factors with gates of channels on Hopper, in Gluon: bfloat16, heads of 64 and 128 keys.

The kernel computes the chunks whose gates are factorisable in blocks of 16 tokens, as all gates from -5 to 0
are. The product of a writing key and its reader is decayed by all gates between them. The reader, in shared
memory, contains the gates from the middle of its own block. The key, in registers, contains the gates up to its
own block's middle, and the gates from there to the middle of the reader's block, which differ for each block of
readers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flacompose.ops._recurrences.matrix.delta_rule.hopper.gate_tables import (
    BLOCKS,
    FACTORISABLE_IN_BLOCKS,
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
)
from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_factors import (
    begin_product,
    inverse,
    joined,
    left_parts,
    multiply,
    products,
    rows,
)
from flacompose.ops._recurrences.matrix.gates_of_channels import BLOCK, FACTORISABLE_BOUND, C
from flacompose.ops._tiles import blocks
from flacompose.ops._tiles.hopper import (
    barrier,
    copy,
    make_visible,
    reinterpret,
    row_layout,
    select,
    store,
    store_parts,
    sum_of_parts,
    tile_of_program,
    wait_for_copies,
)

clamp_gate = gluon.jit(blocks.clamp_gate.fn)

# The kinds of sums of gates that the tokens of a block share. The first ones are from its middle to the
# middle of each block of readers, or 0 if that block is not later. The others are from the chunk's start to
# the block's middle, from there to the chunk's end, of the whole chunk, and from the chunk's middle to the
# block's.
FACTOR_FROM_START = gl.constexpr(BLOCKS.value)
FACTOR_TO_END = gl.constexpr(BLOCKS.value + 1)
OF_CHUNK = gl.constexpr(BLOCKS.value + 2)
FROM_MIDDLE = gl.constexpr(BLOCKS.value + 3)
FACTOR_KINDS = gl.constexpr(BLOCKS.value + 4)
# A reader before its block's middle is multiplied by up to exp(45), and its writing key is divided by the same number.
# For readers of other blocks, keys are multiplied by `RANGE_SHIFT`, so that float32 can hold them, and the products are
# divided by it. Sums of products of up to 3e20 still fit.
RANGE_SHIFT = gl.constexpr(2.0**60)
ROOT_OF_SHIFT = gl.constexpr(2.0**30)


@gluon.constexpr_function
def _sign_in_sum(half, kind, block):
    """The sign of the gates of a half block, 0 to 7, in the sum of this `kind` of `block`, or 0."""
    middle = 2 * block + 1
    if kind == FACTOR_FROM_START.value:
        return int(half < middle)
    if kind == FACTOR_TO_END.value:
        return int(half >= middle)
    if kind == OF_CHUNK.value:
        return 1
    if kind == FROM_MIDDLE.value:
        return int(BLOCKS.value <= half < middle) - int(middle <= half < BLOCKS.value)
    return int(middle <= half < 2 * kind + 1)


@gluon.jit
def _store_tables(tables_s, halves_s):
    """For each kind and block the root of the decay, `RANGE_SHIFT` for readers of other blocks.

    For `OF_CHUNK` it is the whole decay, and for `FROM_MIDDLE` the sum of gates.
    """
    sums = sums_of_halves(halves_s, _sign_in_sum, FACTOR_KINDS)
    row = gl.arange(0, FACTOR_KINDS * BLOCKS, gl.SliceLayout(1, sums.type.layout))[:, None]
    kind = row // BLOCKS
    left = decay_of(gl.where(kind < OF_CHUNK, 0.5 * sums, sums))
    left *= gl.where((kind < BLOCKS) & (kind != row % BLOCKS), ROOT_OF_SHIFT, 1.0)
    tables = reinterpret(tables_s, gl.float32, sums.shape, TABLE_LAYOUT)
    tables.store(gl.where(kind == FROM_MIDDLE, sums, left))


@gluon.jit
def _from_chunk_middle(middle, tables_s):
    """The sums of gates from the chunk's middle, cut into blocks, from those about the middles of blocks."""
    of_blocks = per_block(middle, BLOCK)
    return of_blocks + tables_s.index(FROM_MIDDLE).load(gl.SliceLayout(1, of_blocks.type.layout))[:, None, :]


@gluon.jit
def _product(keys, readers_s, first: gl.constexpr, block: gl.constexpr, zeros):
    """Begin the product of keys with a block's readers, whose parts are `first` and `first` + 1."""
    high_s = readers_s.index(first).slice(block * BLOCK, BLOCK).permute((1, 0))
    low_s = readers_s.index(first + 1).slice(block * BLOCK, BLOCK).permute((1, 0))
    return begin_product(keys, (high_s, low_s), zeros)


@gluon.jit
def _pairs(writer, tables_s, readers_s, block: gl.constexpr):
    """The products of all keys with the queries and with the reading keys of one block.

    Products of keys later than the reader are meaningless, and may be infinite.
    """
    OUT: gl.constexpr = products(BLOCK)
    zeros = gl.zeros([writer.shape[0], BLOCK], gl.float32, OUT)
    keys = left_parts(decayed(writer, tables_s.index(block)), OUT)
    qk = _product(keys, readers_s, 0, block, zeros)
    ak = _product(keys, readers_s, 2, block, zeros)
    qk, ak = warpgroup_mma_wait(0, [qk, ak])
    s = gl.arange(0, writer.shape[0], gl.SliceLayout(1, OUT))[:, None]
    lowered = gl.where(s // BLOCK == block, 1.0, 1.0 / RANGE_SHIFT)
    return qk * lowered, ak * lowered


@gluon.jit
def _all_pairs(writer, tables_s, readers_s):
    """The products of all keys with all queries and all reading keys, ``[s, t]``."""
    qk_0, ak_0 = _pairs(writer, tables_s, readers_s, 0)
    qk_1, ak_1 = _pairs(writer, tables_s, readers_s, 1)
    qk_2, ak_2 = _pairs(writer, tables_s, readers_s, 2)
    qk_3, ak_3 = _pairs(writer, tables_s, readers_s, 3)
    qk = joined(joined(qk_0, qk_1), joined(qk_2, qk_3))
    return qk, joined(joined(ak_0, ak_1), joined(ak_2, ak_3))


@gluon.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def hopper_channel_factor_kernel(
    # The parameters of `delta_channel_factor_kernel`, with the same meanings except `factorisable_chunks`.
    vectors,  # `KeyVectors`
    gk,  # [tokens, HV, K]
    W,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C], transposed
    Y,  # [chunks, HV, C, C], transposed, in float32
    q_decayed,  # [tokens, HV, K]
    k_decayed,  # [tokens, HV, K]
    chunk_decay,  # [chunks, HV, K]
    factorisable_chunks,  # [chunks, HV]: `FACTORISABLE_IN_CHUNK`, `FACTORISABLE_IN_BLOCKS`, or 0 for Triton's kernel
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: gl.constexpr,
):
    """Fills `W`, `P`, `q_decayed`, `k_decayed`, `chunk_decay` and `Y`, if given, of chunks factorisable in blocks.

    It marks each chunk in `factorisable_chunks`, and leaves the others to Triton's kernel.
    """
    q, k, a, beta = vectors
    of_group, row, hk, lo, hi = tile_of_program(HV // H, T, N, H, cu_seqlens, C)
    h = hk * (HV // H) + of_group
    if lo >= hi:
        return
    size = gl.minimum(hi - lo, C).to(gl.int32)
    rh = row * HV + h
    first = lo * HV + h
    of_keys = (lo * H + hk) * K
    first_gate = first * K
    L: gl.constexpr = products(K)
    ROW_LAYOUT: gl.constexpr = row_layout(K, gl.num_warps())
    OF_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    OF_PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    # A gate of -inf may be in no sum from a block's middle, but still decays the reads of other blocks.
    g = clamp_gate(load_gates(gk + first_gate, HV * K, size, ROW_LAYOUT, C, K))
    qk_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], OF_K)
    q_s, k_s = qk_s.index(0), qk_s.index(1)
    # Both parts of queries, and of reading keys. The same memory first holds gates and their sums over half
    # blocks, and after the products of pairs the operands of the later steps.
    readers_s = gl.allocate_shared_memory(gl.bfloat16, [4, C, K], OF_K)
    tables_s = gl.allocate_shared_memory(gl.float32, [FACTOR_KINDS, BLOCKS, K], TABLE_LAYOUT)
    copy(k_s, k + of_keys, H * K, size)
    copy(q_s, q + of_keys, H * K, size)
    commit_group()
    s = gl.arange(0, C, gl.SliceLayout(1, L))[:, None]
    t = gl.arange(0, C, gl.SliceLayout(0, L))[None, :]

    # 1. The sums of gates, and whether they are factorisable.
    PARTS: gl.constexpr = 2 if g.dtype == gl.float32 else 1
    store_parts(readers_s, g.to(gl.float32), PARTS)
    make_visible()
    middle = select(from_block_middle(s, t), readers_s, gl.zeros([C, K], gl.float32, L), PARTS)
    is_factorisable = gl.max(gl.max(gl.abs(middle), 1), 0) < FACTORISABLE_BOUND
    if not is_factorisable:
        gl.store(factorisable_chunks + rh, 0)
        wait_for_copies(0)
        return
    halves_s = reinterpret(
        readers_s.index(2), gl.float32, [C // (4 * BLOCKS), 2 * BLOCKS, K], TABLE_LAYOUT
    ).index(0)
    # A thread has all tokens of half a block.
    HALVES: gl.constexpr = gl.BlockedLayout([BLOCK // 2, 8], [256 // K, K // 8], [4, 1], [1, 0])
    if PARTS == 1:
        g = readers_s.index(0).load(HALVES).to(gl.float32)
    else:
        g = sum_of_parts(readers_s, HALVES)
    halves_s.store(gl.sum(per_block(g, BLOCK // 2), 1))
    _store_tables(tables_s, halves_s)
    ROW: gl.constexpr = table(1)
    d = gl.arange(0, K, gl.SliceLayout(0, ROW))[None, :]
    gl.store(chunk_decay + rh * K + d, load_row(tables_s.index(OF_CHUNK), 0, ROW))
    of_gate = scaled_gate_size(gl.max(gl.max(gl.abs(g), 1), 0), gl.bfloat16)
    of_sums = gl.max(gl.max(gl.max(gl.abs(_from_chunk_middle(middle, tables_s)), 2), 1), 0)
    mark = factorisable_chunks + rh
    in_chunk = gl.maximum(of_gate, of_sums) < FACTORISABLE_BOUND
    gl.store(mark, gl.where(in_chunk, FACTORISABLE_IN_CHUNK, FACTORISABLE_IN_BLOCKS).to(gl.int8))

    # 2. The readers, decayed from their block's middle and from the chunk's start; and the writers, up to
    # their block's middle.
    wait_for_copies(0)
    # A loop, because all instructions of this kernel have to fit in the instruction cache.
    for reader in range(2):
        to = q_decayed
        if reader == 1:
            to = k_decayed
        x_s = q_s
        if a is None:
            x_s = qk_s.index(reader)
        x = x_s.load(L).to(gl.float32) * decay_of(middle)
        store_parts(readers_s, x, 2, 2 * reader)
        q_s.store(decayed(x, tables_s.index(FACTOR_FROM_START)).to(gl.bfloat16))
        store(to + first_gate, q_s.load(ROW_LAYOUT), HV * K, size)
        if a is not None:
            if reader == 0:
                barrier()
                copy(q_s, a + of_keys, H * K, size)
                commit_group()
                wait_for_copies(0)
    writer = k_s.load(L).to(gl.float32) * decay_of(-middle)
    make_visible()

    # 3. The products of pairs of tokens. Rows are writing tokens, columns reading tokens.
    qk, ak = _all_pairs(writer, tables_s, readers_s)
    barrier()  # a warp has waited for its own products only, and their operands are overwritten
    store_parts(readers_s, decayed(writer, tables_s.index(FACTOR_TO_END)))
    PAIRS: gl.constexpr = products(C)
    s = gl.arange(0, C, gl.SliceLayout(1, PAIRS))
    t = gl.arange(0, C, gl.SliceLayout(0, PAIRS))
    beta_s = gl.load(beta + first + s * HV, mask=s < size, other=0.0).to(gl.float32)
    weights = (beta_s * scale.to(gl.float32))[:, None]
    pairs_s = reinterpret(readers_s, gl.bfloat16, [4 * K // C, C, C], OF_PAIRS)
    OF_Q: gl.constexpr = 2 * K // C
    store_parts(pairs_s, gl.where(s[:, None] <= t[None, :], qk * weights, 0.0), 2, OF_Q)
    make_visible()

    # 4. Y and P.
    solved = inverse(gl.where(s[:, None] < t[None, :], ak * beta_s[:, None], 0.0))
    at = rh * C * C
    if Y is not None:
        gl.store(Y + at + s[:, None] * C + t[None, :], solved)
    beta_t = gl.load(beta + first + t * HV, mask=t < size, other=0.0).to(gl.float32)
    store(
        P + at,
        multiply(solved, (pairs_s.index(OF_Q), pairs_s.index(OF_Q + 1)), gl.zeros([C, C], gl.float32, PAIRS)),
        C,
        C,
    )

    # 5. W.
    written = multiply(solved * beta_t[None, :], rows(readers_s, 0, C), gl.zeros([C, K], gl.float32, L))
    store(W + first_gate, written, HV * K, size)
