"""The registered op of the running maximum: `inputs` lists its arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod
from typing import Any

from flacompose.ops.families._op import define_ops
from flacompose.ops.families.running_max import eager
from flacompose.ops.families.running_max.inputs import SIGNATURE
from flacompose.ops.families.running_max.inputs import Inputs as Inputs  # for the public functions


def _flops(x: Any, *_: Any, **__: Any) -> int:
    """An addition and a comparison for each element."""
    return 2 * prod(x)


forward = define_ops("running_max", SIGNATURE, eager, forms=("forward",), flops=_flops)["forward"]
