"""Rotary positions, https://arxiv.org/abs/2104.09864, of sequences in rows or packed, without a table of any length."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.layers.layout import beside
from flacompose.ops._dtype import state_dtype, upcast
from flacompose.ops._varlen import bounds, sequence_count, sequence_of


def rotary(q: Tensor, k: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    r"""``q`` and ``k [B, T, H, K]``, each pair ``(x[i], x[i + K / 2])`` turned by the angle $p \cdot 10000^{-2 i / K}$.

    ``position`` ``p`` is ``[B, T]``, integers. Angles and products are float32 (float64 for float64), rounded once.
    """
    K, dtype = q.shape[3], state_dtype(q.dtype)
    frequency = 10000.0 ** (-torch.arange(0, K, 2, device=q.device, dtype=dtype) / K)
    angle = beside(q, position)[:, :, None, None].to(dtype) * beside(q, frequency)  # [B, T, 1, K / 2]
    cos, sin = angle.cos(), angle.sin()
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = upcast(x).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def positions(
    x: Tensor, start: Tensor | None, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The position of each token, and that of the next one.

    Args:
        x: ``[B, T, D]``, the tokens, those of a padded row first.
        start: ``[N]``, the position of the first token of each sequence, or None for zeros.
        lengths: ``[B]``, how many tokens of each row count. Default: all.
        cu_seqlens: ``[N + 1]``, bounds of sequences packed in one row. Default: a sequence a row.

    Returns:
        ``[B, T]`` and ``[N]``, int64; tokens that do not count have positions without a meaning.
    """
    B, T, _ = x.shape
    N = sequence_count(x, cu_seqlens)
    start = torch.zeros(N, dtype=torch.int64, device=x.device) if start is None else start.long()
    start, t = beside(x, start), beside(x, torch.arange(T, device=x.device))
    if cu_seqlens is None:
        return start[:, None] + t, start + (T if lengths is None else lengths)
    cu = bounds(cu_seqlens, T)
    sequence = sequence_of(t, cu)
    return (t + (start - cu[:-1])[sequence])[None], start + cu.diff()
