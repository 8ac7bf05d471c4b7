"""The running logsumexp, which normalises attention with bounded memory (2110.02488) and LightNet (2405.21022)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._dtype import wide
from flacompose.ops._varlen import bounds

LOWEST = -1e300  # stands for -inf, of which differences and derivatives would be NaN
BLOCK = 8
LEVELS = 8  # BLOCK ** LEVELS tokens are more than memory holds


class Normalized(NamedTuple):
    """``z_t = logaddexp(z_{t-1}, s_t)``, and what it makes of ``s``, all of one dtype, that of sums."""

    gates: Tensor  # [B, T, ...]: z_{t-1} - z_t, 0 where nothing but -inf has come
    weights: Tensor  # [B, T, ...]: exp(s_t - z_t), 0 likewise; exp(gates) + weights is 1 elsewhere
    z: Tensor  # [N, ...]: after the last token of each sequence


def running_logsumexp(s: Tensor, z: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Normalized:
    """Sum ``exp(s)``, ``s [B, T, ...]``, over the tokens so far, from ``z [N, ...]`` on, -inf unless given.

    Plain PyTorch, differentiable to any order in any mode, of as many calls for every ``T``. It is summed in float64:
    after many tokens a gate is a small difference of two large numbers.
    """
    B, T = s.shape[:2]
    dtype = wide(s).dtype
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = s.shape[2:]
    x = s.double().clamp(min=LOWEST).flatten(2)  # [B, T, D]
    z = x.new_full((N, x.shape[2]), LOWEST) if z is None else z.double().clamp(min=LOWEST).flatten(1)
    t = torch.arange(T, device=x.device)
    if cu_seqlens is None:
        first, z_0 = t == 0, z[:, None]
        sequence = torch.zeros_like(t)
    else:
        cu = bounds(cu_seqlens, T)
        sequence = torch.searchsorted(cu, t, right=True) - 1
        x = torch.where(((sequence >= 0) & (sequence < N))[:, None], x, LOWEST)
        row = sequence.clamp(0, N - 1)
        first, z_0 = t == cu[row], z[row][None]
    total = torch.stack([_inclusive(x, sequence), z_0.expand_as(x)]).logsumexp(0)  # z_t

    before = torch.where(first[:, None], z_0, F.pad(total, (0, 0, 1, 0))[:, :-1])
    written = total > LOWEST / 2
    gates = _or_minus_inf(torch.where(written, F.logsigmoid(before - x), 0))
    weights = torch.where(written, torch.sigmoid(x - before), 0)
    if cu_seqlens is None:
        z = total[:, -1]
    else:
        z = torch.where((cu.diff() > 0)[:, None], total[0, (cu[1:] - 1).clamp(min=0)], z)
    gates, weights, z = (y.to(dtype).unflatten(-1, shape) for y in (gates, weights, _or_minus_inf(z)))
    return Normalized(gates, weights, z)


def _or_minus_inf(x: Tensor) -> Tensor:
    return torch.where(x > LOWEST / 2, x, -torch.inf)


def _inclusive(x: Tensor, sequence: Tensor, levels: int = LEVELS) -> Tensor:
    """``log(sum of exp(x_i))`` over the tokens ``i <= t`` of the sequence of ``t``; ``x [B, T, D]``, ``sequence [T]``.

    Within blocks of tokens all pairs meet; the last sums of blocks are the tokens of the next level.
    """
    T = x.shape[1]
    # One row more than there are blocks, so that there is never one, which is a special shape to the compiler.
    rows = (T + BLOCK - 1) // BLOCK + 1
    t = torch.arange(T, device=x.device)
    token = torch.arange(rows, device=x.device)[:, None] * BLOCK + torch.arange(BLOCK, device=x.device)
    n = torch.where(token < T, sequence[token.clamp(max=T - 1)], -2)  # [R, BLOCK]
    seen = (n[:, :, None] == n[:, None]).tril()  # [R, BLOCK, BLOCK]
    pairs = x[:, token.clamp(max=T - 1)][:, :, None]  # [B, R, 1, BLOCK, D]
    z = torch.where(seen[..., None], pairs, LOWEST).logsumexp(3)
    # Traced, every length takes the levels of the longest.
    if levels > 1 and (torch.compiler.is_compiling() or T > BLOCK):
        z_before = F.pad(_inclusive(z[:, :, -1], n[:, -1], levels - 1), (0, 0, 1, 0))[:, :-1]
        n_before = F.pad(n[:, -1], (1, 0), value=-3)[:-1]
        carried = torch.where((n == n_before[:, None])[..., None], z_before[:, :, None], LOWEST)
        z = torch.stack([z, carried]).logsumexp(0)
    return z[:, t // BLOCK, t % BLOCK]
