"""The registered op of the rotary embedding: `inputs` lists its arguments, `eager` states the function."""

from __future__ import annotations

from typing import Any

from flacompose.ops._recurrences.forms import define_ops
from flacompose.ops._recurrences.fused.rotary import eager
from flacompose.ops._recurrences.fused.rotary.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.rotary.inputs import Inputs as Inputs  # for `ops/_composed/mamba3.py`


def _flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """A bias and a rotation for each number of queries and keys, and the inner products."""
    B, T, R, _, S = q
    return B * T * v[2] * R * S * (8 + 2 * R)


forward = define_ops(SIGNATURE, eager, forms=("forward",), flops=_flops)["forward"]
