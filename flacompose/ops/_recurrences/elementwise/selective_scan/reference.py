"""The recurrence as the paper writes it, token by token: the specification of the selective scan.

Mamba, https://arxiv.org/abs/2312.00752, section 3.2, algorithm 2, discretized as the paper's code does: the transition
by the exponential, the input by ``dt * B``. A rate of -inf leaves nothing after a time step above 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def selective_scan(
    x: Tensor,  # [B, T, D]
    dt: Tensor,  # [B, T, D]
    A: Tensor,  # [D, S]
    B: Tensor,  # [B, T, G, S]
    C: Tensor,  # [B, T, G, S]
    initial_state: Tensor | None = None,  # [B, D, S]
) -> tuple[Tensor, Tensor]:
    """``h_t = exp(dt_t A) * h_{t-1} + dt_t x_t B_t^T``; ``y_t = h_t C_t``, a channel with the B and C of its group."""
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))  # [B, T, D, S]
    h = x.new_zeros(x.shape[0], *A.shape) if initial_state is None else initial_state
    endless = A == -torch.inf
    A = A.masked_fill(endless, 0)
    y = []
    for t in range(x.shape[1]):
        dt_t = dt[:, t, :, None]
        decay = (dt_t * A).exp().masked_fill(endless & (dt_t > 0), 0)
        h = decay * h + dt_t * x[:, t, :, None] * B[:, t]
        y.append((h * C[:, t]).sum(-1))
    return torch.stack(y, dim=1), h
