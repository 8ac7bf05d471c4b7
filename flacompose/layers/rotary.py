"""Rotary embedding, https://arxiv.org/abs/2104.09864, of sequences in rows or packed, without a table."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.layers.layout import Layout, distributed_like
from flacompose.ops._parallel.exchange import sums
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._tensors.dtype import state_dtype, upcast
from flacompose.ops._tensors.packed import bounds, last_of_rows, sequence_count, sequence_of


def rotary(q: Tensor, k: Tensor, position: Tensor, base: float) -> tuple[Tensor, Tensor]:
    r"""``q`` and ``k [B, T, H, K]``, each pair ``(x[i], x[i + K / 2])`` rotated by the angle $p \cdot base^{-2 i / K}$.

    The integers ``position`` ``[B, T]`` are $p$. Results are computed in float32 (float64 for float64) and rounded
    once. `base` has no default, since Dynamo would trace a default twice with ``dynamic=True``.
    """
    K, dtype = q.shape[3], state_dtype(q.dtype)
    frequency = base ** (-torch.arange(0, K, 2, device=q.device, dtype=dtype) / K)
    position, frequency = distributed_like(q, position), distributed_like(q, frequency)
    angle = position[:, :, None, None].to(dtype) * frequency  # [B, T, 1, K / 2]
    cos, sin = angle.cos(), angle.sin()
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = upcast(x).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def positions(x: Tensor, start: Tensor | None, tokens: Layout) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of ``x [B, T, D]``, int64 ``[B, T]``, and of the next token of each sequence, ``[N]``.

    In a call for several states, the next token after each state, ``[N, n]``. ``start [N]`` holds the positions of
    the first tokens, or is None for zeros. The positions of pads are arbitrary.
    """
    T, cu_seqlens = x.shape[1], tokens.cu_seqlens
    N = sequence_count(x, cu_seqlens)
    start = torch.zeros(N, dtype=torch.int64, device=x.device) if start is None else start.long()
    ranks, after = sharing(), None
    if ranks is not None:
        if cu_seqlens is not None:
            own = bounds(cu_seqlens, T).diff()
        else:
            own = torch.full_like(start, T) if tokens.lengths is None else tokens.lengths
        start, after = sums(ranks, distributed_like(x, own), distributed_like(x, start))
    start, t = distributed_like(x, start), distributed_like(x, torch.arange(T, device=x.device))
    if cu_seqlens is None:
        # Expanded before the sum. Otherwise Inductor, which drops a sum with zeros, would have to know whether [N, 1]
        # is the shape of the result, and it cannot if T is data-dependent.
        position = start[:, None].expand(-1, T) + t
        if tokens.num_states is not None:
            return position, last_of_rows(position, tokens.num_states) + 1
        end = start + (T if tokens.lengths is None else tokens.lengths)
    else:
        cu = bounds(cu_seqlens, T)
        position = (t + (start - cu[:-1])[sequence_of(t, cu)])[None]
        end = start + cu.diff()
    return position, end if after is None else after
