"""Groups of queries that read one state, as tokens of a recurrence in which each token has one query.

The first query of a group is read as its token is written, the others between tokens that write nothing and forget
nothing.
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
    """What `in_turn` made of ``T`` tokens, ``[B, T * G, H, K]``, as ``[B, T, H, G, K]`` again."""
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
