"""The call of an op: its inputs, checked against the signature of the family, and the results that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flacompose.ops import _check
from flacompose.ops.families._signature import Argument


def check(op: ModuleType, inputs: Any, names: Mapping[str, str] | None = None) -> None:
    """Check all tensors of the `inputs` of the family `op`, without reading their values.

    The axes that the family's signature has for a tensor say which shape it must have: the first tensor with an axis
    gives its size, ``HV`` is a multiple of ``H``, and ``N`` is the number of sequences. All are floats on the device of
    the first input, and those that autocast casts have its dtype. Errors call an input as `names` does, or as the
    family does.
    """
    names = names or {}
    first, (of_first, *_) = inputs[0], inputs._fields
    first_name = names.get(of_first, of_first)
    sizes: dict[str, int] = {}
    for argument, optional, axes, new, cast in _tensors_of(op):
        x = getattr(inputs, argument)
        if x is None and optional:
            continue
        name = names.get(argument, argument)
        if new:
            _check.axes(name, x, axes)
            for axis, size in zip(axes, x.shape):
                sizes.setdefault(axis, size)
        if argument != of_first:
            _check.like(first, name, x, [sizes[axis] for axis in axes], first_name)
            if cast:
                _check.same_dtype(first, name, x, first_name)
        if not new:
            continue
        if "HV" in new and sizes["H"] != 0 and sizes["HV"] % sizes["H"] != 0:
            raise ValueError(
                f"{name} must have a multiple of the {sizes['H']} heads of {first_name}, got {sizes['HV']}"
            )
        if "K" in new or "V" in new:
            _check.head_size(name, x)
        else:
            _check.not_empty(name, x)
        if argument == of_first:
            sizes["N"] = _check.sequences(x, inputs.cu_seqlens, first_name)


@torch.compiler.assume_constant_result
def _tensors_of(op: ModuleType) -> tuple[Argument, ...]:
    """The tensors that a family takes. They never change, so a compiled graph needs no guards on them."""
    tensors: tuple[Argument, ...] = op.SIGNATURE.tensors
    return tensors


def run(
    form: Callable[[Any], tuple[Tensor, Any]], inputs: Any, output_final_state: bool
) -> tuple[Tensor, Any]:
    """``(o, final_state)`` of one form of an op, or ``(o, None)``."""
    o, final_state = form(inputs)
    return o, final_state if output_final_state else None
