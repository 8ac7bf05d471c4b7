"""The recurrence as the paper writes it, token by token: the specification of RWKV-4.

RWKV, https://arxiv.org/abs/2305.13048, appendix D: equations 16 to 18 with sums that are stored divided by
``exp(m_t)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._recurrences.elementwise.rwkv4.inputs import LOWEST


def rwkv4(
    v: Tensor,  # [B, T, D]
    k: Tensor,  # [B, T, D]
    w: Tensor,  # [D], natural-log decay
    u: Tensor,  # [D]
    initial_a: Tensor | None = None,  # [B, D] each
    initial_b: Tensor | None = None,
    initial_m: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``m_t = max(w + m_{t-1}, k_t)``, a constant in derivatives; meaningless before the first write."""
    a = torch.zeros_like(v[:, 0]) if initial_a is None else initial_a
    b = torch.zeros_like(a) if initial_b is None else initial_b
    m = torch.full_like(a, LOWEST) if initial_m is None else initial_m.detach().clamp(min=LOWEST)
    k, m = k.clamp(min=LOWEST), torch.where(b == 0, LOWEST, m)
    o = []
    for t in range(v.shape[1]):
        before, now = torch.where(b > 0, m, LOWEST), u + k[:, t]
        top = torch.maximum(before, now).detach()
        past, present = (before - top).exp(), (now - top).exp()
        o.append((past * a + present * v[:, t]) / (past * b + present))
        before, m = m, torch.maximum(w + m, k[:, t]).clamp(min=LOWEST).detach()
        kept, written = (w + (before - m)).exp(), (k[:, t] - m).exp()
        a, b = kept * a + written * v[:, t], kept * b + written
    return torch.stack(o, 1), a, b, m
