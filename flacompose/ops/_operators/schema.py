"""The names and axes of an operator's arguments and results, from its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flacompose._torch import OpOverload


def names_of(values: Any) -> tuple[str, ...]:
    return tuple(value.name for value in values)


def tensor_positions(op: OpOverload) -> tuple[int, ...]:
    """Positions of the tensor arguments."""
    return tuple(
        i for i, a in enumerate(op._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")
    )


def axis_position(axes: str, names: Sequence[str]) -> int | None:
    """The position in `axes` of the axis with one of these names, or None."""
    return next((i for i, axis in enumerate(axes.split()) if axis in names), None)


def unwanted_results(op: OpOverload, args: Sequence[Any]) -> set[str]:
    """The returns of a backward that its ``output_mask`` leaves out."""
    arguments = names_of(op._schema.arguments)
    if "output_mask" not in arguments:
        return set()
    mask = args[arguments.index("output_mask")]
    return {name for name, wanted in zip(names_of(op._schema.returns), mask) if not wanted}


def primal_of(name: str, names: Any) -> str:
    """The tensor whose gradient is called ``name`` (``x`` for ``dx`` and ``d_x``), or ``name`` itself."""
    return next((x for x in (name, name.removeprefix("d_"), name.removeprefix("d")) if x in names), name)
