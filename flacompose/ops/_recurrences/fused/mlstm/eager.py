"""One token of mLSTM in PyTorch, for every device without a Triton kernel.

    m = max(log sigmoid(f) + m_0, i)        F = exp(log sigmoid(f) + m_0 - m)        I = exp(i - m)
    C = F C_0 + I k v^T                     n = F n_0 + I k
    z = scale * n^T q                       o = scale * C^T q / (max(|z|, exp(-m)) + eps)

No gradient flows through `m`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.mlstm.inputs import LOWEST, Inputs
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.gate_formulas import log_sigmoid


class _Step(NamedTuple):
    """Intermediate results of the token, without the time axis. Queries and keys are repeated per value head."""

    q: Tensor  # times `scale`
    k: Tensor
    v: Tensor
    forget: Tensor  # [B, HV], `F` above
    write: Tensor  # [B, HV], `I` above
    C_0: Tensor
    n_0: Tensor
    C: Tensor
    n: Tensor
    m: Tensor
    z: Tensor
    weight: Tensor  # the denominator of the output
    o: Tensor


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(o [B, 1, HV, V], final_C [B, HV, K, V], final_n [B, HV, K], final_m [B, HV])``."""
    step = _step(inputs)
    return step.o.unsqueeze(1).to(inputs.v.dtype), step.C, step.n, step.m


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    inputs, step, arriving = call.inputs, _step(call.inputs), call.arriving
    q, k, v, forget, write = step[:5]
    H, scale = inputs.q.shape[2], inputs.scale
    do = torch.zeros_like(step.o) if arriving.o is None else upcast(arriving.o.squeeze(1))
    # 1. From the output to the new state.
    d_read = do / step.weight.unsqueeze(-1)
    is_floor = step.z.abs() <= (-step.m).exp()
    dz = torch.where(is_floor, 0, -(d_read * step.o).sum(-1) * step.z.sgn()).unsqueeze(-1)
    dC, dn = q.unsqueeze(-1) * d_read.unsqueeze(-2), dz * q
    dq = scale * ((step.C @ d_read.unsqueeze(-1)).squeeze(-1) + dz * step.n)
    dC = dC if arriving.final_C is None else dC + arriving.final_C
    dn = dn if arriving.final_n is None else dn + arriving.final_n
    # 2. From the new state to the inputs.
    of_k = (dC @ v.unsqueeze(-1)).squeeze(-1) + dn
    dF = (dC * step.C_0).sum((-2, -1)) + (dn * step.n_0).sum(-1)
    initial_m = inputs.initial_m
    return call.select(
        q=lambda: _of_heads(dq, H),
        k=lambda: _of_heads(write.unsqueeze(-1) * of_k, H),
        v=lambda: (write.unsqueeze(-1) * (dC.mT @ k.unsqueeze(-1)).squeeze(-1)).unsqueeze(1),
        i=lambda: (write * (of_k * k).sum(-1)).unsqueeze(1),
        f=lambda: (forget * dF * torch.sigmoid(-upcast(inputs.f.squeeze(1)))).unsqueeze(1),
        initial_C=lambda: forget[..., None, None] * dC,
        initial_n=lambda: forget.unsqueeze(-1) * dn,
        initial_m=None if initial_m is None else torch.zeros_like(initial_m),
    )


def _step(inputs: Inputs) -> _Step:
    q, k, v, i, f = (upcast(x.squeeze(1)) for x in inputs[:5])
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (inputs.scale * q, k))
    C_0, n_0, m_0 = (
        v.new_zeros(shape) if x is None else upcast(x).to(v.dtype)
        for x, shape in zip(inputs[5:8], ((*k.shape, v.shape[2]), k.shape, v.shape[:2]), strict=True)
    )
    decay = log_sigmoid(f)
    m = torch.maximum(decay + m_0, i.clamp(min=LOWEST)).detach()
    forget, write = (decay + (m_0 - m)).exp(), (i - m).exp()
    C = forget[..., None, None] * C_0 + (write.unsqueeze(-1) * k).unsqueeze(-1) * v.unsqueeze(-2)
    n = forget.unsqueeze(-1) * n_0 + write.unsqueeze(-1) * k
    z = (n * q).sum(-1)
    weight = torch.maximum(z.abs(), (-m).exp()) + inputs.eps
    o = (C * q.unsqueeze(-1)).sum(-2) / weight.unsqueeze(-1)
    return _Step(q, k, v, forget, write, C_0, n_0, C, n, m, z, weight, o)


def _of_heads(dx: Tensor, H: int) -> Tensor:
    """``[B, 1, H, K]``, summed over the value heads that share a query head."""
    return dx.unflatten(1, (H, -1)).sum(2).unsqueeze(1)
