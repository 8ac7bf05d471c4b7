"""Grouped queries as tokens of a recurrence with one query per token and head.

The first query of a group goes with the token's key, value and gates. Each further query becomes a token that
neither writes nor decays, and so reads the same state.
"""

from __future__ import annotations

import torch
from torch import Tensor


def queries_as_tokens(q: Tensor) -> Tensor:
    """Queries ``[B, T, H, G, K]``, ``G`` to a head, as ``[B, T * G, H, K]``.

    Of two heads with two queries each, ``(0, 1)`` and ``(2, 3)``, the first queries of both heads come first:

    >>> queries_as_tokens(torch.tensor([[[[[0], [1]], [[2], [3]]]]])).tolist()
    [[[[0], [2]], [[1], [3]]]]
    """
    return q.transpose(2, 3).flatten(1, 2)


def by_head(o: Tensor, T: int, groups: int) -> Tensor:
    """The inverse of `queries_as_tokens`: ``[B, T * G, H, K]`` of ``T`` tokens as ``[B, T, H, G, K]``."""
    return o.unflatten(1, (T, groups)).transpose(2, 3)


def interleave_zeros(x: Tensor, groups: int) -> Tensor:
    """``[B, T * groups, ...]``: each token of ``x [B, T, ...]``, followed by ``groups - 1`` tokens of zeros.

    >>> interleave_zeros(torch.tensor([[7, 8]]), 3).tolist()
    [[7, 0, 0, 8, 0, 0]]
    """
    if groups == 1:
        return x
    x = x.unsqueeze(2)
    others = torch.zeros_like(x).expand(-1, -1, groups - 1, *x.shape[3:])
    return torch.cat([x, others], 2).flatten(1, 2)  # PyTorch 2.11 cannot pad sharded tensors
