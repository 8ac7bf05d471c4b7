"""The recurrence token by token: the specification of the running maximum.

It is the stabiliser of mLSTM, https://arxiv.org/abs/2405.04517, equations 15 to 17.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._recurrences.elementwise.stabilizer.inputs import LOWEST


def stabilizer(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D], natural-log decay
    initial_state: Tensor | None = None,  # [B, D]
) -> tuple[Tensor, Tensor, Tensor]:
    """``m_t = max(g_t + m_{t-1}, x_t, LOWEST)``, a constant in derivatives; gates are ``g_t + m_{t-1} - m_t``."""
    m = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state.detach().clamp(min=LOWEST)
    gates, maxima = [], []
    for t in range(x.shape[1]):
        before = m
        m = torch.maximum(g[:, t] + m, x[:, t]).clamp(min=LOWEST).detach()
        gates.append(g[:, t] + (before - m))
        maxima.append(m)
    return torch.stack(gates, 1), torch.stack(maxima, 1), m
