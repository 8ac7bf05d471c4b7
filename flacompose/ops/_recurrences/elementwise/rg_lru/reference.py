"""The recurrence as the paper writes it, token by token: the specification of the RG-LRU.

Griffin, https://arxiv.org/abs/2402.19427, section 2.4, equations 1 to 4. At a reset, as in the authors' code, the decay
is 0 and the square root is 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rg_lru(
    x: Tensor,  # [B, T, D]
    r: Tensor,  # [B, T, D]
    i: Tensor,  # [B, T, D]
    a_param: Tensor,  # [D]
    initial_state: Tensor | None = None,  # [B, D]
    reset: Tensor | None = None,  # [B, T, H]
) -> tuple[Tensor, Tensor]:
    """``a_t = exp(-8 softplus(a_param) sigmoid(r_t))``; ``h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t``."""
    g = -8 * F.softplus(a_param) * r.sigmoid()
    a, strength = g.exp(), (-torch.expm1(2 * g)).sqrt()
    if reset is not None:
        reset = reset.repeat_interleave(x.shape[2] // reset.shape[2], 2)
        a, strength = a.masked_fill(reset, 0), strength.masked_fill(reset, 1)
    h = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state
    o = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + strength[:, t] * i[:, t].sigmoid() * x[:, t]
        o.append(h)
    return torch.stack(o, dim=1), h
