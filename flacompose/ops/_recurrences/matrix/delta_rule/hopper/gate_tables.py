"""Gates of channels in Gluon kernels: the gates of a chunk, and the decays that a block of 16 tokens shares.

A warp has the rows of one block. So sums over a block stay in a warp, and numbers that differ between blocks
are rows of a table in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flacompose.ops._recurrences.matrix import gates_of_channels
from flacompose.ops._recurrences.matrix.gates_of_channels import BLOCK, C
from flacompose.ops._tiles.blocks import LOG2_E

from_block_middle = gluon.jit(gates_of_channels.from_block_middle.fn)
scaled_gate_size = gluon.jit(gates_of_channels.scaled_gate_size.fn)

# The marks of chunks that `hopper_channel_factor_kernel` of `hopper/channel_factors` writes: gates are factorisable
# about the chunk's middle, or only about the middles of blocks. 0 leaves the factors of a chunk to Triton's kernel.
FACTORISABLE_IN_CHUNK = gl.constexpr(1)
FACTORISABLE_IN_BLOCKS = gl.constexpr(2)

BLOCKS = gl.constexpr(C.value // BLOCK.value)  # of a chunk
TABLE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def decay_of(sums):
    """The decay by gates with these sums, their exponential: two instructions, where `gl.exp` takes five."""
    return gl.exp2(LOG2_E * sums)


@gluon.jit
def load_gates(gk, stride, size, ROW_LAYOUT: gl.constexpr, C: gl.constexpr, BK: gl.constexpr):
    """The given gates of a tile, ``[C, BK]``, and 0 from row `size` on."""
    i = gl.arange(0, C, gl.SliceLayout(1, ROW_LAYOUT))[:, None]
    d = gl.arange(0, BK, gl.SliceLayout(0, ROW_LAYOUT))[None, :]
    return gl.load(gk + i * stride + d, mask=(i < size) & (d < BK), other=0.0)


@gluon.constexpr_function
def table(rows):
    """The layout of a table: each thread has all rows of its channels."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, 4], [0, 1])


@gluon.jit
def load_row(table_s, i: gl.constexpr, L: gl.constexpr):
    """``[1, D]`` of the table, in the layout `L` of all of its rows."""
    return table_s.slice(i, 1).load(L)


@gluon.jit
def with_row(x, i: gl.constexpr, row):
    """`x` with this row at `i`. No thread compares anything: the compiler knows the rows of its registers."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    return gl.where(rows == i, row, x)


@gluon.jit
def sums_of_halves(halves_s, sign: gl.constexpr, KINDS: gl.constexpr):
    """For each kind and block a sum of gates, from the sums of half blocks, weighted by their `sign`."""
    D: gl.constexpr = halves_s.shape[1]
    L: gl.constexpr = table(KINDS * BLOCKS)
    rows = gl.zeros([KINDS * BLOCKS, D], gl.float32, L)
    for kind in gl.static_range(KINDS):
        for block in gl.static_range(BLOCKS):
            row = gl.zeros([1, D], gl.float32, L)
            for half in gl.static_range(2 * BLOCKS):
                if sign(half, kind, block) != 0:
                    row += sign(half, kind, block) * load_row(halves_s, half, L)
            rows = with_row(rows, kind * BLOCKS + block, row)
    return rows


@gluon.jit
def per_block(x, tokens: gl.constexpr):
    """`x`, cut into blocks of this many tokens."""
    return x.reshape([x.shape[0] // tokens, tokens, x.shape[1]])


@gluon.jit
def decayed(x, roots_s):
    """`x`, each block of its tokens times a decay, whose root is in ``roots_s [BLOCKS, D]``.

    The root is given because the decay itself may be too small for float32 although its product with `x` is not:
    gates up to a block's middle, or from there, may have made `x` exp(45) times as large as the given vectors.
    """
    of_blocks = per_block(x, BLOCK)
    roots = roots_s.load(gl.SliceLayout(1, of_blocks.type.layout))[:, None, :]
    of_blocks = of_blocks * roots * roots
    return gl.convert_layout(of_blocks.reshape(x.shape), x.type.layout, assert_trivial=True)
