"""Rotary positions, https://arxiv.org/abs/2104.09864, of sequences in rows or packed, without a table of any length."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._dtype import wide
from flacompose.ops._varlen import bounds, sequence_of


def rotary(x: Tensor, position: Tensor) -> Tensor:
    r"""``x [B, T, H, K]``, each pair ``(x[i], x[i + K / 2])`` turned by the angle $p \cdot 10000^{-2 i / K}$.

    ``position`` ``p`` is ``[B, T]``, integers. Angles and products are float32 (float64 for float64), rounded once.
    """
    K = x.shape[3]
    h = wide(x)
    frequency = 10000.0 ** (-torch.arange(0, K, 2, device=x.device, dtype=h.dtype) / K)
    angle = position[:, :, None, None].to(h.dtype) * frequency  # [B, T, 1, K / 2]
    cos, sin = angle.cos(), angle.sin()
    a, b = h.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def positions(
    x: Tensor, start: Tensor | tuple[()], lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The position of each token, and that of the next one.

    Args:
        x: ``[B, T, D]``, the tokens, those of a padded row first.
        start: ``[N]``, the position of the first token of each sequence, or ``()`` for zeros.
        lengths: ``[B]``, the tokens that count in each row. Default: all.
        cu_seqlens: ``[N + 1]``, bounds of sequences packed in one row. Default: a sequence a row.

    Returns:
        ``[B, T]`` and ``[N]``, int64; what stands at tokens that do not count means nothing.
    """
    B, T, _ = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    start = start.long() if isinstance(start, Tensor) else torch.zeros(N, dtype=torch.int64, device=x.device)
    t = torch.arange(T, device=x.device)
    if cu_seqlens is None:
        return start[:, None] + t, start + (T if lengths is None else lengths)
    cu = bounds(cu_seqlens, T)
    sequence = sequence_of(t, cu)
    return (t + (start - cu[:-1])[sequence])[None], start + cu.diff()
