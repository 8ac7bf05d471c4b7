"""Shared memory, and what reads and writes it beside a program: asynchronous copies and products."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from . import program
from .blocks import DTYPES, NAMES, Block, Pointer, Type, bits


class _Memory:
    """The bytes of an allocation, and which of them were stored since the last fence. At first, they are NaNs."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.full((size,), 255, dtype=torch.uint8)
        self.unfenced = torch.zeros(size, dtype=torch.bool)


class Shared:
    """A descriptor of shared memory: at which of its bytes each element begins."""

    def __init__(self, memory: _Memory, at: Tensor, dtype: torch.dtype, layout: Any) -> None:
        self.memory, self.at, self.data_dtype, self.layout = memory, at, dtype, layout

    shape = property(lambda self: [*self.at.shape])
    rank = property(lambda self: self.at.dim())
    numel = property(lambda self: self.at.numel())
    dtype = property(lambda self: NAMES[self.data_dtype])
    type = property(lambda self: Type(self.dtype, self.shape, self.layout))

    @property
    def data(self) -> Tensor:
        return self.memory.bytes.view(self.data_dtype)[self.at // self.data_dtype.itemsize]

    def _view(self, at: Tensor) -> Shared:
        return Shared(self.memory, at, self.data_dtype, self.layout)

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < len(self.at):
            raise IndexError(f"index {int(i)} of shared memory of shape {self.shape}")
        return self._view(self.at[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return self._view(self.at.narrow(dim, int(start), length))

    def permute(self, order: Any) -> Shared:
        return self._view(self.at.permute(*order))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        size, taken = self.at.numel() * self.data_dtype.itemsize, math.prod(shape) * DTYPES[dtype].itemsize
        if size != taken:  # as since Triton 3.8
            raise ValueError(f"shared memory of {size} bytes taken for one of {taken}")
        at = self.at.min() + _places(shape, DTYPES[dtype].itemsize, layout)
        if int(at.max()) >= len(self.memory.bytes):
            raise IndexError(f"shared memory of shape {self.shape} taken for one of shape {shape}")
        return Shared(self.memory, at, DTYPES[dtype], layout)

    _reinterpret = reinterpret

    def load(self, layout: Any = None) -> Block:
        return Block(self.data, layout)

    def store(self, value: Block) -> None:
        if value.shape != self.shape or value.data.dtype != self.data_dtype:
            raise TypeError(f"{value.shape} of {value.dtype} stored in {self.shape} of {self.dtype}")
        self.memory.bytes.view(self.data_dtype)[self.at // self.data_dtype.itemsize] = value.data
        self.memory.unfenced[self.at] = True
        program.running.unfenced.append(self.memory)

    def _keep_alive(self) -> None:
        pass


def _places(shape: Any, size: int, layout: Any) -> Tensor:
    """At which byte each element of ``shape`` begins, of `size` bytes, in memory of this layout.

    The last axes are those of the layout, and blocks of them follow each other.
    """
    if isinstance(layout, gl.NVMMASharedLayout) and not layout.transposed:
        rows, columns = math.prod(shape[:-1]) if layout.rank > 2 else shape[-2], shape[-1]
        width = layout.swizzle_byte_width or columns * size
        i, byte = torch.arange(rows)[:, None], torch.arange(columns)[None, :] * size
        # Panels of `width` bytes of all rows. In a row, 16 bytes at a time change places.
        turn = (i * layout.swizzle_byte_width // 128) % (layout.swizzle_byte_width // 16 or 1) * 16
        block = byte // width * rows * width + i * width + (byte % width ^ turn)
        outer = torch.arange(math.prod(shape) // (rows * columns)) * rows * columns * size
        return (outer[:, None, None] + block).reshape(*shape)
    if isinstance(layout, gl.SwizzledSharedLayout) and layout.max_phase == 1:
        outer = len(shape) - len(layout.order)
        order = [*range(outer), *(outer + axis for axis in reversed(layout.order))]  # the fastest is the last
        at = torch.arange(math.prod(shape)).reshape([shape[axis] for axis in order]) * size
        return at.permute([order.index(axis) for axis in range(len(order))])
    raise NotImplementedError(f"the emulator does not know where {layout} has its elements")


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any, value: Block | None = None) -> Shared:
    size = DTYPES[dtype].itemsize
    shared = Shared(_Memory(math.prod(shape) * size), _places(shape, size, layout), DTYPES[dtype], layout)
    if value is not None:
        shared.store(value)
    return shared


# Asynchronous copies


def async_load(to: Shared, pointer: Pointer, mask: Any = None, **_: Any) -> None:
    """What is copied comes as late as a kernel allows: at the wait for its group."""
    value = pointer.load(mask, 0)
    to.store(Block(torch.full_like(bits(value.data), -1).view(value.data.dtype)))
    program.running.copies.append((to, value))


def commit_group() -> None:
    program.running.groups.append(program.running.copies)
    program.running.copies = []


def wait_group(num_outstanding: int = 0) -> None:
    groups = program.running.groups
    while len(groups) > num_outstanding:
        for to, value in groups.pop(0):
            to.store(value)


def fence_async_shared(*_: Any, **__: Any) -> None:
    for memory in program.running.unfenced:
        memory.unfenced.zero_()
    program.running.unfenced.clear()


# Products


class Accumulator:
    """An asynchronous product. Only another product, or a wait, takes it."""

    def __init__(self, block: Block) -> None:
        self.block = block


class _Product(NamedTuple):
    """An asynchronous product, and what it reads of shared memory with the numbers that it had there at its start."""

    result: Accumulator
    operands: tuple[tuple[Shared, Tensor], ...]


def factor(data: Tensor) -> Tensor:
    """What a product takes of numbers: all bits of those of 16, and of float32 those of TF32."""
    return (bits(data) & -0x2000).view(data.dtype) if data.dtype == torch.float32 else data.float()


def warpgroup_mma(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any
) -> Any:
    before = acc.block if isinstance(acc, Accumulator) else acc
    shared = tuple((x, x.data) for x in (a, b) if isinstance(x, Shared))
    if not isinstance(b, Shared) or a.dtype != b.dtype or before.data.dtype != torch.float32:
        raise TypeError(
            "a product takes factors of one dtype, the second in shared memory, and adds in float32"
        )
    if any(x.memory.unfenced[x.at].any() for x, _ in shared):
        raise RuntimeError("a product of what was stored in shared memory, without a fence after that")
    product = factor(a.data) @ factor(b.data)
    if product.shape != before.data.shape:
        raise TypeError(f"a product of shape {[*product.shape]} added to {before.shape}")
    block = Block(before.data + product if use_acc else product, before.layout)
    if not is_async:
        return block
    result = Accumulator(block)
    program.running.products.append(_Product(result, shared))
    return result


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    """A product that may be under way after the wait is not a number yet."""
    products = program.running.products
    finished = products[: max(len(products) - num_outstanding, 0)]
    program.running.products = products[len(finished) :]
    for product in finished:
        if not all(torch.equal(bits(x.data), bits(before)) for x, before in product.operands):
            raise RuntimeError("shared memory was stored to while an asynchronous product might read it")
    unfinished = {id(product.result) for product in program.running.products}
    blocks = []
    for x in deps:
        block = x.block if isinstance(x, Accumulator) else x
        lost = id(x) in unfinished
        blocks.append(Block(torch.full_like(block.data, torch.nan), block.layout) if lost else block)
    return blocks[0] if len(blocks) == 1 else tuple(blocks)
