"""The recurrence as the papers write it, token by token: the specification of head decay.

Mamba-2's SSD, https://arxiv.org/abs/2405.21060, equation 1 and section 7.1 for its heads; with a constant
decay per head retention (2307.08621, equation 6) and lightning attention (2405.17381), without one linear
attention (2006.16236, equations 16 to 20).
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_decay(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V], HV a multiple of H: neighbouring heads of v share one of q and k
    g: Tensor | None = None,  # [B, T, HV], natural-log decay
    g_gamma: Tensor | None = None,  # [HV], natural-log decay of every token
    beta: Tensor | None = None,  # [B, T, HV]
    initial_state: Tensor | None = None,  # [B, HV, K, V]
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``S_t = exp(g_t + g_gamma) S_{t-1} + beta_t k_t v_t^T``; ``o_t = scale * S_t^T q_t``."""
    B, T, HV, V = v.shape
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    if beta is not None:
        v = beta.unsqueeze(-1) * v
    S = q.new_zeros(B, HV, q.shape[-1], V) if initial_state is None else initial_state
    o = []
    for t in range(T):
        if g is not None:
            S = g[:, t, :, None, None].exp() * S
        if g_gamma is not None:
            S = g_gamma[:, None, None].exp() * S
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, dim=1), S
