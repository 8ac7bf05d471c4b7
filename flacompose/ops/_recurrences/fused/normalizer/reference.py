"""The recurrence token by token: the specification of the denominator.

It is the normalizer of mLSTM, https://arxiv.org/abs/2405.04517, equations 20 and 21, with `floor` in place of 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def normalizer(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    x: Tensor,  # [B, T, HV, V], HV a multiple of H: neighbouring heads of x share one of q and k
    g: Tensor,  # [B, T, HV], natural-log decay
    beta: Tensor,  # [B, T, HV]
    floor: Tensor,  # [B, T, HV]
    initial_state: Tensor | None = None,  # [B, HV, K]
    scale: float = 1.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``n_t = exp(g_t) n_{t-1} + beta_t k_t``; ``o_t = x_t / (max(|scale n_t^T q_t|, floor_t) + eps)``."""
    HV = x.shape[2]
    q, k = (y.repeat_interleave(HV // y.shape[2], 2) for y in (q, k))
    n = torch.zeros_like(k[:, 0]) if initial_state is None else initial_state
    o = []
    for t in range(x.shape[1]):
        n = g[:, t, :, None].exp() * n + beta[:, t, :, None] * k[:, t]
        weight = torch.maximum((scale * n * q[:, t]).sum(-1).abs(), floor[:, t]) + eps
        o.append(x[:, t] / weight[..., None])
    return torch.stack(o, 1), n
