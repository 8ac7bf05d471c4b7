"""The recurrence as the papers write it, token by token: the specification of channel decay.

Gated linear attention, https://arxiv.org/abs/2312.06635, section 3 and equation 3; with a gate on the value
axis as in gated slot attention (2409.07146), and the read before the decay and the bonus of RWKV6
(2404.05892).
"""

from __future__ import annotations

import torch
from torch import Tensor


def channel_decay(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, H, V]
    gk: Tensor | None = None,  # [B, T, H, K], natural-log decay of the key axis
    gv: Tensor | None = None,  # [B, T, H, V], natural-log decay of the value axis
    u: Tensor | None = None,  # [H, K], the bonus of the current token
    initial_state: Tensor | None = None,  # [B, H, K, V]
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T``; ``o_t = scale * S_t^T q_t``.

    With `u`, ``o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T q_t``.
    """
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    o = []
    for t in range(T):
        before = S
        if gk is not None:
            S = gk[:, t, :, :, None].exp() * S
        if gv is not None:
            S = gv[:, t, :, None, :].exp() * S
        written = k[:, t, :, :, None] * v[:, t, :, None, :]
        S = S + written
        read = S if u is None else before + u[:, :, None] * written
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], read))
    return torch.stack(o, dim=1), S
