"""The cumulative angle token by token: its specification. Mamba-3, https://arxiv.org/abs/2603.15569."""

from __future__ import annotations

import torch
from torch import Tensor


def cumulative_angle(
    x: Tensor,  # [B, T, H, A]
    dt: Tensor,  # [B, T, HV]
    initial_state: Tensor | None = None,  # [B, HV, A]
) -> tuple[Tensor, Tensor]:
    """``o_t = o_{t-1} + tanh(x_t) dt_t``, modulo 2, from -1 to 1; states are in radians."""
    x = x.repeat_interleave(dt.shape[2] // x.shape[2], 2)
    angle = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state / torch.pi
    o = []
    for t in range(x.shape[1]):
        angle = (angle + x[:, t].tanh() * dt[:, t, :, None] + 1).remainder(2) - 1
        o.append(angle)
    return torch.stack(o, 1), torch.pi * angle
