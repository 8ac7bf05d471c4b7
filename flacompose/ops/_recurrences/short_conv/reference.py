"""The convolution as a recurrence, token by token: the specification of the short convolution.

It is the causal convolution before the recurrence of Mamba, https://arxiv.org/abs/2312.00752, section 3.4. The
state holds the last ``W`` inputs, the newest in the last column.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(
    x: Tensor,  # [B, T, D]
    weight: Tensor,  # [D, W]
    bias: Tensor | None = None,  # [D]
    initial_state: Tensor | None = None,  # [B, D, W]
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """``S_t = [S_{t-1} without its first column, x_t]``; ``y_t = silu(sum_w weight_w * S_t[w] + bias)``."""
    S = x.new_zeros(x.shape[0], *weight.shape) if initial_state is None else initial_state
    y = []
    for t in range(x.shape[1]):
        S = torch.cat([S[:, :, 1:], x[:, t, :, None]], dim=2)
        a = (S * weight).sum(2)
        a = a if bias is None else a + bias
        y.append(F.silu(a) if silu else a)
    return torch.stack(y, dim=1), S
