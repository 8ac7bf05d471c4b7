"""The registered ops of the elementwise scan: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms
from flacompose.ops.families.scan import eager
from flacompose.ops.families.scan.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, g, initial_state, cu_seqlens = inputs
    N = sequence_count(x, cu_seqlens)
    return x.new_empty(x.shape), x.new_empty(N, x.shape[2], dtype=state_dtype(x.dtype))


def _flops(x, *_, **__) -> int:
    """A multiplication and an addition for each element."""
    return 2 * prod(x)


chunk, recurrent, steps = define_forms(
    "scan",
    eager,
    Inputs,
    arguments="Tensor x, Tensor g, Tensor? initial_state, Tensor? cu_seqlens",
    gradients="Tensor dx, Tensor dg, Tensor d_initial_state",
    axes={"x": "B T D", "g": "B T D", "o": "B T D", "initial_state": "N D", "final_state": "N D"},
    autocast={"x": None},
    fake=_fake,
    flops=_flops,
)
