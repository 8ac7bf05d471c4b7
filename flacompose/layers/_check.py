"""Argument checks of the layers, in the words of the ops', without reading a tensor's values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._check import (
    MAX_HEAD_SIZE,
    _name,
    count,
    finite,
    floating,
    like,
    number,
    sequences,
    tensor,
)

__all__ = [
    "ascending",
    "count",
    "finite",
    "floating",
    "head_size",
    "integer",
    "integral",
    "integral_state_of",
    "not_negative",
    "number",
    "one_of",
    "packed",
    "positive",
    "same_device",
    "same_dtype",
    "state_of",
    "tensor",
    "whole",
]


def one_of(name: str, x: object, choices: Iterable[str], why: str = "") -> None:
    """Check that `x` is one of `choices`."""
    if x not in tuple(choices):  # which takes what cannot be hashed
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {x!r}{why}")


def integer(name: str, x: object) -> None:
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(x).__name__}")


def head_size(name: str, x: int) -> None:
    """Check that `x` is a size that the ops take."""
    integer(name, x)
    if not 1 <= x <= MAX_HEAD_SIZE:
        raise ValueError(f"{name} must be from 1 to {MAX_HEAD_SIZE}, got {x}")


def whole(x: float) -> int:
    """The int that `x` is but for rounding, or 0."""
    size = round(x) if math.isfinite(x) else 0
    return size if math.isclose(x, size) else 0


def ascending(name: str, x: tuple[float, float]) -> None:
    """Check that `x` holds two ascending finite bounds above 0."""
    if not isinstance(x, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of two bounds, got {type(x).__name__}")
    for i, bound in enumerate(x):
        number(f"{name}[{i}]", bound)
    if len(x) != 2 or not 0 < x[0] <= x[1]:  # so that NaN fails
        raise ValueError(f"{name} must be two ascending bounds above 0, got {x}")
    finite(f"{name}[1]", x[1])


def not_negative(name: str, x: float) -> None:
    """Check that `x` is a finite number of at least 0."""
    number(name, x)
    if not x >= 0:  # so that NaN fails
        raise ValueError(f"{name} must be at least 0, got {x}")
    finite(name, x)


def positive(name: str, x: float) -> None:
    number(name, x)
    if not x > 0:  # so that NaN fails
        raise ValueError(f"{name} must be positive, got {x}")


def integral(name: str, x: Tensor, bools: bool = False, why: str = "") -> None:
    """Check that `x` is a tensor of an integer dtype, or, with `bools`, of bool."""
    tensor(name, x)
    if x.is_floating_point() or x.is_complex() or (x.dtype == torch.bool and not bools):
        expected = "bool or an integer dtype" if bools else "an integer dtype"
        raise TypeError(f"{name} must be {expected}, got {_name(x.dtype)}{why}")


def same_device(name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {value.device}")


def state_of(x: Tensor, name: str, state: Any, shape: tuple[int, ...]) -> None:
    """Check that `state` is a float tensor of this shape on the device of `x`."""
    tensor(name, state)
    same_device(name, state, x)  # before `like`, which would name an op's argument
    like(x, name, state, shape)


def integral_state_of(x: Tensor, name: str, state: Any, shape: tuple[int, ...]) -> None:
    """Check that `state` is an integer tensor of this shape on the device of `x`."""
    integral(name, state)
    same_device(name, state, x)
    if state.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(state.shape)}")


def same_dtype(name: str, x: Tensor, weight: Tensor, autocast: bool) -> None:
    """Check that `x` meets the weights in their dtype, or that autocast brings both to one, as all but float64."""
    # Integers are quantised weights, whose module knows what it takes.
    if x.dtype == weight.dtype or not weight.is_floating_point():
        return
    if not autocast or torch.float64 in (x.dtype, weight.dtype):
        raise TypeError(
            f"{name} must have the dtype of the weights, {_name(weight.dtype)}, got {_name(x.dtype)}"
        )


def packed(name: str, x: Tensor, cu_seqlens: Tensor) -> int:
    """Check the bounds of the sequences packed in `x`, called `name`, return their number."""
    tensor("cu_seqlens", cu_seqlens)
    if x.shape[0] != 1:  # before `sequences`, which would name an op's argument, like the device
        raise ValueError(f"cu_seqlens needs {name} of one row (B = 1), got B = {x.shape[0]}")
    same_device("cu_seqlens", cu_seqlens, x)
    return sequences(x, cu_seqlens)
