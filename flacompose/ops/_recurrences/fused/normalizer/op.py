"""The registered ops of the denominator: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from flacompose.ops._parallel.form import across_ranks
from flacompose.ops._parallel.transitions import Decay
from flacompose.ops._recurrences.forms import define_ops, initial_gradient
from flacompose.ops._recurrences.fused.normalizer import eager
from flacompose.ops._recurrences.fused.normalizer.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.normalizer.inputs import Inputs as Inputs  # for the public functions
from flacompose.ops._recurrences.matrix import op as matrix


def _flops(q: Any, k: Any, x: Any, *_: Any, **__: Any) -> int:
    """A write and a read of the state for each token, and one division for each element of the output."""
    return 4 * prod(x[:-1]) * q[-1] + prod(x)


_ops = define_ops(SIGNATURE, eager, forms=("chunk", "recurrent"), flops=_flops)
recurrent, steps = _ops["recurrent"], _ops["steps"]
d_initial = initial_gradient(SIGNATURE, _ops["backward"])


def transition(inputs: Inputs) -> tuple[Decay, Tensor]:
    """The transition of each sequence: the transition of head decay with values of 1."""
    decay, end = matrix.transition(eager.of_ones(inputs))
    return Decay(tuple(x.squeeze(3) for x in decay.tensors)), end.squeeze(3)


chunk = across_ranks(SIGNATURE, _ops["chunk"], _ops["backward"], transition, d_initial)
