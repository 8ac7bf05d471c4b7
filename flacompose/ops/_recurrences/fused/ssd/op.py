"""The registered op of Mamba-2's scan: `inputs` lists its arguments, `eager` states the recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose._torch import is_exporting
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._recurrences.forms import define_ops, matrix_state_flops
from flacompose.ops._recurrences.fused.gated_skip.op import gated_skip
from flacompose.ops._recurrences.fused.ssd import eager
from flacompose.ops._recurrences.fused.ssd.inputs import SIGNATURE, Inputs
from flacompose.ops._recurrences.matrix import op as matrix
from flacompose.ops._tensors.dtype import autocast_dtype

# The most keys of a state. Several programs share the read of a larger state, and none could gate its sum.
LARGEST = 256


def _flops(x: Any, dt: Any, A: Any, B: Any, C: Any, *_: Any, **__: Any) -> int:
    return matrix_state_flops(C, B, x)


operator = define_ops(SIGNATURE, eager, forms=("forward",), flops=_flops)["forward"]


def ssd(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``.

    On CUDA it is one operator, also in graphs, whose kernels include skip and gate. Other devices, exported
    graphs and sequence parallel calls compose it of head decay and PyTorch operations; so does autocast to
    another dtype than `x` has, since it does not cast the `x` of the skip.
    """
    x = inputs.x
    kernels = x.is_cuda and x.dtype != torch.float64 and inputs.B.shape[3] <= LARGEST
    if (
        is_exporting()
        or not kernels
        or sharing() is not None
        or autocast_dtype(x.device) not in (None, x.dtype)
    ):
        return eager.composed(inputs, matrix.chunk, gated_skip)
    o, final_state = operator(*inputs)
    return o, final_state
