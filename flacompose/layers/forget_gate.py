"""The forget gates of HGRN and HGRN2, https://arxiv.org/abs/2311.04823, section 3.2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._dtype import wide


def forget_gate(
    logits: Tensor,  # [B, T, ...]
    lower_bound: Tensor | None,  # of as many channels, from 0 to 1
) -> tuple[Tensor, Tensor]:
    r"""$1 - f$ and $\log f$ of the gate $f = \beta + (1 - \beta) \operatorname{sigmoid}(\text{logits})$.

    In float32 (float64 for float64), with all its digits in values and derivatives, be a gate near 0 or near 1.
    """
    logits = wide(logits)
    sigmoid = torch.sigmoid(logits)
    # The derivative of a sigmoid near 1 is 0 to PyTorch.
    forgotten = torch.where(logits > 0, torch.sigmoid(-logits), 1 - sigmoid)
    log_sigmoid = F.logsigmoid(logits)
    if lower_bound is None:
        return forgotten, log_sigmoid
    bound = lower_bound.to(logits.dtype).reshape(logits.shape[2:])
    forgotten = (1 - bound) * forgotten
    # Near 1 not the logarithm of a sum, which rounds to 1, and near 0 not that of a difference, which cancels.
    near_1 = torch.log1p(-forgotten.clamp(max=0.5))
    f = bound + (1 - bound) * sigmoid
    # Below the least number the bound is 0, and the gate's reciprocal, by which its gradient goes, overflows.
    least = torch.finfo(f.dtype).tiny
    near_0 = torch.where(f > least, f.clamp(min=least).log(), log_sigmoid)
    return forgotten, torch.where(forgotten < 0.5, near_1, near_0)
