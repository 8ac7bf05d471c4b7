"""Triton's interpreter, without what it does again at every call of a function and for every operation."""

from __future__ import annotations

from functools import cache
from inspect import getmembers, signature
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache
def _names(package: Any) -> list[str]:
    """Names of the builtins of a package. The first call comes before the interpreter changes the package."""
    return [name for name, member in getmembers(package) if interpreter.tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Does what Triton's function of this name does: nothing else replaces the builtins of a package."""
    for name in _names(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):  # not yet replaced
            interpreter._patch_attr(package, name, member, builder, scope)


patch_language = interpreter._patch_lang
current: list[Any] = []  # the scope of the launch that runs


def _patch_lang(fn: Any) -> Any:
    """Replaces Triton's language once a launch, for the kernel and for all functions that it calls."""
    if current:
        return current[0]
    # The functions of Triton's own library know the language as `core`.
    scope = patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    restore = scope.restore

    def restored() -> None:
        current.clear()
        restore()

    scope.restore = restored
    current.append(scope)
    return scope


dtype_of = interpreter._get_np_dtype
dtypes: dict[str, Any] = {}


def _get_np_dtype(type: tl.dtype) -> Any:
    """NumPy's dtype for the elements of a type, which Triton's function looks for in a table that it makes anew."""
    name = type.scalar.name
    if name not in dtypes:
        dtypes[name] = dtype_of(type)
    return dtypes[name]


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(prod(sizes))


@cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, str]:
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return tl.tuple(sizes), validate_block_shape(sizes), str(list(map(str, sizes)))


def _init_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Does what Triton's `block_type.__init__` does: types of one shape share it, so that `is` compares shapes."""
    self.element_ty = element_ty
    sizes = tuple(n if type(n) is int else unwrap(n) for n in unwrap(shape))
    self.shape, self.numel, name = _block_shape(sizes)
    self.name = f"<{name}, {element_ty}>"


equal = tl.dtype.__eq__
unwrap = tl.core._unwrap_if_constexpr
broadcast = TritonSemantic.broadcast_impl_value
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _equal(self: tl.dtype, other: Any) -> bool:
    return self is other or equal(self, other)


def _unwrap_if_constexpr(x: Any) -> Any:
    return x if type(x) in (int, tl.tensor, tl.dtype) else unwrap(x)


def _broadcast(self: TritonSemantic, x: tl.tensor, y: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if x.type.is_block() and y.type.is_block() and x.type.shape is y.type.shape:
        return x, y
    return broadcast(self, x, y)


def _check_overflow(self: TritonSemantic, x: tl.tensor, y: tl.tensor, operation: Any) -> None:
    """In NumPy, not in operations of Triton's that are interpreted one by one."""
    if x.type.scalar.int_bitwidth < 64:
        result = ARITHMETIC[operation.__name__](*(z.handle.data.astype(np.int64) for z in (x, y)))
        limits = np.iinfo(_get_np_dtype(x.type))
        assert (limits.min <= result).all() and (result <= limits.max).all(), "int overflow"


def _init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Does what Triton's `tensor.__init__` does, which makes the constants of every shape anew."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(tuple(type.shape) if type.is_block() else ())


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> None:
    """Replaces functions of Triton, if they are those that the ones above were written for."""
    if list(signature(interpreter._patch_builtin).parameters) == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
        interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    if vars(tl.tensor(None, tl.int32)).keys() == {"handle", "shape", "numel", "type", "dtype"}:
        tl.tensor.__init__ = _init
    block = tl.block_type(tl.int32, [1])
    if vars(block).keys() == {"element_ty", "shape", "numel", "name"} and isinstance(block.shape, tl.tuple):
        tl.block_type.__init__ = _init_block
        TritonSemantic.broadcast_impl_value = _broadcast
    tl.dtype.__eq__ = _equal
    tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
