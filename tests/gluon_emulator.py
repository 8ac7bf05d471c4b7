"""Kernels as plain Python: ``run(kernel, grid, ...)`` computes on the CPU what a launch computes on a GPU.

Triton's interpreter does not run Gluon, and has no products of bfloat16. Here the body of a kernel, in Gluon or Triton,
is called once for each program, with stand-ins for the names of both languages: a block is a tensor of PyTorch, a
pointer is a tensor with offsets, and shared memory is a tensor that is written to. So values, addresses, masks, tiles
and transposes are checked. Layouts are carried along, as kernels ask for them, but move nothing: what is read through a
layout of shared memory other than the one it was written through is not what a GPU reads, if one of them is swizzled.

Programs do wrong visibly:

- Shared memory that nothing was stored in, and memory that an asynchronous copy has not been waited for, hold NaN.
- An element that is loaded where the mask is false, with no `other`, is NaN, and so is an asynchronous product that is
  taken from a wait which it was not finished at.
- An access outside a tensor, a product of what was stored in shared memory without a fence, and a store to what an
  asynchronous product may still read raise an error.

Threads are not emulated, so a barrier that is missing is not seen.
"""

from __future__ import annotations

import builtins
import dis
import itertools
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

DTYPES = {
    tl.int1: torch.bool, tl.int8: torch.int8, tl.int16: torch.int16, tl.int32: torch.int32, tl.int64: torch.int64,
    tl.uint8: torch.uint8, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
    tl.float64: torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Blocks and pointers


class Block:
    """A number or a block of numbers, which no operation changes. A kernel calls it a tensor."""

    def __init__(self, data: Tensor, layout: Any = None) -> None:
        self.data, self.layout = data, layout

    shape = property(lambda self: [*self.data.shape])
    dtype = property(lambda self: NAMES[self.data.dtype])
    type = property(lambda self: _Type(self.dtype, self.shape, self.layout))
    T = property(lambda self: self.trans())

    def to(self, dtype: Any, bitcast: bool = False, **_: Any) -> Block:
        dtype = DTYPES[dtype]
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype), self.layout)

    cast = to

    def __getitem__(self, index: Any) -> Block:
        return Block(self.data[index], _layout_at(self.layout, index))

    def reshape(self, *shape: Any) -> Block:
        return Block(self.data.reshape(_numbers(shape)))

    def permute(self, *order: Any) -> Block:
        return Block(self.data.permute(_numbers(order)))

    def trans(self, *order: Any) -> Block:
        return self.permute(*order) if order else Block(self.data.mT)

    def split(self) -> tuple[Block, ...]:
        return split(self)

    def sum(self, axis: int | None = None, keep_dims: bool = False) -> Block:
        return sum(self, axis, keep_dims)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.data)

    __index__ = __int__

    def __neg__(self) -> Block:
        return Block(-self.data, self.layout)

    def __invert__(self) -> Block:
        return Block(~self.data, self.layout)

    def __truediv__(self, other: Any) -> Block:
        return _binary(self, other, torch.div)

    def __rtruediv__(self, other: Any) -> Block:
        return _binary(other, self, torch.div)

    def __repr__(self) -> str:
        return f"Block({self.data}, {self.layout})"

    __hash__ = None  # type: ignore[assignment]


class _Type(NamedTuple):
    """What a kernel asks of the type of a value."""

    element_ty: Any
    shape: list[int]
    layout: Any

    @property
    def scalar(self) -> Any:
        return self.element_ty


class Pointer:
    """Addresses in the memory of a tensor, counted in elements from its first one."""

    def __init__(self, memory: Tensor, offset: Block) -> None:
        self.memory, self.offset = memory, offset

    @staticmethod
    def to_first(x: Tensor) -> Pointer:
        extent = 1 + builtins.sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return Pointer(x.as_strided((extent if x.numel() else 0,), (1,)), Block(torch.tensor(0)))

    shape = property(lambda self: self.offset.shape)
    dtype = property(lambda self: tl.pointer_type(NAMES[self.memory.dtype]))
    type = property(lambda self: _Type(self.dtype, self.shape, self.offset.layout))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset - offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offset[index])

    def inside(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The offsets, 0 where `mask` is false, and the mask as a tensor of their shape."""
        offset, mask = torch.broadcast_tensors(self.offset.data, _tensor(True if mask is None else mask))
        mask = mask.bool()
        offset = torch.where(mask, offset, 0)
        if mask.any() and not 0 <= int(offset[mask].min()) <= int(offset[mask].max()) < len(self.memory):
            raise IndexError(
                f"an access to elements {int(offset[mask].min())} to {int(offset[mask].max())} of {len(self.memory)}"
            )
        return offset, mask


def _layout_at(layout: Any, index: Any) -> Any:
    """The layout of a block that gets a new axis: the one that the block's is a slice of."""
    index = index if isinstance(index, tuple) else (index,)
    for i in index:
        if i is None:
            layout = layout.parent if isinstance(layout, gl.SliceLayout) else None
    return layout


def _numbers(sizes: Any) -> list[int]:
    """Sizes or axes that are given one by one, or together."""
    return [int(n) for n in (sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)]


def _tensor(x: Any) -> Tensor:
    return x.data if isinstance(x, Block) else torch.as_tensor(x)


def _typed(x: Any, other: Any = None) -> Tensor:
    """`x` as Triton types it: a number of Python takes the dtype of `other` if that can hold numbers of its kind."""
    if isinstance(x, Block):
        return x.data
    dtype = _dtype_of_number(x)
    if isinstance(other, Block):
        of_other = other.data.dtype
        if of_other.is_floating_point or not (dtype.is_floating_point or of_other == torch.bool):
            dtype = of_other if of_other.is_floating_point else torch.promote_types(of_other, dtype)
            if not of_other.is_floating_point and torch.iinfo(of_other).min <= x <= torch.iinfo(of_other).max:
                dtype = of_other
    return torch.tensor(x, dtype=dtype)


def _dtype_of_number(x: Any) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        return torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    return torch.float32


def _common(a: Any, b: Any) -> tuple[Tensor, Tensor, Any]:
    """Both in the dtype of the result, where PyTorch would leave out that of a tensor without axes, and a layout."""
    x, y = _typed(a, b), _typed(b, a)
    dtype = torch.promote_types(x.dtype, y.dtype)
    layouts = [z.layout for z in (a, b) if isinstance(z, Block) and z.layout is not None]
    return x.to(dtype), y.to(dtype), layouts[0] if layouts else None


def _binary(a: Any, b: Any, function: Callable[..., Tensor]) -> Block:
    x, y, layout = _common(a, b)
    return Block(function(x, y), layout)


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="trunc")  # as C does


_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "floordiv": _quotient, "mod": torch.fmod,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip


def _define(name: str, function: Callable[..., Tensor]) -> None:
    def forwards(self: Block, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else _binary(self, other, function)

    def reflected(self: Block, other: Any) -> Block:
        return _binary(other, self, function)

    setattr(Block, f"__{name}__", forwards)
    if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Block, f"__r{name}__", reflected)


for _name, _function in _OPERATORS.items():
    _define(_name, _function)


# Shared memory, and what goes on beside the program


class _Product(NamedTuple):
    """An asynchronous product, and what it reads of shared memory with the bits that it had there at its start."""

    result: Accumulator
    operands: tuple[tuple[Tensor, Tensor], ...]


class _Program:
    """The program that runs: its place in the grid, and its copies, products and stores that are under way."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], warps: int) -> None:
        self.place, self.grid, self.warps = place, grid, warps
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.groups: list[list[tuple[Tensor, Tensor]]] = []
        self.products: list[_Product] = []
        self.unfenced: list[Tensor] = []


_running: _Program


class Shared:
    """A descriptor of shared memory."""

    def __init__(self, data: Tensor, layout: Any) -> None:
        self.data, self.layout = data, layout

    shape = property(lambda self: [*self.data.shape])
    rank = property(lambda self: self.data.dim())
    numel = property(lambda self: self.data.numel())
    dtype = property(lambda self: NAMES[self.data.dtype])
    type = property(lambda self: _Type(self.dtype, self.shape, self.layout))

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < len(self.data):
            raise IndexError(f"index {int(i)} of shared memory {self.shape}")
        return Shared(self.data[int(i)], self.layout)

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), length), self.layout)

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.permute(*order), self.layout)

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.data.view(*shape), self.layout)

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        """The first bytes, as the rows of another block."""
        numbers = torch.Size(shape).numel()
        return Shared(self.data.view(-1).view(DTYPES[dtype])[:numbers].view(*shape), layout)

    _reinterpret = reinterpret

    def load(self, layout: Any = None) -> Block:
        return Block(self.data.clone(), layout)

    def store(self, value: Block) -> None:
        if value.shape != self.shape or value.data.dtype != self.data.dtype:
            raise TypeError(f"{value.shape} of {value.dtype} stored in {self.shape} of {self.dtype}")
        self.data.copy_(value.data)
        _running.unfenced.append(self.data)

    def _keep_alive(self) -> None:
        pass


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """Between which addresses the elements of `x` lie."""
    extent = 1 + builtins.sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + extent * x.element_size()


def _bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.element_size()])


class Accumulator:
    """An asynchronous product. Only another product, or a wait, takes it."""

    def __init__(self, block: Block) -> None:
        self.block = block


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any, value: Block | None = None) -> Shared:
    size = torch.empty((), dtype=DTYPES[dtype]).element_size()
    data = torch.full((torch.Size(shape).numel() * size,), 255, dtype=torch.uint8)  # NaN, in floating point
    memory = Shared(data.view(DTYPES[dtype]).view(*shape), layout)
    if value is not None:
        memory.store(value)
    return memory


def async_load(to: Shared, pointer: Pointer, mask: Any = None, **_: Any) -> None:
    value = load(pointer, mask, 0)
    if value.shape != to.shape or value.data.dtype != to.data.dtype:
        raise TypeError(f"{value.shape} of {value.dtype} copied to {to.shape} of {to.dtype}")
    _bits(to.data).fill_(-1)
    _running.copies.append((to.data, value.data))


def commit_group() -> None:
    _running.groups.append(_running.copies)
    _running.copies = []


def wait_group(num_outstanding: int = 0) -> None:
    while len(_running.groups) > num_outstanding:
        for to, value in _running.groups.pop(0):
            to.copy_(value)
            _running.unfenced.append(to)


def fence_async_shared(*_: Any, **__: Any) -> None:
    _running.unfenced.clear()


def _factor(x: Any) -> Tensor:
    """What a product takes of a factor: all bits of numbers of 16, and of float32 those of TF32."""
    if isinstance(x, Shared):
        first, last = _bytes_of(x.data)
        if any(begin < last and first < end for begin, end in map(_bytes_of, _running.unfenced)):
            raise RuntimeError("a product of what was stored in shared memory without a fence after it")
    data = x.data
    return (_bits(data) & -0x2000).view(data.dtype) if data.dtype == torch.float32 else data.float()


def warpgroup_mma_init(value: Block) -> Accumulator:
    return Accumulator(value)


def warpgroup_mma(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any
) -> Any:
    before = acc.block if isinstance(acc, Accumulator) else acc
    if a.data.dtype != b.data.dtype or not isinstance(b, Shared) or before.data.dtype != torch.float32:
        raise TypeError(f"a product of {a.dtype} and {b.dtype}, of which the second is not in shared memory")
    product = _factor(a) @ _factor(b)
    if product.shape != before.data.shape:
        raise TypeError(f"a product of shape {[*product.shape]} added to {before.shape}")
    block = Block(before.data + product if use_acc else product, before.layout)
    if not is_async:
        return block
    result = Accumulator(block)
    operands = tuple((x.data, x.data.clone()) for x in (a, b) if isinstance(x, Shared))
    _running.products.append(_Product(result, operands))
    return result


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    running = _running.products
    finished = running[: len(running) - num_outstanding]
    _running.products = running[len(finished) :]
    for product in finished:
        for data, before in product.operands:
            if not torch.equal(_bits(data), _bits(before)):
                raise RuntimeError("shared memory was stored to while an asynchronous product was reading it")
    unfinished = {id(product.result) for product in _running.products}
    blocks = tuple(
        x
        if isinstance(x, Block)
        else Block(torch.full_like(x.block.data, torch.nan), x.block.layout)
        if id(x) in unfinished
        else x.block
        for x in deps
    )
    return blocks[0] if len(blocks) == 1 else blocks


# The functions of both languages


def program_id(axis: int = 0) -> Block:
    return _scalar(_running.place[axis])


def num_programs(axis: int = 0) -> Block:
    return _scalar(_running.grid[axis])


def num_warps() -> int:
    return _running.warps


def _scalar(x: Any) -> Block:
    return Block(torch.tensor(x, dtype=_dtype_of_number(x)))


def arange(start: int, end: int, layout: Any = None) -> Block:
    return Block(torch.arange(start, end, dtype=torch.int32), layout)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Block:
    return Block(_tensor(value).to(DTYPES[dtype]).expand(*shape), layout)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Block:
    return full(shape, 0, dtype, layout)


def full_like(x: Block, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Block:
    return full(shape or x.shape, value, dtype or x.dtype, layout or x.layout)


def zeros_like(x: Block, shape: Any = None, dtype: Any = None, layout: Any = None) -> Block:
    return full_like(x, 0, shape, dtype, layout)


def cast(x: Any, dtype: Any, bitcast: bool = False, **_: Any) -> Block:
    return (x if isinstance(x, Block) else _scalar(x)).to(dtype, bitcast)


def to_tensor(x: Any) -> Block:
    return x if isinstance(x, Block) else _scalar(x)


def convert_layout(x: Block, layout: Any, assert_trivial: bool = False) -> Block:
    return Block(x.data, layout)


def set_auto_layout(x: Block, layout: Any) -> Block:
    return Block(x.data, layout)


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Block:
    offset, inside = pointer.inside(mask)
    absent = torch.tensor(torch.nan if pointer.memory.is_floating_point() else -1).to(pointer.memory.dtype)
    if other is not None:
        absent = _tensor(other).to(pointer.memory.dtype)
    if not inside.any():
        return Block(absent.expand(offset.shape), pointer.offset.layout)
    return Block(torch.where(inside, pointer.memory[offset], absent), pointer.offset.layout)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    offset, inside = pointer.inside(mask)
    value = _tensor(value).to(pointer.memory.dtype).expand(offset.shape)
    pointer.memory[offset[inside]] = value[inside]


def where(condition: Any, x: Any, y: Any) -> Block:
    x_, y_, layout = _common(x, y)
    condition_layout = condition.layout if isinstance(condition, Block) else None
    return Block(torch.where(_tensor(condition).bool(), x_, y_), layout or condition_layout)


def _chosen(ordered: Callable[..., Tensor], without_nan: Callable[..., Tensor]) -> Callable[..., Block]:
    """A maximum or minimum, which prefers a number to a NaN if it is not told otherwise."""

    def choose(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE, **_: Any) -> Block:
        x_, y_, layout = _common(x, y)
        keeps = propagate_nan == tl.PropagateNan.ALL or not x_.is_floating_point()
        return Block((ordered if keeps else without_nan)(x_, y_), layout)

    return choose


maximum = _chosen(torch.maximum, torch.fmax)
minimum = _chosen(torch.minimum, torch.fmin)


def clamp(x: Block, least: Any, largest: Any, **_: Any) -> Block:
    return minimum(maximum(x, least), largest)


def _of_each(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Block]:
    def of_each(x: Any, *_: Any, **__: Any) -> Block:
        block = to_tensor(x)
        return Block(function(block.data), block.layout)

    return of_each


abs = _of_each(torch.abs)
exp, exp2, log, log2 = map(_of_each, (torch.exp, torch.exp2, torch.log, torch.log2))
sqrt, rsqrt, sin, cos, erf = map(_of_each, (torch.sqrt, torch.rsqrt, torch.sin, torch.cos, torch.erf))
floor, ceil, sigmoid = map(_of_each, (torch.floor, torch.ceil, torch.sigmoid))
sqrt_rn = sqrt


def fma(x: Any, y: Any, z: Any) -> Block:
    return x * y + z


def fdiv(x: Any, y: Any, *_: Any) -> Block:
    return x / y


div_rn = fdiv


def add(x: Any, y: Any, *_: Any) -> Any:
    return x + y


def sub(x: Any, y: Any, *_: Any) -> Any:
    return x - y


def mul(x: Any, y: Any, *_: Any) -> Any:
    return x * y


def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


def _reduced(x: Block, axis: int | None, keep_dims: bool, function: Callable[..., Tensor]) -> Block:
    if axis is None:
        return Block(function(x.data.reshape(-1), 0))
    layout = x.layout if keep_dims else None if x.layout is None else gl.SliceLayout(axis, x.layout)
    data = function(x.data, axis)
    return Block(data.unsqueeze(axis) if keep_dims else data, layout)


def sum(x: Block, axis: int | None = None, keep_dims: bool = False, dtype: Any = None) -> Block:
    def summed(data: Tensor, axis: int) -> Tensor:
        small = not data.is_floating_point() and data.element_size() < 4
        return data.sum(axis, dtype=torch.int32 if small else data.dtype)

    return _reduced(x, axis, keep_dims, summed)


def max(x: Block, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Block:
    def largest(data: Tensor, axis: int) -> Tensor:
        if data.is_floating_point():  # a NaN only where there is nothing else
            found = torch.where(data.isnan(), -torch.inf, data).amax(axis)
            return torch.where(data.isnan().all(axis), torch.nan, found).to(data.dtype)
        return data.amax(axis)

    return _reduced(x, axis, keep_dims, largest)


def min(x: Block, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Block:
    return -max(-x, axis, keep_dims)


def cumsum(x: Block, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Block:
    data = x.data.flip(axis) if reverse else x.data
    data = data.cumsum(axis, dtype=x.data.dtype)
    return Block(data.flip(axis) if reverse else data, x.layout)


def split(x: Block) -> tuple[Block, ...]:
    return Block(x.data[..., 0]), Block(x.data[..., 1])


def join(x: Block, y: Block) -> Block:
    return Block(torch.stack([x.data, y.data], -1))


def permute(x: Any, *order: Any) -> Any:
    return x.permute(*order)


def trans(x: Any, *order: Any) -> Any:
    return x.trans(*order)


def reshape(x: Block, *shape: Any, **_: Any) -> Block:
    return x.reshape(*shape)


def ravel(x: Block, **_: Any) -> Block:
    return x.reshape([x.data.numel()])


def expand_dims(x: Any, axis: int) -> Any:
    rank = len(x.shape) + 1
    return x[tuple(None if i == axis % rank else slice(None) for i in range(rank))]


def broadcast_to(x: Block, *shape: Any) -> Block:
    return Block(x.data.expand(_numbers(shape)), x.layout)


def dot(
    a: Block, b: Block, acc: Block | None = None, input_precision: str | None = None, out_dtype: Any = None, **_: Any
) -> Block:  # fmt: skip
    """Triton's product of blocks. With TF32x3, it is one of float32."""
    exact = input_precision in ("ieee", "tf32x3")
    product = a.data.float() @ b.data.float() if exact else _factor(a) @ _factor(b)
    return Block(product if acc is None else acc.data + product)


def dot_fma(a: Block, b: Block, acc: Block) -> Block:
    return Block(acc.data + a.data @ b.data, acc.layout)


def _range(*bounds: Any, **_: Any) -> Iterator[Block]:
    """The numbers of a loop of the program are blocks, as its bounds may be."""
    dtype = torch.int32
    for bound in bounds:
        dtype = torch.promote_types(dtype, _typed(bound).dtype)
    return (Block(torch.tensor(i, dtype=dtype)) for i in builtins.range(*map(int, bounds)))


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _itself(x: Any, *_: Any, **__: Any) -> Any:
    return x


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


class _Language:
    """The names of Triton and Gluon, of all their modules: those above, and what is the same in Python."""

    static_range = staticmethod(builtins.range)
    range = staticmethod(_range)
    tuple = builtins.tuple
    debug_barrier = barrier = thread_barrier = static_print = device_print = assume = staticmethod(_nothing)
    constexpr = multiple_of = max_contiguous = max_constancy = staticmethod(_itself)
    device_assert = staticmethod(static_assert)
    async_copy_global_to_shared = staticmethod(async_load)
    reinterpret = _reinterpret = staticmethod(Shared.reinterpret)

    def __getattr__(self, name: str) -> Any:
        # Not a name of this module that is no function of a kernel, as `torch`.
        here, there = globals().get(name), getattr(gl, name, getattr(tl, name, None))
        if isinstance(here, types.FunctionType) and not name.startswith("_"):
            return here
        if isinstance(there, (tl.dtype, type)):  # dtypes, layouts
            return there
        raise NotImplementedError(f"the emulator has no stand-in for {name}")


LANGUAGE = _Language()


# Kernels


class _Module:
    """A module of the package, as a kernel sees it."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _stand_in(getattr(self._module, name))


def _stand_in(x: Any) -> Any:
    """What a kernel gets for the value `x` of a global name."""
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, types.ModuleType):
        return LANGUAGE if x.__name__.split(".")[0] == "triton" else _Module(x)
    if isinstance(getattr(x, "fn", None), types.FunctionType) and "." in x.fn.__module__:
        if x.fn.__module__.startswith("triton."):
            return getattr(LANGUAGE, x.fn.__name__)
        return python_of(x.fn) if hasattr(x, "arg_names") else x  # a `constexpr_function` is called as it is
    if isinstance(x, types.FunctionType) and x.__module__.startswith("triton."):
        return getattr(LANGUAGE, x.__name__)
    return x


@cache
def python_of(function: types.FunctionType) -> types.FunctionType:
    """The body of a jitted function, which calls what stands in for its global names."""
    loads = (i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL")
    names = {name for name in loads if name in function.__globals__}
    around = {name: _stand_in(function.__globals__[name]) for name in names} | {"range": _range}
    defaults = tuple(map(_stand_in, function.__defaults__ or ())) or None
    body = types.FunctionType(function.__code__, around, function.__name__, defaults, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def run(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Run all programs of ``kernel[grid](*args, **kwargs)``, on tensors of the CPU, one after the other."""
    global _running
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    grid = grid(given) if callable(grid) else grid
    grid = (*map(int, grid), 1, 1)[:3]
    warps = given.get("num_warps", 4)
    arguments = {
        parameter.name: given[parameter.name] if parameter.is_constexpr else _argument(given[parameter.name])
        for parameter in kernel.params
        if parameter.name in given
    }
    body = python_of(kernel.fn)
    for z, y, x in itertools.product(*map(builtins.range, reversed(grid))):
        _running = _Program((x, y, z), grid, warps)
        body(**arguments)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer.to_first(x.detach())
    return _scalar(x) if isinstance(x, (bool, int, float)) else x
