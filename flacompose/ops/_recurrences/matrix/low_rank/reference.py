"""The recurrence as the papers write it, token by token: the specification of diagonal plus low rank.

RWKV7, https://arxiv.org/abs/2503.14456, equation 17, where `a` reads the state before its decay; without
gates "identity plus low rank", with gates "diagonal plus low rank", appendix of
https://arxiv.org/abs/2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor


def low_rank(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, H, V]
    a: Tensor,  # [B, T, H, K]
    b: Tensor,  # [B, T, H, K]
    gk: Tensor | None = None,  # [B, T, H, K], natural-log decay of the key axis
    initial_state: Tensor | None = None,  # [B, H, K, V]
    scale: float = 1.0,
    read_before: bool = True,
) -> tuple[Tensor, Tensor]:
    """``S' = diag(exp(gk_t)) S``; ``S_t = S' + b_t (a_t^T S*) + k_t v_t^T``; ``o_t = scale S_t^T q_t``.

    ``S*`` is S, or S' unless `read_before`.
    """
    B, T, H, V = v.shape
    S = q.new_zeros(B, H, q.shape[-1], V) if initial_state is None else initial_state
    o = []
    for t in range(T):
        decayed = S if gk is None else gk[:, t, :, :, None].exp() * S
        erased = torch.einsum("bhk,bhkv->bhv", a[:, t], S if read_before else decayed)
        S = (
            decayed
            + torch.einsum("bhk,bhv->bhkv", b[:, t], erased)
            + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        )
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, dim=1), S
