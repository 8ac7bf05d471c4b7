"""The recurrence as the paper writes it, token by token: the specification of the elementwise scan.

HGRN, https://arxiv.org/abs/2311.04823, section 3: its real form, ``f_t = exp(g_t)`` and ``x_t = (1 - f_t) * i_t``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scan(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D], natural-log decay
    initial_state: Tensor | None = None,  # [B, D]
) -> tuple[Tensor, Tensor]:
    """``h_t = exp(g_t) * h_{t-1} + x_t``; ``o_t = h_t``."""
    h = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state
    o = []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        o.append(h)
    return torch.stack(o, dim=1), h
