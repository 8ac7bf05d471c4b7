"""Large heads: several calls of an op for heads of more keys or values than one call takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flacompose._torch import pytree
from flacompose.ops._tensors.sizes import MAX_HEAD_SIZE

Op = Callable[..., tuple[Tensor, Any]]  # returns the output and the state after the last token


def fits(*tensors: Tensor) -> bool:
    """Whether the ops take heads of the size of these tensors, ``[..., D]``, in one call."""
    return all(x.shape[-1] <= MAX_HEAD_SIZE for x in tensors)


def by_values(
    op: Op, initial_state: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Any]:
    """`op` from `initial_state` on, for ``v [B, T, H, V]`` of any ``V``.

    Each value has its own column of the state ``[N, H, K, V]``, and columns are independent. So each call takes
    some of the columns, and the results are concatenated. Every call repeats the computations that do not depend
    on values. A second state ``[N, H, K]``, of a denominator, is the same in all calls. The returned states may
    be several, ``[N, n, H, K, V]``.
    """
    if fits(v):
        return op(q, k, v, *args, initial_state=initial_state, **options)
    results = []
    for part in _parts(v.shape[-1]):
        state = pytree.tree_map(lambda s, part=part: s[..., part] if _is_matrix(s) else s, initial_state)
        results.append(op(q, k, v[..., part], *args, initial_state=state, **options))
    outputs, states = zip(*results, strict=True)
    if not isinstance(states[0], tuple):
        return torch.cat(outputs, -1), torch.cat(states, -1)
    matrices, (normalizer, *_) = zip(*states, strict=True)
    return torch.cat(outputs, -1), (torch.cat(matrices, -1), normalizer)


def by_keys(
    op: Op, initial_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """`op` from `initial_state` on, for ``q, k [B, T, H, K]`` of any ``K``, without gates on the key axis.

    Each key has its own row of the state ``[N, H, K, V]``, and rows are independent. The output is the sum over all
    rows, so `op` should not round its own.
    """
    if fits(q):
        return op(q, k, v, initial_state=initial_state, **options)
    results = []
    for part in _parts(q.shape[-1]):
        state = None if initial_state is None else initial_state[..., part, :]
        results.append(op(q[..., part], k[..., part], v, initial_state=state, **options))
    outputs, states = zip(*results, strict=True)
    return sum(outputs[1:], outputs[0]), torch.cat(states, -2)


def _parts(size: int) -> list[slice]:
    """Slices that cover an axis of this size, each at most as large as the ops take."""
    return [slice(start, start + MAX_HEAD_SIZE) for start in range(0, size, MAX_HEAD_SIZE)]


def _is_matrix(state: Tensor | None) -> bool:
    return state is not None and state.ndim == 4
