"""Calls of an op: checks its inputs against the signature of the recurrence, and selects its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from flacompose._errors import ValueError
from flacompose._torch import assume_constant_result
from flacompose.ops._arguments import require
from flacompose.ops._operators.checked import check_values, checking
from flacompose.ops._operators.signature import Argument
from flacompose.ops._tensors.sizes import violated


def check(
    op: ModuleType,
    inputs: Any,
    names: Mapping[str, str] | None = None,
    required: tuple[str, ...] = (),
    output_final_state: bool = False,
    logits: Collection[str] = (),
    values: bool = True,
    shared_heads: bool = True,
) -> None:
    """Check `output_final_state` and, without reading values, all tensors of the `inputs` of the recurrence `op`.

    The axes of a tensor in the signature determine its shape: the first tensor with an axis sets the size of
    the axis, ``HV`` is a multiple of ``H``, and ``N`` is the number of sequences. All are float tensors on the
    device of the first input, and inputs that autocast casts have its dtype. Errors name an input as `names`
    does, else as the signature does. The `required` inputs must be given, even if the signature has them
    optional. `logits` are inputs that the public function transforms before the call. With `values`, and within
    `flacompose.checked`, values are checked too. Without `shared_heads`, ``HV`` is ``H``.
    """
    require.flags(output_final_state=output_final_state)
    names = names or {}
    first_argument = inputs._fields[0]
    first, first_name = inputs[0], names.get(first_argument, first_argument)
    sizes: dict[str, int] = {}
    # The tensors are the first of the inputs.
    for x, (argument, optional, axes, new, cast) in zip(inputs, _tensors_of(op, shared_heads)):
        if x is None and optional and argument not in required:
            continue
        name = names.get(argument, argument)
        if new:
            require.axes(name, x, axes)
            for axis, size in zip(axes, x.shape):
                sizes.setdefault(axis, size)
        else:
            require.floating(name, x)
        if argument != first_argument:
            require.shape_and_device(first, name, x, [sizes[axis] for axis in axes], first_name)
            if cast:
                require.same_dtype(first, name, x, first_name)
        if not new:
            continue
        if "HV" in new and violated(sizes["HV"] % sizes["H"] == 0):
            raise ValueError(
                f"{name} must have a multiple of the {sizes['H']} heads of {first_name}, got {sizes['HV']}"
            )
        if "K" in new or "V" in new:
            require.head_size(name, x)
        else:
            require.not_empty(name, x)
        if argument == first_argument:
            sizes["N"] = require.sequences(x, inputs.cu_seqlens, first_name)
    if values and checking():
        present = {x: names.get(x, x) for x in op.SIGNATURE.differentiable if getattr(inputs, x) is not None}
        given = {name: getattr(inputs, x) for x, name in present.items()}
        decays = [name for x, name in present.items() if x in op.SIGNATURE.gates and x not in logits]
        check_values(given, inputs.cu_seqlens, decays, [name for x, name in present.items() if x in logits])


@assume_constant_result
def _tensors_of(op: ModuleType, shared_heads: bool) -> tuple[Argument, ...]:
    """The tensors of a signature, a constant for Dynamo: guards on them would be half of all guards of a graph.

    Dynamo puts the result into the globals of the compiled module, under a new name at each compilation.
    """
    tensors: tuple[Argument, ...] = op.SIGNATURE.tensors[shared_heads]
    return tensors


def run(form: Callable[..., Any], inputs: Any, output_final_state: bool) -> tuple[Tensor, Any]:
    """Call a form of an op; return None for the state unless `output_final_state`."""
    o, final_state = form(*inputs)
    return o, final_state if output_final_state else None
