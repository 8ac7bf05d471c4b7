"""The registered ops of the selective scan: `inputs` lists their arguments, `eager` computes them in PyTorch.

Why this is no flag of the elementwise scan: there the state is as large as the inputs, so its kernel moves data and
keeps no more than a tile of it. Here the state is S times as large, and made of the inputs within the kernel; it is
summed over S before anything is written, gradients are sums over S or over channels, and the states that the backward
computes again have to fit between chunks. The two share the bounds of sequences, segments and `decayed`.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from flacompose.ops.families._op import define_forms
from flacompose.ops.families.selective_scan import eager
from flacompose.ops.families.selective_scan.inputs import SIGNATURE, Inputs


def _flops(x, dt, A, *_, **__) -> int:
    """For each element of the state: its exponent, its decay and what is added, and the sum that reads it."""
    return 7 * prod(x) * A[1]


(_forward,) = define_forms("selective_scan", SIGNATURE, eager, forms=("forward",), flops=_flops)


def forward(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(y, final_state)``."""
    return _forward(*inputs)
