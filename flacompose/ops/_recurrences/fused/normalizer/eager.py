"""The denominator of mLSTM in PyTorch, for every device without a Triton kernel.

    n_t = exp(g_t) n_{t-1} + beta_t k_t        z_t = scale * n_t^T q_t
    o_t = x_t / (max(|z_t|, floor_t) + eps)

`z` is the output of head decay with a single value, 1. A small `z` is a difference of large terms, so it is
computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.normalizer.inputs import Inputs
from flacompose.ops._recurrences.matrix import eager
from flacompose.ops._recurrences.matrix import inputs as matrix
from flacompose.ops._tensors.dtype import state_dtype, upcast
from flacompose.ops._tensors.packed import inside, without_tail

OF_KEYS = ("q", "k", "g", "beta", "initial_state")  # the inputs that `z` depends on


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K])``."""
    (x,) = without_tail(inputs.cu_seqlens, upcast(inputs.x))
    z, n = eager.forward(of_ones(inputs))
    weight = torch.maximum(z.abs(), _floor(inputs)) + inputs.eps
    return (x / weight).to(inputs.x.dtype), n.squeeze(-1)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    inputs, d_state = call.inputs, call.arriving.final_state
    x, do = without_tail(inputs.cu_seqlens, upcast(inputs.x), upcast(call.do))
    ones, floor = of_ones(inputs), _floor(inputs)
    z, _ = eager.forward(ones)
    weight = torch.maximum(z.abs(), floor) + inputs.eps
    d_weight = -(do * (x / weight)).sum(-1, True) / weight
    is_floor = z.abs() <= floor
    made = call.select(x=lambda: do / weight, floor=lambda: torch.where(is_floor, d_weight, 0).squeeze(-1))

    dz = torch.where(is_floor, 0, d_weight * z.sgn())
    names = matrix.SIGNATURE.differentiable
    wanted = [name in OF_KEYS and name in call.wanted for name in names]
    if any(wanted):
        dn = None if d_state is None else d_state.unsqueeze(-1)
        found = eager.backward(matrix.SIGNATURE.backward_call(*ones, dz, dn, wanted))
        if "initial_state" in found:
            found["initial_state"] = found["initial_state"].squeeze(-1)
        made |= call.select(**found)
    return made


def _floor(inputs: Inputs) -> Tensor:
    """``[B, T, HV, 1]``, in the dtype of states. It is 1 for tokens in no sequence, whose `z` is 0."""
    floor, cu_seqlens = inputs.floor.to(state_dtype(inputs.q.dtype)).unsqueeze(-1), inputs.cu_seqlens
    if cu_seqlens is None:
        return floor
    return floor.where(inside(cu_seqlens, floor.shape[1])[:, None, None], 1)


def of_ones(inputs: Inputs) -> matrix.Inputs:
    """The inputs of head decay that give the output `z` ``[B, T, HV, 1]`` and the state `n` ``[N, HV, K, 1]``."""
    q, k, x, g, beta, _, n, cu_seqlens, scale, _ = inputs
    ones = x.new_ones(*x.shape[:3], 1, dtype=state_dtype(x.dtype))
    n = None if n is None else n.unsqueeze(-1)
    return matrix.Inputs(
        upcast(q), upcast(k), ones, g, beta=beta, initial_state=n, cu_seqlens=cu_seqlens, scale=scale
    )
