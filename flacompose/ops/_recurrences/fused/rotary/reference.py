"""The rotary embedding token by token: the specification of the op.

Mamba-3, https://arxiv.org/abs/2603.15569. Pairs of numbers are rotated as complex numbers. Keys and values come
one token late, since the trapezoidal rule also writes the previous token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary(
    q: Tensor,  # [B, T, R, H, S]
    k: Tensor,  # [B, T, R, H, S]
    v: Tensor,  # [B, T, HV, P]
    q_bias: Tensor,  # [HV, R, S]
    k_bias: Tensor,  # [HV, R, S]
    angle: Tensor,  # [B, T, HV, A]
    initial_k: Tensor | None = None,  # [B, R, HV, S]
    initial_v: Tensor | None = None,  # [B, HV, P]
    halves: bool = False,
) -> tuple[Tensor, ...]:
    """``exp(i pi angle) (x + bias)`` of queries and keys; shifted keys and values; products; last keys and values."""
    B, T, R, H, S = q.shape
    HV, A = angle.shape[2:]
    rotation = torch.polar(torch.ones_like(angle), torch.pi * angle)
    rotation = F.pad(torch.view_as_real(rotation), (0, 0, 0, S // 2 - A))
    rotation[..., A:, 0] = 1
    rotation = torch.view_as_complex(rotation)
    of_heads = [
        x.repeat_interleave(HV // H, 3) + bias.transpose(0, 1) for x, bias in ((q, q_bias), (k, k_bias))
    ]
    axis = -2 if halves else -1
    rotated = []
    for x in of_heads:
        pairs = torch.stack(x.unflatten(-1, (2, -1) if halves else (-1, 2)).unbind(axis), -1)
        pairs = torch.view_as_real(torch.view_as_complex(pairs) * rotation.unsqueeze(2))
        rotated.append((pairs.mT if halves else pairs).flatten(-2))
    products = (of_heads[0].unsqueeze(3) * of_heads[1].unsqueeze(2)).sum(-1).permute(0, 1, 4, 2, 3)
    ks = [rotated[1].new_zeros(B, R, HV, S) if initial_k is None else initial_k, *rotated[1].unbind(1)]
    vs = [torch.zeros_like(v[:, 0]) if initial_v is None else initial_v, *v.unbind(1)]
    return rotated[0], torch.stack(ks[:-1], 1), torch.stack(vs[:-1], 1), products, ks[-1], vs[-1]
