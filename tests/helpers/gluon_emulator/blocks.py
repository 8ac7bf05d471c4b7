"""What a program computes with: blocks of numbers and pointers, and how Triton types them."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from . import program

DTYPES = {
    tl.int1: torch.bool, tl.int8: torch.int8, tl.int16: torch.int16, tl.int32: torch.int32, tl.int64: torch.int64,
    tl.uint8: torch.uint8, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
    tl.float64: torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """As integers, of which those of one NaN are equal."""
    return x.view(_BITS[x.element_size()])


def numbers(given: Any) -> list[int]:
    """Sizes or axes that are given one by one, or together."""
    return [int(n) for n in (given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given)]


class Type(NamedTuple):
    """What a kernel asks of the type of a value."""

    element_ty: Any
    shape: list[int]
    layout: Any

    @property
    def scalar(self) -> Any:
        return self.element_ty


class Block:
    """A number or a block of numbers, which no operation changes. A kernel calls it a tensor."""

    def __init__(self, data: Tensor, layout: Any = None) -> None:
        self.data, self.layout = data, layout

    shape = property(lambda self: [*self.data.shape])
    dtype = property(lambda self: NAMES[self.data.dtype])
    type = property(lambda self: Type(self.dtype, self.shape, self.layout))

    def to(self, dtype: Any, bitcast: bool = False, **_: Any) -> Block:
        dtype = DTYPES[dtype]
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype), self.layout)

    cast = to

    def __getitem__(self, index: Any) -> Block:
        return Block(self.data[index], _layout_at(self.layout, index))

    def reshape(self, *shape: Any) -> Block:
        return Block(self.data.reshape(numbers(shape)))

    def permute(self, *order: Any) -> Block:
        return Block(self.data.permute(numbers(order)))

    def trans(self, *order: Any) -> Block:
        return self.permute(*order) if order else Block(self.data.mT)

    def split(self) -> tuple[Block, Block]:
        return Block(self.data[..., 0]), Block(self.data[..., 1])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.data)

    __index__ = __int__

    def __neg__(self) -> Block:
        return Block(-self.data, self.layout)

    def __truediv__(self, other: Any) -> Block:
        return combined(self, other, torch.div)

    def __rtruediv__(self, other: Any) -> Block:
        return combined(other, self, torch.div)

    def __repr__(self) -> str:
        return f"Block({self.data}, {self.layout})"


def _layout_at(layout: Any, index: Any) -> Any:
    """The layout of a block that gets a new axis: the one that the block's is a slice of."""
    for i in index if isinstance(index, tuple) else (index,):
        if i is None:
            layout = layout.parent if isinstance(layout, gl.SliceLayout) else None
    return layout


# The dtypes of results


def dtype_of_number(x: Any) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        return torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    return torch.float32


def as_block(x: Any) -> Block:
    return x if isinstance(x, Block) else Block(torch.tensor(x, dtype=dtype_of_number(x)))


def _beside(x: Any, other: Any) -> Tensor:
    """`x`, of which a number of Python takes the dtype of a block that can hold it."""
    data = as_block(x).data
    if isinstance(x, Block) or not isinstance(other, Block):
        return data
    dtype = other.data.dtype
    if dtype.is_floating_point:
        return data.to(dtype)
    if data.is_floating_point() or dtype == torch.bool:
        return data
    return data.to(dtype if torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max else torch.int64)


def common(a: Any, b: Any) -> tuple[Tensor, Tensor, Any]:
    """Both in the dtype of the result, where PyTorch would leave out that of a tensor without axes, and a layout."""
    x, y = _beside(a, b), _beside(b, a)
    dtype = torch.promote_types(x.dtype, y.dtype)
    layouts = (z.layout for z in (a, b) if isinstance(z, Block) and z.layout is not None)
    return x.to(dtype), y.to(dtype), next(layouts, None)


def combined(a: Any, b: Any, function: Callable[[Tensor, Tensor], Tensor]) -> Block:
    x, y, layout = common(a, b)
    return Block(function(x, y), layout)


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="trunc")  # as of integers in C, whose remainder is `fmod`


_COMPARISONS = {
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}
_OPERATORS = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "floordiv": _quotient, "mod": torch.fmod,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
}  # fmt: skip


def _define(name: str, function: Callable[..., Tensor]) -> None:
    def forwards(self: Block, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else combined(self, other, function)

    def reflected(self: Block, other: Any) -> Block:
        return combined(other, self, function)

    setattr(Block, f"__{name}__", forwards)
    if name in _OPERATORS:
        setattr(Block, f"__r{name}__", reflected)


for _name, _function in (_OPERATORS | _COMPARISONS).items():
    _define(_name, _function)


# Global memory


class Pointer:
    """Addresses in the memory of a tensor, counted in elements from its first one.

    `storer` has the number of the program that has stored each element in this launch, or -1.
    """

    def __init__(self, memory: Tensor, storer: Tensor, offset: Block) -> None:
        self.memory, self.storer, self.offset = memory, storer, offset

    @staticmethod
    def to_first(x: Tensor) -> Pointer:
        extent = 1 + builtins.sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        memory = x.as_strided((extent if x.numel() else 0,), (1,))
        return Pointer(memory, torch.full_like(memory, -1, dtype=torch.int64), as_block(0))

    shape = property(lambda self: self.offset.shape)
    dtype = property(lambda self: tl.pointer_type(NAMES[self.memory.dtype]))
    type = property(lambda self: Type(self.dtype, self.shape, self.offset.layout))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.storer, self.offset + offset)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.storer, self.offset - offset)

    def load(self, mask: Any, other: Any) -> Block:
        offset, mask = self._inside(mask)
        absent = torch.nan if self.memory.is_floating_point() else -1  # what a GPU has there is anything
        absent = as_block(absent if other is None else other).data.to(self.memory.dtype)
        data = absent.expand(offset.shape).clone()
        data[mask] = self.memory[offset[mask]]
        if self._of_others(offset[mask]).any():
            raise RuntimeError("a program loaded what another program of the launch stores")
        return Block(data, self.offset.layout)

    def store(self, value: Any, mask: Any) -> None:
        """Several threads or programs may store the same number in an element, and no other."""
        offset, mask = self._inside(mask)
        offset, value = offset[mask], as_block(value).data.to(self.memory.dtype).expand(mask.shape)[mask]
        of_others = self._of_others(offset)
        before = bits(self.memory[offset][of_others])
        self.memory[offset] = value
        self.storer[offset] = program.running.number
        after = bits(self.memory[offset])
        if not (torch.equal(after, bits(value)) and torch.equal(after[of_others], before)):
            raise RuntimeError("two threads or programs stored different numbers in one element")

    def _of_others(self, offset: Tensor) -> Tensor:
        """Which elements other programs have stored."""
        storer = self.storer[offset]
        return (storer != -1) & (storer != program.running.number)

    def _inside(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The offsets and the mask in one shape. Where the mask is true, they have to be in the tensor."""
        mask = as_block(True if mask is None else mask).data.bool()
        offset, mask = torch.broadcast_tensors(self.offset.data, mask)
        accessed = offset[mask]
        if len(accessed) and not 0 <= int(accessed.min()) <= int(accessed.max()) < len(self.memory):
            raise IndexError(
                f"elements {int(accessed.min())} to {int(accessed.max())} of the {len(self.memory)} of a tensor"
            )
        return offset, mask
