"""The running logsumexp, the normalizer of attention with bounded memory (2110.02488) and LightNet (2405.21022)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._parallel.exchange import logsumexps
from flacompose.ops._parallel.ranks import shared, sharing
from flacompose.ops._tensors.dtensor import by_shard
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import bounds, inside, last_of_rows, sequence_count, sequence_of
from flacompose.ops._tensors.sizes import always_true

LOWEST = -1e300  # replaces -inf, whose differences and derivatives would be NaN
LEVELS = 20  # levels of the scan in a graph, which serves up to 2 ** 20 tokens; more need another graph


class Normalized(NamedTuple):
    """The running logsumexp ``z_t = logaddexp(z_{t-1}, s_t)``, and the gates and weights that it gives."""

    gates: Tensor  # [B, T, ...]: z_{t-1} - z_t, 0 while all logits are -inf
    weights: Tensor  # [B, T, ...]: exp(s_t - z_t), 0 while all logits are -inf, then 1 - exp(gates)
    z: Tensor  # [N, ...], after the last token of each sequence, or [N, n, ...], after each of the last n


def running_logsumexp(
    s: Tensor, z: Tensor | None = None, cu_seqlens: Tensor | None = None, output_states: int | None = None
) -> Normalized:
    """The running logsumexp of ``s [B, T, ...]`` over the tokens, beginning with ``z [N, ...]``. Default: -inf.

    It is plain PyTorch, and its trace has the same operations for every ``T`` above 1. `torch.logcumsumexp`
    is not used: its derivatives are NaN at -inf, and its second derivatives are NaN where a gradient is 0.
    Sums are float64, since after many tokens a gate is a small difference of two large numbers. With
    `output_states`, the `z` after each of that many last tokens is returned.
    """
    if hasattr(s, "device_mesh"):
        return Normalized(*by_shard(running_logsumexp, s, z, cu_seqlens, output_states))
    B, T = s.shape[:2]
    dtype = upcast(s).dtype
    N = sequence_count(s, cu_seqlens)
    shape = s.shape[2:]
    x = s.double().clamp(min=LOWEST).flatten(2)  # [B, T, D]
    z = x.new_full((N, x.shape[2]), LOWEST) if z is None else z.double().clamp(min=LOWEST).flatten(1)
    t = torch.arange(T, device=x.device)
    ranks, after = sharing(), None
    if ranks is not None:
        if always_true(T == 0):  # an empty sum keeps the graph's gathers the same on all ranks
            own = torch.full_like(z, LOWEST) + x.sum((0, 1))
        else:
            with shared(None):
                own = running_logsumexp(x, None, cu_seqlens).z.clamp(min=LOWEST).flatten(1)
        z, after = logsumexps(ranks, own, z)
    if cu_seqlens is None:
        first, z_0 = t == 0, z[:, None]
        sequence = torch.zeros_like(t)
    else:
        cu = bounds(cu_seqlens, T)
        x = torch.where(inside(cu, T)[:, None], x, LOWEST)
        sequence = sequence_of(t, cu)
        first, z_0 = t == cu[sequence], z[sequence][None]
    total = torch.stack([_inclusive(x, sequence), z_0.expand_as(x)]).logsumexp(0)  # z_t

    before = torch.where(first[:, None], z_0, F.pad(total, (0, 0, 1, 0))[:, :-1])
    written = ~_lowest(total)
    gates = _or_minus_inf(torch.where(written, F.logsigmoid(before - x), 0))
    weights = torch.where(written, torch.sigmoid(x - before), 0)
    if after is not None:
        z = after
    elif output_states is not None:
        z = last_of_rows(total, output_states)
    elif cu_seqlens is None:
        z = total[:, -1]
    else:
        z = torch.where((cu.diff() > 0)[:, None], total[0, (cu[1:] - 1).clamp(min=0)], z)
    gates, weights = (y.to(dtype).unflatten(-1, shape) for y in (gates, weights))
    # `unflatten` comes first, so that the returned `z` is no view: a call that was compiled for a view as a state would
    # be compiled again for a state that is no view.
    return Normalized(gates, weights, _or_minus_inf(z.unflatten(-1, shape)).to(dtype))


def _or_minus_inf(x: Tensor) -> Tensor:
    return torch.where(_lowest(x), -torch.inf, x)


def _lowest(x: Tensor) -> Tensor:
    """Whether `x` stands for -inf. A NaN does not."""
    return x <= LOWEST / 2


def _inclusive(x: Tensor, sequence: Tensor) -> Tensor:
    """``log(sum of exp(x_i))`` over the tokens ``i <= t`` of the sequence of ``t``; ``x [B, T, D]``, ``sequence [T]``.

    This is the scan of Hillis and Steele: each level adds the sum of the last 1, 2, 4, ... tokens to the sum of
    as many tokens before them.
    """
    T = x.shape[1]
    t = torch.arange(T, device=x.device)
    # A graph has all levels at every length, except for the single token of decoding.
    traced = torch.jit.is_tracing() or (torch.compiler.is_compiling() and not always_true(T == 1))
    levels = LEVELS if traced else 0
    while 1 << levels < T:
        levels += 1
    for level in range(levels):
        seen = (t >= 1 << level) & (sequence == sequence.roll(1 << level))
        before = torch.where(seen[:, None], x.roll(1 << level, 1), LOWEST)
        x = torch.stack([x, before]).logsumexp(0)
    return x
