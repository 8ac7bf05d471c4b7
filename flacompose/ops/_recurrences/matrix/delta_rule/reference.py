"""The recurrence as the papers write it, token by token: the specification of the delta rule.

DeltaNet, https://arxiv.org/abs/2406.06484, equation 3; with a gate per head Gated DeltaNet (2412.06464,
equation 10); with a gate per channel of the keys Kimi Delta Attention (2510.26692, equation 1); with a
separate key that reads the replaced value Gated DeltaNet-2 (2605.22791) and, where it reads before the decay,
Comba (2506.02475).
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V], HV a multiple of H: neighbouring heads of v share one of q and k
    beta: Tensor,  # [B, T, HV]
    g: Tensor | None = None,  # [B, T, HV], natural-log decay
    gk: Tensor | None = None,  # [B, T, HV, K], natural-log decay of the key axis
    a: Tensor | None = None,  # [B, T, H, K], reads the value that is replaced; `k` if absent
    initial_state: Tensor | None = None,  # [B, HV, K, V]
    scale: float = 1.0,
    read_before: bool = False,
) -> tuple[Tensor, Tensor]:
    """``S' = diag(exp(g_t + gk_t)) S``; ``S_t = S' + beta_t k_t (v_t - S*^T a_t)^T``; ``o_t = scale S_t^T q_t``.

    ``S*`` is S', or S if `read_before`.
    """
    B, T, HV, V = v.shape
    q, k, a = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k, k if a is None else a))
    S = q.new_zeros(B, HV, q.shape[-1], V) if initial_state is None else initial_state
    o = []
    for t in range(T):
        before = S
        if g is not None:
            S = g[:, t, :, None, None].exp() * S
        if gk is not None:
            S = gk[:, t, :, :, None].exp() * S
        u = beta[:, t, :, None] * (
            v[:, t] - torch.einsum("bhk,bhkv->bhv", a[:, t], before if read_before else S)
        )
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, dim=1), S
