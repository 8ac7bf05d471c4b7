"""Kernels as plain Python: ``run(kernel, grid, ...)`` computes on the CPU what a launch computes on a GPU.

Triton's interpreter does not run Gluon, and has no products of bfloat16. Here the body of a kernel, in Gluon or Triton,
is called once for each program, with stand-ins for the names of both languages: a block is a tensor of PyTorch, a
pointer is a tensor with offsets, and shared memory is a tensor that is written to, where its layout has each element.
So values, addresses, masks, tiles and transposes are checked. How threads share out a block is carried along, as
kernels ask for it, and moves nothing.

What is wrong shows:

- Shared memory that nothing was stored in, and memory that an asynchronous copy was not waited for, hold NaN.
- An element that is loaded where the mask is false, with no `other`, is NaN. So is an asynchronous product that a wait
  returns before it is finished.
- These raise an error: an access outside a tensor, or to what a program before this one has stored, two stores of
  different numbers at one place, a product of what was stored in shared memory without a fence, and a store to what an
  asynchronous product may still read.

Threads are not emulated, and programs run one after the other. So neither a barrier that is missing is seen, nor that a
program loads what a later one stores, nor a layout that a compiler refuses. A product is of all of its factors at once,
and nothing depends on the order in which its terms are added up.
"""

from __future__ import annotations

import builtins
import dis
import itertools
import types
from functools import cache
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from . import language, memory
from .blocks import Pointer, as_block
from .program import Program, start


class _Language:
    """Any module of Triton: all names of both languages are here."""

    async_copy_global_to_shared = staticmethod(memory.async_load)
    reinterpret = _reinterpret = staticmethod(memory.Shared.reinterpret)
    tuple = builtins.tuple

    def __getattr__(self, name: str) -> Any:
        for module in (language, memory):
            if (
                module.__name__ == getattr(vars(module).get(name), "__module__", None)
                or name == "static_range"
            ):
                return getattr(module, name)
        there = getattr(gl, name, getattr(tl, name, None))
        if isinstance(there, (tl.dtype, type)):  # dtypes, layouts
            return there
        raise NotImplementedError(f"the emulator has no stand-in for {name}")


class _Module:
    """A module of the package."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _stand_in(getattr(self._module, name))


_LANGUAGE = _Language()


def _stand_in(x: Any) -> Any:
    """What a kernel gets for the value `x` of a global name."""
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, types.ModuleType):
        return _LANGUAGE if x.__name__.startswith("triton.") else _Module(x)
    function = getattr(x, "fn", x)
    if isinstance(function, types.FunctionType):
        if function.__module__.startswith("triton."):
            return getattr(_LANGUAGE, function.__name__)
        if hasattr(x, "params"):  # not a `constexpr_function`, which is Python already
            return _python_of(function)
    return x


@cache
def _python_of(function: types.FunctionType) -> types.FunctionType:
    """The body of a jitted function, with stand-ins for its global names."""
    loads = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
    names = {name: _stand_in(x) for name, x in function.__globals__.items() if name in loads}
    defaults = tuple(map(_stand_in, function.__defaults__ or ()))
    body = types.FunctionType(function.__code__, names | {"range": language.range}, argdefs=defaults)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def run(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Run all programs of ``kernel[grid](*args, **kwargs)``, on tensors of the CPU, one after the other.

    `launching_by` takes it, so that all launches of a recurrence are run so.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    size = (*map(int, grid(given) if callable(grid) else grid), 1, 1)[:3]
    arguments = {
        parameter.name: given[parameter.name] if parameter.is_constexpr else _argument(given[parameter.name])
        for parameter in kernel.params
        if parameter.name in given
    }
    body = _python_of(kernel.fn)
    for z, y, x in itertools.product(*map(range, reversed(size))):
        start(Program((x, y, z), size, given.get("num_warps", 4)))
        body(**arguments)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer.to_first(x.detach())
    if hasattr(x, "_fields"):
        return x._make(map(_argument, x))
    return as_block(x) if isinstance(x, (bool, int, float)) else x
