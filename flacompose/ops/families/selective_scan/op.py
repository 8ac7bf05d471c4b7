"""The registered ops of the selective scan: `inputs` lists their arguments, `eager` computes them in PyTorch.

Why this is no flag of the elementwise scan: there the state is as large as the inputs, so its kernel moves data and
keeps no more than a tile of it. Here the state is S times as large, and made of the inputs within the kernel; it is
summed over S before anything is written, gradients are sums over S or over channels, and the states that the backward
computes again have to fit between chunks. The two share the bounds of sequences, segments and `decayed`.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms
from flacompose.ops.families.selective_scan import eager
from flacompose.ops.families.selective_scan.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, A = inputs.x, inputs.A
    N = sequence_count(x, inputs.cu_seqlens)
    return x.new_empty(x.shape), x.new_empty(N, *A.shape, dtype=state_dtype(x.dtype))


def _flops(x, dt, A, *_, **__) -> int:
    """For each element of the state: its exponent, its decay and what is added, and the sum that reads it."""
    return 7 * prod(x) * A[1]


(forward,) = define_forms(
    "selective_scan",
    eager,
    Inputs,
    forms=("forward",),
    arguments="Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? initial_state, Tensor? cu_seqlens",
    gradients="Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor d_initial_state",
    axes={
        "x": "B T D",
        "dt": "B T D",
        "A": "D S",
        "B": "B T H S",
        "C": "B T H S",
        "o": "B T D",
        "initial_state": "N D S",
        "final_state": "N D S",
    },
    autocast={"x": None, "B": None, "C": None},
    fake=_fake,
    flops=_flops,
)
