"""The functions of Triton's language and of Gluon's that compute with blocks."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from . import program
from .blocks import DTYPES, Block, Pointer, as_block, combined, common
from .memory import factor

# The program


def program_id(axis: int = 0) -> Block:
    return as_block(program.running.place[axis])


def num_programs(axis: int = 0) -> Block:
    return as_block(program.running.grid[axis])


def num_warps() -> int:
    return program.running.warps


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


static_range = builtins.range


def range(*bounds: Any, **_: Any) -> Iterator[Block]:
    """The numbers of a loop are blocks, as its bounds may be."""
    dtypes = [as_block(bound).data.dtype for bound in bounds]
    dtype = torch.int64 if torch.int64 in dtypes else torch.int32
    return (Block(torch.tensor(i, dtype=dtype)) for i in builtins.range(*map(int, bounds)))


# Blocks


def arange(start: int, end: int, layout: Any = None) -> Block:
    return Block(torch.arange(start, end, dtype=torch.int32), layout)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Block:
    return Block(as_block(value).data.to(DTYPES[dtype]).expand(tuple(shape)), layout)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Block:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Block) -> Block:
    return full(x.shape, 0, x.dtype, x.layout)


def cast(x: Any, dtype: Any, bitcast: bool = False, **_: Any) -> Block:
    return as_block(x).to(dtype, bitcast)


def convert_layout(x: Block, layout: Any, assert_trivial: bool = False) -> Block:
    return Block(x.data, layout)


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Block:
    return pointer.load(mask, other)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    pointer.store(value, mask)


def split(x: Block) -> tuple[Block, Block]:
    return x.split()


def join(x: Block, y: Block) -> Block:
    return Block(torch.stack(torch.broadcast_tensors(x.data, y.data), -1))


def permute(x: Any, *order: Any) -> Any:
    return x.permute(*order)


def trans(x: Block, *order: Any) -> Block:
    return x.trans(*order)


def reshape(x: Any, *shape: Any, **_: Any) -> Any:
    return x.reshape(*shape)


def expand_dims(x: Any, axis: int) -> Any:
    rank = len(x.shape) + 1
    return x[tuple(None if i == axis % rank else slice(None) for i in builtins.range(rank))]


# Elementwise


def where(condition: Any, x: Any, y: Any) -> Block:
    x_, y_, layout = common(x, y)
    condition = as_block(condition)
    return Block(torch.where(condition.data.bool(), x_, y_), layout or condition.layout)


def _chosen(of_all: Callable[..., Tensor], of_numbers: Callable[..., Tensor]) -> Callable[..., Block]:
    """A maximum or minimum. It prefers a number to a NaN, if it is not told otherwise."""

    def choose(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE, **_: Any) -> Block:
        keeps = propagate_nan == tl.PropagateNan.ALL
        return combined(x, y, of_all if keeps else of_numbers)

    return choose


maximum, minimum = _chosen(torch.maximum, torch.fmax), _chosen(torch.minimum, torch.fmin)


def _of_each(function: Callable[[Tensor], Tensor]) -> Callable[..., Block]:
    def of_each(x: Any, *_: Any, **__: Any) -> Block:
        block = as_block(x)
        return Block(function(block.data), block.layout)

    return of_each


abs = _of_each(torch.abs)
exp, exp2, log, log2 = map(_of_each, (torch.exp, torch.exp2, torch.log, torch.log2))
rsqrt, floor, sigmoid = map(_of_each, (torch.rsqrt, torch.floor, torch.sigmoid))


def fma(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


# Along an axis


def _reduced(x: Block, axis: int | None, keep_dims: bool, function: Callable[..., Tensor]) -> Block:
    if axis is None:
        return Block(function(x.data.reshape(-1), 0))
    data = function(x.data, axis)
    if keep_dims:
        return Block(data.unsqueeze(axis), x.layout)
    return Block(data, None if x.layout is None else gl.SliceLayout(axis, x.layout))


def sum(x: Block, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Block:
    small = not x.data.is_floating_point() and x.data.dtype.itemsize < 4
    dtype = torch.int32 if small else x.data.dtype
    return _reduced(x, axis, keep_dims, lambda data, axis: data.sum(axis, dtype=dtype))


def _largest(data: Tensor, axis: int) -> Tensor:
    """A NaN only where there is nothing else, as `maximum`."""
    if not data.is_floating_point():
        return data.amax(axis)
    largest = torch.where(data.isnan(), -torch.inf, data).amax(axis)
    return torch.where(data.isnan().all(axis), torch.nan, largest)


def max(x: Block, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Block:
    return _reduced(x, axis, keep_dims, _largest)


def min(x: Block, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Block:
    return -max(-x, axis, keep_dims)


def cumsum(x: Block, axis: int = 0, reverse: bool = False, **_: Any) -> Block:
    data = x.data.flip(axis) if reverse else x.data
    data = data.cumsum(axis, dtype=data.dtype)
    return Block(data.flip(axis) if reverse else data, x.layout)


# Products


def dot(a: Block, b: Block, acc: Block | None = None, input_precision: str | None = None, **_: Any) -> Block:
    """Triton's product of blocks. With TF32x3, it is one of float32."""
    exact = input_precision in ("ieee", "tf32x3")
    product = a.data.float() @ b.data.float() if exact else factor(a.data) @ factor(b.data)
    return Block(product if acc is None else acc.data + product)


def _nothing(*_: Any, **__: Any) -> None:
    pass


barrier = thread_barrier = debug_barrier = _nothing
