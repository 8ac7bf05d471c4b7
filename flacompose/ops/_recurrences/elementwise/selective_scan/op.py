"""The registered ops of the selective scan: `inputs` lists their arguments, `eager` computes them in PyTorch.

It is no flag of the elementwise scan, whose state is as large as the inputs, so that its kernel mostly moves
data and keeps only a tile. Here the state is S times as large and computed from the inputs within the kernel;
it is summed over S before anything is written, gradients are sums over S or over channels, and the states
that the backward computes again have to fit between chunks. The two share the bounds of sequences, segments
and `decayed`.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from flacompose.ops._parallel.form import across_ranks
from flacompose.ops._parallel.transitions import Decay
from flacompose.ops._recurrences.elementwise.selective_scan import eager
from flacompose.ops._recurrences.elementwise.selective_scan.inputs import SIGNATURE
from flacompose.ops._recurrences.elementwise.selective_scan.inputs import (
    Inputs as Inputs,  # for the public functions
)
from flacompose.ops._recurrences.forms import define_ops, initial_gradient
from flacompose.ops._tensors.gate_formulas import log_decay_of_step, time_step


def _flops(x, dt, A, *_, **__) -> int:
    """For each element of the state: its exponent, its decay, the added term, and the sum of the read."""
    return 7 * prod(x) * A[1]


_ops = define_ops(SIGNATURE, eager, forms=("forward",), gates=("dt",), flops=_flops)
_ends = _ops["ends"]
d_initial = initial_gradient(SIGNATURE, _ops["backward"])


def transition(inputs: Inputs) -> tuple[Decay, Tensor]:
    """The transition of each sequence: the log decays ``[N, D, S]``, and the state reached from zero."""
    dt = time_step(inputs.dt, inputs.dt_bias, inputs.softplus, inputs.x)
    # C, the skip and the gate do not change the state.
    state = Inputs(inputs.x, dt, inputs.A, inputs.B, inputs.B.detach(), cu_seqlens=inputs.cu_seqlens)
    end, sum_dt = _ends(*state)
    return Decay((log_decay_of_step(sum_dt.unsqueeze(-1), inputs.A.to(end.dtype)),)), end


forward = across_ranks(SIGNATURE, _ops["forward"], _ops["backward"], transition, d_initial)
