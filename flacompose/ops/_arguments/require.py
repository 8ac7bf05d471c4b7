"""Argument checks of the public functions, with uniform messages. They read no values of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import TypeError, ValueError
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._tensors.dtype import autocast_on
from flacompose.ops._tensors.sizes import MAX_HEAD_SIZE, violated

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}{_of_a_layer(x)}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def floating(name: str, x: Tensor) -> None:
    """Check that `x` is a tensor of a supported dtype."""
    tensor(name, x)
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {_name(x.dtype)}")


def axes(name: str, x: Tensor, names: tuple[str, ...]) -> None:
    """Check that `x` is a float tensor with axes of these names, such as ``("B", "T", "D")``."""
    floating(name, x)
    if x.dim() != len(names):
        raise ValueError(f"{name} must have shape [{', '.join(names)}], got {tuple(x.shape)}")


def same_dtype(q: Tensor, name: str, x: Tensor, q_name: str = "q") -> None:
    """Check that `x` has the dtype of `q`, or that autocast casts both, which it does unless one is float64."""
    if x.dtype == q.dtype or (autocast_on(q.device) and torch.float64 not in (q.dtype, x.dtype)):
        return
    raise TypeError(
        f"{name} must have the dtype of {q_name}, {_name(q.dtype)}, got {_name(x.dtype)}: "
        f"cast one of them, as in {q_name}.to({name}.dtype)"
    )


def head_size(name: str, x: Tensor, size_of: str = "head") -> None:
    """Check that ``D`` of ``x [..., D]`` is a supported size; errors call it the size of a `size_of`."""
    not_empty(name, x)
    if violated(x.shape[-1] <= MAX_HEAD_SIZE):
        raise ValueError(f"{name} must have a {size_of} size of at most {MAX_HEAD_SIZE}, got {x.shape[-1]}")


def not_empty(name: str, x: Tensor) -> None:
    """Check that no axis of ``x [B, T, ...]`` is empty. In sequence parallel calls ``T`` may be 0."""
    if is_empty(x.shape if sharing() is None else (*x.shape[:1], *x.shape[2:])):
        raise ValueError(f"{name} must have no empty dimension, got {tuple(x.shape)}")


def is_empty(shape: Sequence[int]) -> bool:
    """Whether one of these sizes is 0, as far as is known before the data; see `violated`."""
    if not torch.compiler.is_compiling():  # all sizes at once, which is faster
        return 0 in shape
    for size in shape:
        filled = size > 0
        # Most conditions are True, and Dynamo traces a call slowly.
        if filled is not True and violated(filled):
            return True
    return False


def has_shape(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether `x` has this shape, as far as is known before the data; see `violated`."""
    if not torch.compiler.is_compiling():
        return x.shape == tuple(shape)
    if x.dim() != len(shape):
        return False
    for mine, wanted in zip(x.shape, shape):
        same = mine == wanted
        if same is not True and violated(same):
            return False
    return True


def like(q: Tensor, name: str, x: Tensor, shape: Sequence[int], q_name: str = "q") -> None:
    """Check that `x` is a float tensor of this shape on the device of `q`, called `q_name` in errors."""
    floating(name, x)
    shape_and_device(q, name, x, shape, q_name)


def shape_and_device(q: Tensor, name: str, x: Tensor, shape: Sequence[int], q_name: str) -> None:
    """Check that `x` has this shape, and is on the device of `q`, whose name in errors is `q_name`."""
    if not has_shape(x, shape):
        why = _layout(q, name, x, shape, q_name)
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}{why}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of {q_name}, {q.device}, got {x.device}")


def _layout(q: Tensor, name: str, x: Tensor, shape: Sequence[int], q_name: str) -> str:
    """A hint for an error about a shape, if `x` or `q` would be right in another layout."""
    if x.dim() != len(shape) or x.dim() < 3:
        return ""
    if "state" in name.lower():
        if has_shape(x, [*shape[:-2], shape[-1], shape[-2]]):
            of_keys = name.split("[")[0] == "initial_state" and x.dim() == 4  # not Mamba's initial_states
            axes = "states are [N, H, K, V], so " if of_keys else ""
            return f": its last two axes are the other way round; {axes}give {name}.mT"
        if q.dim() == 4 and has_shape(x, [shape[0], q.shape[1], *shape[2:]]):
            return f": it has as many heads as {q_name} has tokens; is {q_name} head-first? It must be [B, T, H, ...]"
        return ""
    T = q.shape[1]
    if violated(shape[1] == T) or not violated(x.shape[1] == T):
        return ""
    if violated(x.shape[2] == T):
        return f": {q_name} has {T} tokens"
    return f": head-first, or {q_name} is; all tensors of tokens are [B, T, H, ...]"


def _of_a_layer(x: object) -> str:
    """A hint for an error, if `x` is the state of a layer. Ops take only its recurrent part."""
    return ": of the state of a layer, give .recurrent" if hasattr(x, "recurrent") else ""


def optional(q: Tensor, name: str, x: Tensor | None, shape: tuple[int, ...], q_name: str = "q") -> None:
    """`like`, unless `x` is absent."""
    if x is not None:
        like(q, name, x, shape, q_name)


def parameter(q: Tensor, name: str, x: Tensor | None, shape: tuple[int, ...], q_name: str = "q") -> None:
    """Check that `x`, if given, is a float tensor on the device of `q` with as many elements as this shape."""
    if x is None:
        return
    floating(name, x)
    if x.numel() != math.prod(shape):
        raise ValueError(
            f"{name} must have the {math.prod(shape)} elements of shape {tuple(shape)}, got shape {tuple(x.shape)}"
        )
    like(q, name, x, x.shape, q_name)


def sequences(q: Tensor, cu_seqlens: Tensor | None, q_name: str = "q") -> int:
    """Check `cu_seqlens` for `q`, whose name in errors is `q_name`; return the number of sequences ``N``."""
    B = q.shape[0]
    if cu_seqlens is None:
        return B
    indices("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or violated(cu_seqlens.shape[0] >= 2):
        raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of {q_name}, {q.device}, got {cu_seqlens.device}")
    if violated(B == 1):
        raise ValueError(f"{q_name} must have batch size 1 when cu_seqlens is given, got {B}")
    return cu_seqlens.shape[0] - 1


def indices(name: str, x: Tensor) -> None:
    """Check that `x` is a tensor of a dtype of indices."""
    tensor(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {_name(x.dtype)}")


def integer(name: str, x: Any, otherwise: str = "") -> None:
    """Check that `x` is an int. In the error, `otherwise` names other valid values."""
    if isinstance(x, bool) or not isinstance(x, (Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an int{otherwise}, got {type(x).__name__}")


def count(name: str, x: Any) -> None:
    """Check that `x` is a positive int."""
    integer(name, x)
    if x < 1:
        raise ValueError(f"{name} must be at least 1, got {x}")


def flags(**values: object) -> None:
    """Check that each value is a bool. Otherwise the string "False" would count as true."""
    for name, x in values.items():
        if not isinstance(x, bool):
            raise TypeError(f"{name} must be a bool, got {shown(x)}")


def is_one_of(x: object, *choices: str | None) -> bool:
    """Whether `x` is one of the `choices`. An array is none of them, although it compares with each."""
    return isinstance(x, (str, type(None))) and x in choices


def shown(x: object) -> str:
    """The text for `x` in errors. For a tensor it is the type, since no value is read from a device."""
    return type(x).__name__ if isinstance(x, Tensor) else repr(x)


def number(name: str, x: object) -> None:
    """Check that `x` is a real number, NumPy's scalars included."""
    if isinstance(x, bool) or not isinstance(x, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")


def finite(name: str, x: float) -> None:
    """Check that `x` is a finite real number."""
    number(name, x)
    # On a symbolic number these comparisons need no guard, but math.isfinite would break the graph. The
    # largest float is a literal: Dynamo would take `sys.float_info.max` for an input of the graph.
    too_large = isinstance(x, int) and abs(x) > 1.7976931348623157e308
    if too_large or not -math.inf < x < math.inf:  # so that NaN fails
        raise ValueError(f"{name} must be finite, got {x}")


def not_negative(name: str, x: float) -> None:
    """Check that `x` is a finite number of at least 0."""
    number(name, x)
    if not x >= 0:  # so that NaN fails too
        raise ValueError(f"{name} must be at least 0, got {x}")
    finite(name, x)


def scale(x: float | None, q: Tensor) -> float:
    """Check `scale` and return it, or its default for ``q [..., K]``. `q` may not be checked yet."""
    if x is not None:
        finite("scale", x)
        return x
    # If `q` is not valid, later checks refuse it, so any number will do here.
    K = q.shape[-1] if isinstance(q, Tensor) and not q.is_nested and q.dim() > 0 else 1
    return 1.0 if violated(K > 0) else K**-0.5


def kind(x: object) -> str:
    """The text for an invalid state `x` in errors: its type, and the length of a tuple or list."""
    length = f" of {len(x)}" if isinstance(x, (tuple, list)) else ""
    return type(x).__name__ + length + _of_a_layer(x)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
