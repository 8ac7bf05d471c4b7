"""The registered ops of the normaliser: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod
from typing import Any

from flacompose.ops.families._op import define_ops
from flacompose.ops.families.normalizer import eager
from flacompose.ops.families.normalizer.inputs import SIGNATURE
from flacompose.ops.families.normalizer.inputs import Inputs as Inputs  # for the public functions


def _flops(q: Any, k: Any, x: Any, *_: Any, **__: Any) -> int:
    """A write and a read of the state for each token, and one division for each element of the output."""
    return 4 * prod(x[:-1]) * q[-1] + prod(x)


_ops = define_ops("normalizer", SIGNATURE, eager, forms=("chunk", "recurrent"), flops=_flops)
chunk, recurrent, steps = _ops["chunk"], _ops["recurrent"], _ops["steps"]
