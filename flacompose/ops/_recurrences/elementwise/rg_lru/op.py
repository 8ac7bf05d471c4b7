"""The registered ops of the RG-LRU: `inputs` lists their arguments, `eager` states the recurrence.

Its kernels are those of the elementwise scan, but it is no call of that operator: decays and inputs would be written
and read in float32, which takes several times as long as all computations here.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from flacompose.ops._parallel.form import across_ranks
from flacompose.ops._parallel.transitions import Map
from flacompose.ops._recurrences.elementwise.rg_lru import eager
from flacompose.ops._recurrences.elementwise.rg_lru.inputs import SIGNATURE
from flacompose.ops._recurrences.elementwise.rg_lru.inputs import Inputs as Inputs  # for the public functions
from flacompose.ops._recurrences.elementwise.scan import op as scan
from flacompose.ops._recurrences.forms import define_ops, initial_gradient


def _flops(x: Any, *_: Any, **__: Any) -> int:
    """For each element: its log decay, ``1 - a^2``, two products of the input, and the step."""
    return 7 * prod(x)


_ops = define_ops(SIGNATURE, eager, forms=("chunk", "recurrent"), flops=_flops)
recurrent, steps = _ops["recurrent"], _ops["steps"]
d_initial = initial_gradient(SIGNATURE, _ops["backward"])


def transition(inputs: Inputs) -> tuple[Map, Tensor]:
    """The transition of each sequence: that of the elementwise scan of the same decays and inputs."""
    return scan.transition(eager.gated(inputs))


chunk = across_ranks(SIGNATURE, _ops["chunk"], _ops["backward"], transition, d_initial)
