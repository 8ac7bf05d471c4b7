"""The running maximum in PyTorch, for every device without a Triton kernel.

    m_t = max(g_t + m_{t-1}, x_t)        gates_t = g_t + m_{t-1} - m_t

This is the scan of Hillis and Steele: at each level, the maximum over the last 1, 2, 4, ... tokens is
combined with that over as many tokens before them, decayed by a sum of gates. So a gate of -inf is a reset,
and nothing cancels.

The maxima only scale the summed terms; any others would do as well if the gates are their differences. So
they may be rounded, but only once: gates are computed from exactly the returned numbers, in float64, where
their difference is exact. That rounding may make a gate larger than 0; its exponential stays finite while
maxima are below about 1e8 in size. Maxima are constants in all derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.stabilizer.inputs import LOWEST, Inputs
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import bounds, inside, sequence_count, sequence_of


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(gates [B, T, D], m [B, T, D], final_state [N, D])``."""
    x, g, initial_state, cu_seqlens = inputs
    m, T = upcast(x.detach()).contiguous().clamp(min=LOWEST), x.shape[1]
    if initial_state is None:
        state = m.new_zeros(sequence_count(x, cu_seqlens), m.shape[2])
    else:
        state = initial_state.contiguous().to(m.dtype).clamp(min=LOWEST)
    start, t = state.detach(), torch.arange(T, device=x.device)
    if cu_seqlens is None:
        sequence, first, before = torch.zeros_like(t), t == 0, start[:, None]
    else:
        cu = bounds(cu_seqlens, T)
        tokens = inside(cu, T)
        sequence = sequence_of(t, cu)
        first, before = t == cu[sequence], start[sequence][None]
        sequence = torch.where(tokens, sequence, -1)
    first = first[:, None]
    decay = g.detach().contiguous().to(m.dtype)
    m = torch.where(first, torch.maximum(m, decay + before), m)
    for level in range((T - 1).bit_length()):
        step = 1 << level
        seen = ((t >= step) & (sequence == sequence.roll(step)))[:, None]
        m = torch.where(seen, torch.maximum(m, decay + m.roll(step, 1)), m)
        decay = torch.where(seen, decay + decay.roll(step, 1), decay)
    before = torch.where(first, before, m.roll(1, 1))
    gates = (g.contiguous().double() + (before.double() - m.double())).to(m.dtype)
    if cu_seqlens is None:
        return gates, m, m[:, -1].clone(memory_format=torch.contiguous_format)
    final = torch.where(_filled(cu), m[0, (cu[1:] - 1).clamp(min=0)], state)
    return torch.where(tokens[:, None], gates, 0), torch.where(tokens[:, None], m, 0), final


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants: of a gate, that of the output gate; of a state, that of its copy."""
    x, _, state, cu_seqlens = call.inputs
    d_state = call.arriving.final_state
    if state is not None:
        zeros = state.new_zeros(state.shape)
        if cu_seqlens is None or d_state is None:
            d_state = zeros
        else:
            d_state = torch.where(_filled(bounds(cu_seqlens, x.shape[1])), zeros, d_state)
    return call.select(
        x=lambda: x.new_zeros(x.shape),
        g=lambda: call.do.clone(memory_format=torch.contiguous_format),  # an op returns none of its arguments
        initial_state=d_state,
    )


def _filled(cu: Tensor) -> Tensor:
    """``[N, 1]``, whether a sequence has any tokens. If it has none, its final state is its initial state."""
    return (cu.diff() > 0)[:, None]
