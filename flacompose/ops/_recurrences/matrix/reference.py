"""The recurrence as the papers write it, token by token: the specification of every scheme.

Decay per head: Mamba-2's SSD, https://arxiv.org/abs/2405.21060, equation 1 and section 7.1 for its heads; with a
constant decay retention (2307.08621, equation 6) and lightning attention (2405.17381), without one linear
attention (2006.16236, equations 16 to 20). Decay per channel: gated linear attention (2312.06635, equation 3),
with a gate on the value axis as in gated slot attention (2409.07146), and with the read before the decay and the
bonus of RWKV6 (2404.05892). The delta rule: DeltaNet (2406.06484, equation 3), Gated DeltaNet (2412.06464,
equation 10), Kimi Delta Attention (2510.26692, equation 1), with a separate key that reads Gated DeltaNet-2
(2605.22791) and, where it reads before the decay, Comba (2506.02475). Diagonal plus low rank: RWKV7 (2503.14456,
equation 17), and the appendix of 2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matrix_recurrence(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K]
    v: Tensor,  # [B, T, HV, V], HV a multiple of H: neighbouring heads of v share one of q and k
    g: Tensor | None = None,  # [B, T, HV], natural-log decay
    g_gamma: Tensor | None = None,  # [HV], natural-log decay of every token
    gk: Tensor | None = None,  # [B, T, HV, K], natural-log decay of the key axis
    gv: Tensor | None = None,  # [B, T, HV, V], natural-log decay of the value axis
    u: Tensor | None = None,  # [H, K], the bonus of the current token
    beta: Tensor | None = None,  # [B, T, HV]
    a: Tensor | None = None,  # [B, T, H, K], reads what is erased; `k` if absent
    b: Tensor | None = None,  # [B, T, H, K], writes the read of `a`
    initial_state: Tensor | None = None,  # [B, HV, K, V]
    scale: float = 1.0,
    delta_rule: bool = False,
    read_before: bool = False,
) -> tuple[Tensor, Tensor]:
    """``S_t = S' + b_t (a_t^T S*) + k_t w_t^T`` with the decayed ``S'``; ``o_t = scale * S_t^T q_t``.

    ``w_t`` is ``beta_t v_t``, or with `delta_rule` ``beta_t (v_t - S*^T a_t)``; ``S*`` is S', or S if `read_before`.
    With `u`, ``o_t = scale * (S_{t-1} + diag(u) k_t w_t^T)^T q_t``.
    """
    B, T, HV, V = v.shape
    q, k, read_by = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k, k if a is None else a))
    S = q.new_zeros(B, HV, q.shape[-1], V) if initial_state is None else initial_state
    o = []
    for t in range(T):
        before = S
        if g is not None:
            S = g[:, t, :, None, None].exp() * S
        if g_gamma is not None:
            S = g_gamma[:, None, None].exp() * S
        if gk is not None:
            S = gk[:, t, :, :, None].exp() * S
        if gv is not None:
            S = gv[:, t, :, None, :].exp() * S
        read = torch.einsum("bhk,bhkv->bhv", read_by[:, t], before if read_before else S)
        if b is not None:
            b_t = b[:, t].repeat_interleave(HV // b.shape[2], 1)
            S = S + b_t[..., None] * read[:, :, None, :]
        value = v[:, t] - read if delta_rule else v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * value
        written = k[:, t, :, :, None] * value[:, :, None, :]
        S = S + written
        state = S if u is None else before + u[:, :, None] * written
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, dim=1), S
