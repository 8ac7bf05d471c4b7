"""The registered op of the turns: `inputs` lists its arguments, `eager` states what it computes."""

from __future__ import annotations

from math import prod
from typing import Any

from flacompose.ops.families._op import define_ops
from flacompose.ops.families.turns import eager
from flacompose.ops.families.turns.inputs import SIGNATURE
from flacompose.ops.families.turns.inputs import Inputs as Inputs  # for `ops/_mamba3.py`


def _flops(x: Any, dt: Any, *_: Any, **__: Any) -> int:
    """A product and a sum for each angle."""
    return 2 * prod(dt) * x[-1]


forward = define_ops("turns", SIGNATURE, eager, forms=("forward",), flops=_flops)["forward"]
