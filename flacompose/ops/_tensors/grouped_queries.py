"""Grouped queries: the queries of a group read one state, as tokens of a recurrence with one query per token.

The first query of a group reads after its token has been written. The others are tokens of their own between,
which neither write nor decay.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_turn(q: Tensor) -> Tensor:
    """Queries ``[B, T, H, G, K]``, ``G`` to a head, as ``[B, T * G, H, K]``.

    Of two heads with two queries each, ``(0, 1)`` and ``(2, 3)``, the first queries of both heads come first:

    >>> in_turn(torch.tensor([[[[[0], [1]], [[2], [3]]]]])).tolist()
    [[[[0], [2]], [[1], [3]]]]
    """
    return q.transpose(2, 3).flatten(1, 2)


def by_head(o: Tensor, T: int, groups: int) -> Tensor:
    """The inverse of `in_turn`: ``[B, T * G, H, K]`` of ``T`` tokens as ``[B, T, H, G, K]``."""
    return o.unflatten(1, (T, groups)).transpose(2, 3)


def spread(x: Tensor, groups: int) -> Tensor:
    """``[B, T, ...]`` as the first of every `groups` tokens of ``[B, T * groups, ...]``, the others zeros.

    >>> spread(torch.tensor([[7, 8]]), 3).tolist()
    [[7, 0, 0, 8, 0, 0]]
    """
    if groups == 1:
        return x
    x = x.unsqueeze(2)
    others = torch.zeros_like(x).expand(-1, -1, groups - 1, *x.shape[3:])
    return torch.cat([x, others], 2).flatten(1, 2)  # PyTorch 2.11 cannot pad sharded tensors
