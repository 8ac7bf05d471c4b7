"""Argument checks of the layers, with the same messages as the ops. They read no values of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import TypeError, ValueError
from flacompose.ops._arguments.require import (
    _FLOATS,
    MAX_HEAD_SIZE,
    _name,
    finite,
    floating,
    integer,
    number,
    sequences,
    shown,
)
from flacompose.ops._arguments.require import count as count
from flacompose.ops._arguments.require import flags as flags
from flacompose.ops._arguments.require import has_shape as has_shape
from flacompose.ops._arguments.require import indices as indices
from flacompose.ops._arguments.require import is_empty as is_empty
from flacompose.ops._arguments.require import not_empty as not_empty
from flacompose.ops._arguments.require import not_negative as not_negative
from flacompose.ops._arguments.require import tensor as tensor
from flacompose.ops._tensors.sizes import always_true, violated


def one_of(name: str, x: object, choices: Iterable[str], why: str = "") -> None:
    if x not in tuple(choices):  # a tuple, since `x` may not be hashable
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {x!r}{why}")


def optional_flag(name: str, x: object) -> bool:
    """Check that `x` is a bool or None; return the bool, False for None."""
    if x is not None and not isinstance(x, bool):
        raise TypeError(f"{name} must be a bool or None, got {shown(x)}")
    return x is True


def head_size(name: str, x: int) -> None:
    """Check that `x` is a size that the ops take."""
    integer(name, x)
    if not 1 <= x <= MAX_HEAD_SIZE:
        raise ValueError(f"{name} must be from 1 to {MAX_HEAD_SIZE}, got {x}")


def positive_int(name: str, x: float, divisor_name: str = "", divisor: int = 1) -> int:
    """Check that `x` is, up to rounding, a positive multiple of `divisor`; return it as an int."""
    size = round(x) if math.isfinite(x) else 0
    if size < 1 or size % divisor != 0 or not math.isclose(x, size):
        expected = f"multiple of {divisor_name} = {divisor}" if divisor_name else "int"
        raise ValueError(f"{name} must be a positive {expected}, got {x}")
    return size


def ascending(name: str, x: tuple[float, float]) -> None:
    """Check that `x` holds two finite bounds above 0, in ascending order."""
    if not isinstance(x, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of two bounds, got {type(x).__name__}")
    for i, bound in enumerate(x):
        number(f"{name}[{i}]", bound)
    if len(x) != 2 or not 0 < x[0] <= x[1]:  # so that NaN fails too
        raise ValueError(f"{name} must be two ascending bounds above 0, got {x}")
    finite(f"{name}[1]", x[1])


def initial_time_steps(dt_min: float, dt_max: float, dt_init_floor: float) -> None:
    """Check the bounds of initial time steps."""
    for name, step in (("dt_min", dt_min), ("dt_max", dt_max), ("dt_init_floor", dt_init_floor)):
        finite(name, step)
    ascending("(dt_min, dt_max)", (dt_min, dt_max))
    if dt_init_floor <= 0:
        raise ValueError(f"dt_init_floor must be above 0, got {dt_init_floor}")


def positive(name: str, x: float) -> None:
    """Check that `x` is a finite number above 0."""
    number(name, x)
    if not x > 0:  # so that NaN fails too
        raise ValueError(f"{name} must be positive, got {x}")
    finite(name, x)


def integral(name: str, x: Tensor, bools: bool = False, why: str = "") -> None:
    """Check that `x` is a tensor of an integer dtype, or, with `bools`, of bool."""
    tensor(name, x)
    if x.is_floating_point() or x.is_complex() or (x.dtype == torch.bool and not bools):
        expected = "bool or an integer dtype" if bools else "an integer dtype"
        raise TypeError(f"{name} must be {expected}, got {_name(x.dtype)}{why}")


def same_device(name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {value.device}")


def like(
    x: Tensor, name: str, value: Any, shape: tuple[int, ...], kind: Callable[[str, Tensor], None] = floating
) -> None:
    """Check that `value` is a tensor of this `kind` and shape on the device of `x`."""
    kind(name, value)
    same_device(name, value, x)
    if not has_shape(value, shape):
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")


def is_float(dtype: torch.dtype) -> bool:
    return dtype in _FLOATS


def float_dtype(dtype: torch.dtype) -> None:
    if not is_float(dtype):
        got = _name(dtype) if isinstance(dtype, torch.dtype) else type(dtype).__name__
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, got {got}")


def optional_float_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None:
        float_dtype(dtype)


def is_one(size: int) -> bool:
    """Whether `size` is always 1. A symbolic size, or a tensor of ``torch.jit.trace``, is not."""
    return always_true(size == 1)


def packed(name: str, x: Tensor, cu_seqlens: Tensor) -> int:
    """Check the bounds of the sequences packed in `x`, called `name`; return the number of sequences."""
    tensor("cu_seqlens", cu_seqlens)
    if violated(x.shape[0] == 1):  # `sequences` checks it too, but its message names an argument of the op
        raise ValueError(f"cu_seqlens needs {name} of one row (B = 1), got B = {x.shape[0]}")
    same_device("cu_seqlens", cu_seqlens, x)
    return sequences(x, cu_seqlens)
