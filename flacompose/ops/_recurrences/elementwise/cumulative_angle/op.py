"""The registered op of the cumulative angle: `inputs` lists its arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod
from typing import Any

from flacompose.ops._recurrences.elementwise.cumulative_angle import eager
from flacompose.ops._recurrences.elementwise.cumulative_angle.inputs import SIGNATURE
from flacompose.ops._recurrences.elementwise.cumulative_angle.inputs import (
    Inputs as Inputs,  # for `ops/_mamba3.py`
)
from flacompose.ops._recurrences.forms import define_ops


def _flops(x: Any, dt: Any, *_: Any, **__: Any) -> int:
    """A product and a sum for each angle."""
    return 2 * prod(dt) * x[-1]


forward = define_ops(SIGNATURE, eager, forms=("forward",), flops=_flops)["forward"]
