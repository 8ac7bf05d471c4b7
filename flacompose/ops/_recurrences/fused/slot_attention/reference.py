"""The recurrence as the papers write it, token by token: the specification of one token of slot attention.

Gated slot attention, https://arxiv.org/abs/2409.07146, section 3. Without gates it is attention with bounded-memory
control, https://arxiv.org/abs/2110.02488, which divides each slot by the sum of its weights so far.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def slot_attention(
    q: Tensor,  # [B, T, HQ, K], HQ a multiple of H: neighbouring heads of q read the slots of one head
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, H, V]
    s: Tensor,  # [B, T, H, M], weights of the write to each slot; their logits if g is absent
    g: Tensor | None = None,  # [B, T, H, M], natural-log decay of the slots
    initial_state: tuple[Tensor, ...]
    | None = None,  # Hk [B, H, K, M], Hv [B, H, M, V], and without g z [B, H, M]
    scale: float = 1.0,
    weights: Callable[[Tensor], Tensor] = softmax,  # from the logits of a query to its weights of the slots
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``Hk_t = Hk_{t-1} diag(exp g_t) + k_t s_t^T``; ``Hv_t`` likewise; ``o_t = Hv_t^T softmax(scale * Hk_t^T q_t)``.

    Without g, by ``z_t = logaddexp(z_{t-1}, s_t)``: ``g_t = z_{t-1} - z_t``, and ``exp(s_t - z_t)`` in place of s.
    """
    B, T, H, M = s.shape
    z = s.new_full((B, H, M), -torch.inf)
    if initial_state is None:
        Hk, Hv = s.new_zeros(B, H, k.shape[-1], M), s.new_zeros(B, H, M, v.shape[-1])
    elif g is None:
        Hk, Hv, z = initial_state
    else:
        Hk, Hv = initial_state
    o = []
    for t in range(T):
        if g is not None:
            decay, weight = g[:, t].exp(), s[:, t]
        else:
            # Before the first write z is -inf, whose derivatives are NaN; 0 takes its place.
            empty, none = z == -torch.inf, s[:, t] == -torch.inf
            new = torch.logaddexp(torch.where(empty, 0, z), torch.where(none, 0, s[:, t]))
            new = torch.where(empty, torch.where(none, 0, s[:, t]), torch.where(none, z, new))
            decay = torch.where(empty, torch.where(none, 1, 0), torch.where(none, 1, (z - new).exp()))
            weight = torch.where(none, 0, (s[:, t] - new).exp())
            z = torch.where(empty & none, z, new)
        Hk = decay[:, :, None, :] * Hk + k[:, t, :, :, None] * weight[:, :, None, :]
        Hv = decay[:, :, :, None] * Hv + weight[:, :, :, None] * v[:, t, :, None, :]
        q_t = q[:, t].unflatten(1, (H, -1))  # [B, H, heads of q for one of k, K]
        p = weights(scale * torch.einsum("bhnk,bhkm->bhnm", q_t, Hk))
        o.append(torch.einsum("bhnm,bhmv->bhnv", p, Hv).flatten(1, 2))
    return torch.stack(o, 1), (Hk, Hv) if g is not None else (Hk, Hv, z)
