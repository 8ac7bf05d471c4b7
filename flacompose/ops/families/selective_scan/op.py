"""The registered ops of the selective scan: `inputs` lists their arguments, `eager` computes them in PyTorch.

Why this is no flag of the elementwise scan: there the state is as large as the inputs, so its kernel moves data and
keeps no more than a tile of it. Here the state is S times as large, and made of the inputs within the kernel; it is
summed over S before anything is written, gradients are sums over S or over channels, and the states that the backward
computes again have to fit between chunks. The two share the bounds of sequences, segments and `decayed`.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flacompose.ops._dtype import autocast_dtype
from flacompose.ops._ranks import sharing
from flacompose.ops.families._across import across_ranks
from flacompose.ops.families._op import define_ops, start_gradient
from flacompose.ops.families._stretches import Decay
from flacompose.ops.families.selective_scan import eager
from flacompose.ops.families.selective_scan.inputs import SIGNATURE, STATES, Inputs


def _flops(x, dt, A, *_, **__) -> int:
    """For each element of the state: its exponent, its decay and what is added, and the sum that reads it."""
    return 7 * prod(x) * A[1]


_ops = define_ops("selective_scan", SIGNATURE, eager, forms=("forward",), gates=("dt",), flops=_flops)
operator, _ends = _ops["forward"], _ops["ends"]
d_start = start_gradient(SIGNATURE, _ops["backward"])


def stretch(inputs: Inputs) -> tuple[Decay, Tensor]:
    """What the tokens of each sequence do to a state: the decays ``[N, D, S]``, and the state they reach from zero."""
    # C does nothing to the state.
    end, sum_dt = _ends(*inputs._replace(C=inputs.B.detach(), initial_state=None))
    # A rate of -inf, which times a sum of 0 would be NaN, forgets everything in the first time step above 0.
    A, sum_dt = inputs.A.to(end.dtype), sum_dt.unsqueeze(-1)
    forgets = A == -torch.inf
    log = (A.masked_fill(forgets, 0) * sum_dt).masked_fill(forgets & (sum_dt > 0), -torch.inf)
    return Decay((log,)), end


forward = across_ranks(SIGNATURE, operator, _ops["backward"], stretch, d_start)


def selective_scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D, S])``, with time steps, skip and gate.

    In eager mode on CUDA it is one operator, whose kernels compute all of it. A graph gets the operations of PyTorch
    around that of the scan, which the compiler fuses, and so do other devices, and ranks that share the tokens, which
    hand on the state. Autocast does not cast `x` in the skip.
    """
    x = inputs.x
    kernels = x.is_cuda and x.dtype != torch.float64 and inputs.A.shape[1] <= STATES
    if (
        is_compiling()
        or not kernels
        or sharing() is not None
        or autocast_dtype(x.device) not in (None, x.dtype)
    ):
        return eager.composed(inputs, forward)
    o, final_state = operator(*inputs)
    return o, final_state
