"""The registered op of one token of slot attention, and its backward.

The op is the composition of two calls of channel decay, as one kernel instead of two.
"""

from __future__ import annotations

from typing import Any

from flacompose.ops._recurrences.forms import define_ops
from flacompose.ops._recurrences.fused.slot_attention import eager
from flacompose.ops._recurrences.fused.slot_attention.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.slot_attention.inputs import (
    Inputs as Inputs,  # for the public functions
)


def _flops(q: Any, k: Any, v: Any, s: Any, *_: Any, **__: Any) -> int:
    """One write and one read of each state per query."""
    B, T, H, G, K = q
    return 4 * B * T * H * G * s[-1] * (K + v[-1])


token = define_ops(SIGNATURE, eager, forms=("token",), flops=_flops)["token"]
