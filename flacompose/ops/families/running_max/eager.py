"""The running maximum in PyTorch: what every device without a Triton kernel runs.

    m_t = max(g_t + m_{t-1}, x_t)        gates_t = g_t + m_{t-1} - m_t

This is the scan of Hillis and Steele: at each level, the maximum over the last 1, 2, 4, ... tokens meets that over as
many tokens before them, which has decayed by a sum of gates. So a gate of -inf ends what was before it, and nothing
cancels. The maxima only scale what is summed, and any others would do as well if the gates are those between them. So
they may be rounded, but not twice in different ways: gates are made of the very numbers that are returned, in float64,
where their difference is exact. Maxima are constants in all derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._dtype import upcast
from flacompose.ops._varlen import bounds, inside, sequence_count, sequence_of
from flacompose.ops.families._signature import BackwardCall, Gradients
from flacompose.ops.families.running_max.inputs import LOWEST, Inputs


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(gates [B, T, D], m [B, T, D], final_state [N, D])``."""
    x, g, start, cu_seqlens = inputs
    m, T = upcast(x.detach()).clamp(min=LOWEST), x.shape[1]
    N = sequence_count(x, cu_seqlens)
    start = m.new_zeros(N, m.shape[2]) if start is None else start.detach().to(m.dtype).clamp(min=LOWEST)
    t = torch.arange(T, device=x.device)
    if cu_seqlens is None:
        sequence, first, start_ = torch.zeros_like(t), t == 0, start[:, None]
    else:
        cu = bounds(cu_seqlens, T)
        sequence = sequence_of(t, cu)
        first, start_ = t == cu[sequence], start[sequence][None]
    first = first[:, None]
    decay = g.detach().to(m.dtype)
    m = torch.where(first, torch.maximum(m, decay + start_), m)
    for level in range((T - 1).bit_length()):
        step = 1 << level
        seen = ((t >= step) & (sequence == sequence.roll(step)))[:, None]
        m = torch.where(seen, torch.maximum(m, decay + m.roll(step, 1)), m)
        decay = torch.where(seen, decay + decay.roll(step, 1), decay)
    before = torch.where(first, start_, m.roll(1, 1))
    gates = (g.double() + (before.double() - m.double())).to(m.dtype)
    if cu_seqlens is None:
        return gates, m, m[:, -1].clone()
    final = torch.where((cu.diff() > 0)[:, None], m[0, (cu[1:] - 1).clamp(min=0)], start)
    tokens = inside(cu, T)[:, None]
    return torch.where(tokens, gates, 0), torch.where(tokens, m, 0), final


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants: a gate has that of the gate that is made of it."""
    gradients = {name: torch.zeros_like(getattr(call.inputs, name)) for name in call.wanted - {"g"}}
    return call.made(g=lambda: call.do.clone(), **gradients)  # an op returns none of its arguments
