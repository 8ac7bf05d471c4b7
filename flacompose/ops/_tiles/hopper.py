"""Building blocks of the Gluon kernels for Hopper. In Gluon a program chooses where its operands are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flacompose.ops._tiles import blocks

tile_of_program = gluon.jit(blocks.tile_of_program.fn)
# These functions have other names in Triton 3.6, or in all versions before 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
has_load = hasattr(async_copy, "async_load")
async_load = async_copy.async_load if has_load else async_copy.async_copy_global_to_shared
memory = gl.shared_memory_descriptor
# Since Triton 3.8 the result must be as large as the reinterpreted memory. Where less is needed, callers take
# the first of several.
reinterpret = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret


@gluon.constexpr_function
def row_layout(width, warps):
    """The layout of rows of `width` 16-bit numbers in `warps`: each thread has 16 bytes of a row."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.jit
def _rows(count: gl.constexpr, size, layout: gl.constexpr):
    """The numbers of the rows of a tile, ``[count, 1]``; rows before `size` are copied or stored.

    The second summand is 0, but the compiler does not know it. Otherwise it would keep the offsets of all
    rows in registers where a kernel copies or stores tiles in a loop.
    """
    return gl.arange(0, count, gl.SliceLayout(1, layout))[:, None] + (size >> 31)


@gluon.jit
def copy(to, x, stride, size):
    """Begin to copy the rows of `x`, `stride` elements apart, to `to`: zeros from row `size` on."""
    layout: gl.constexpr = row_layout(to.shape[1], gl.num_warps())
    i = _rows(to.shape[0], size, layout)
    d = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))[None, :]
    async_load(to, x + i * stride + d, mask=(i < size) & (d < to.shape[1]))


@gluon.jit
def make_visible():
    """Make the program's stores to shared memory visible to products."""
    fence_async_shared()
    barrier()


@gluon.jit
def wait_for_copies(later: gl.constexpr):
    """Wait for all but the last `later` groups of copies. Products may read them then."""
    async_copy.wait_group(later)
    make_visible()


@gluon.jit
def store(x, value, stride, size, ADDS: gl.constexpr = False):
    """Store the rows of `value` before `size`, `stride` elements apart, or with `ADDS` add them."""
    layout: gl.constexpr = row_layout(value.shape[1], gl.num_warps())
    i = _rows(value.shape[0], size, layout)
    d = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))[None, :]
    inside = (i < size) & (d < value.shape[1])
    x += i * stride + d
    value = gl.convert_layout(value.to(x.dtype.element_ty), layout)
    if ADDS:
        value += gl.load(x, mask=inside, other=0.0)
    gl.store(x, value, mask=inside)


@gluon.jit
def product(x, y):
    """``x * y``, rounded to float32 before anything else is computed from it.

    `parts` subtracts from a product next, and the compiler may fuse both into one operation, which rounds
    once. It did so in only one of two kernels whose results must have the same bits. A product to which 0 is
    added cannot be fused. Where the compiler fuses alike in both kernels, a plain product is kept.
    """
    return gl.fma(x, y, 0.0)


@gluon.jit
def _cut(x):
    """Float32 `x` without the bits that bfloat16 does not have."""
    return (x.to(gl.int32, bitcast=True) & -0x10000).to(gl.float32, bitcast=True)


@gluon.jit
def parts(x):
    """Two bfloat16 numbers whose sum is float32 `x` to 16 bits, as in `blocks`."""
    high = _cut(x)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def store_parts(to, x, PARTS: gl.constexpr = 2, first=0):
    """Store `x` in the shared memory ``to[first]``, rounded, or in two parts there and in ``to[first + 1]``.

    `make_visible` has to follow.
    """
    if PARTS == 1:
        to.index(first).store(x.to(gl.bfloat16))
    else:
        high, low = parts(x)
        to.index(first).store(high)
        to.index(first + 1).store(low)


@gluon.jit
def sum_of_parts(x_s, L: gl.constexpr):
    """The number that is stored in two parts, in float32."""
    return x_s.index(0).load(L).to(gl.float32) + x_s.index(1).load(L).to(gl.float32)


@gluon.jit
def store_three_parts(to, third, x):
    """Store float32 `x` as three bfloat16 numbers: the two of `store_parts`, and a `third`.

    The second is truncated too, so that the third can hold the whole rest, unless `x` is below 2^-110.
    `make_visible` has to follow.
    """
    high = _cut(x)
    low = _cut(x - high)
    to.index(0).store(high.to(gl.bfloat16))
    to.index(1).store(low.to(gl.bfloat16))
    third.store((x - high - low).to(gl.bfloat16))


@gluon.jit
def select(choice, x_s, zeros, PARTS: gl.constexpr, rest_s=None):
    """``choice @ x`` for a matrix of 0, 1 and -1; `x_s` has `PARTS` parts, `rest_s` a third."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, choice.type.layout, 2)
    choice = gl.convert_layout(choice.to(gl.bfloat16), LEFT)
    out = zeros
    if rest_s is not None:
        out = warpgroup_mma(choice, rest_s, out, is_async=True)
    for part in gl.static_range(PARTS):
        out = warpgroup_mma(choice, x_s.index(PARTS - 1 - part), out, is_async=True)
    return warpgroup_mma_wait(0, [out])
