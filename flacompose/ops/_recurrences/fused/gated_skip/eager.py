"""The gated skip in PyTorch, for graphs and for every device without a Triton kernel.

v = y + (D + w) x        o = v * silu(z)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.gated_skip.inputs import Inputs
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import without_tail


def forward(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(o [B, T, H, P],)``."""
    v, _, _, z = _numbers(inputs)
    o = v if z is None else v * F.silu(z)
    return without_tail(inputs.cu_seqlens, o.to(inputs.x.dtype))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    v, x, weight, z = _numbers(call.inputs)
    (do,) = without_tail(call.inputs.cu_seqlens, upcast(call.do, x))
    made, dv, D = {}, do, call.wanted_input("D")
    if z is not None:
        s = z.sigmoid()
        made, dv = call.select(z=lambda: do * v * (s * (1 + z * (1 - s)))), do * (z * s)
    return made | call.select(
        y=lambda: dv.clone(),  # an op returns none of its arguments
        x=lambda: torch.zeros_like(x) if weight is None else dv * weight,
        D=None if D is None else (dv * x).sum((0, 1)).sum_to_size(D.shape),
        w=lambda: (dv * x).sum(-1),
    )


def _numbers(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``v``, ``x``, ``D + w`` and ``z``, upcast. Tokens in no sequence are zeros."""
    y, x, w, z, cu_seqlens = inputs.y, inputs.x, inputs.w, inputs.z, inputs.cu_seqlens
    y, x = without_tail(cu_seqlens, upcast(y, x), upcast(x))
    weight = None if inputs.D is None else upcast(inputs.D, x)
    if w is not None:
        w = without_tail(cu_seqlens, upcast(w, x))[0].unsqueeze(-1)
        weight = w if weight is None else weight + w
    if z is not None:
        (z,) = without_tail(cu_seqlens, upcast(z, x))
    return (y if weight is None else y + weight * x), x, weight, z
