"""Products of pairs of tokens in a chunk, and the inverse of their triangular system, in chunked PyTorch.

In recurrences that erase, the update of a token depends on the updates of the tokens before it in its chunk.
The equations of these tokens are one triangular system, whose inverse does not depend on the state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._recurrences.matrix.channel_decay.eager import Gate, halves
from flacompose.ops._recurrences.matrix.head_decay.eager import Decay


def inverse(A: Tensor) -> Tensor:
    """``(I + A)^-1`` of ``A [..., C, C]``, which is 0 on and above the diagonal.

    By substitution within small blocks, whose error hardly grows where keys are alike; a power series would
    lose all digits. The inverses of two neighbouring blocks give the inverse of both together.
    """
    C, b = A.shape[-1], min(16, A.shape[-1])
    eye = torch.eye(b, dtype=A.dtype, device=A.device)
    blocks = _diagonal(A, b)
    Y = torch.linalg.solve_triangular(blocks + eye, eye.expand_as(blocks), upper=False, unitriangular=True)
    while b < C:
        Y_0, Y_1 = halves(Y)
        between = _diagonal(A, 2 * b)[..., b:, :b]
        Y = _joined(Y_0, -(Y_1 @ between @ Y_0), Y_1)
        b *= 2
    return Y.squeeze(-3)


def _diagonal(x: Tensor, b: int) -> Tensor:
    """The blocks of ``b`` tokens on the diagonal of ``[..., C, C]``, as ``[..., C / b, b, b]``."""
    return x.unflatten(-2, (-1, b)).unflatten(-1, (-1, b)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _joined(x_0: Tensor, between: Tensor, x_1: Tensor) -> Tensor:
    """``[..., 2b, 2b]`` of two neighbouring blocks, and of the later one with the earlier."""
    return torch.cat([torch.cat([x_0, torch.zeros_like(x_0)], -1), torch.cat([between, x_1], -1)], -2)


def pair(a: Tensor, b: Tensor, gate: Gate | Decay, diagonal: int = 0) -> Tensor:
    """``P[t, s] = a_t . b_s`` for ``s <= t``, decayed by the gates ``s + 1`` to ``t``; ``a`` and ``b [..., C, K]``.

    With `diagonal` -1 only for ``s < t``.

    Gates of channels are factors of the products. The block between two neighbouring blocks contains the
    products of the later one's `a` and the earlier one's `b`, both decayed to the boundary. The exponents are
    sums of gates, never a difference of two sums, so nothing overflows or cancels.
    """
    if isinstance(gate, Decay):
        return ((a @ b.mT) * gate.pair).tril(diagonal)
    P = (a * b).sum(-1, keepdim=True).unsqueeze(-1)  # [..., C / b, b, b] with b = 1
    for level, (read, write) in enumerate(gate.levels):
        a_1, b_0 = halves(_blocks(a, level))[1] * read, halves(_blocks(b, level))[0] * write
        between = a_1 @ b_0.mT
        P_0, P_1 = (x.expand_as(between) for x in halves(P))
        P = _joined(P_0, between, P_1)
    return P.squeeze(-3).tril(diagonal)


class PairGradient(NamedTuple):
    a: Tensor
    b: Tensor
    exponents: Any  # the gradients of the gates' exponents, for `gate.gradient`


def pair_gradient(a: Tensor, b: Tensor, P: Tensor, dP: Tensor, gate: Gate | Decay) -> PairGradient:
    """The gradients of `a`, `b` and the gates, from the gradient of ``P = pair(a, b, gate)``."""
    if isinstance(gate, Decay):
        exponents, dP = dP * P, dP * gate.pair
        return PairGradient(dP @ b, dP.mT @ a, exponents)
    diagonal = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    da, db, levels = diagonal * b, diagonal * a, []
    for level, (read, write) in enumerate(gate.levels):
        a_1, b_0 = halves(_blocks(a, level))[1] * read, halves(_blocks(b, level))[0] * write
        size = 1 << level
        between = _diagonal(dP, 2 * size)[..., size:, :size]
        d_read, d_write = between @ b_0, between.mT @ a_1
        levels.append((a_1 * d_read, b_0 * d_write))
        zero = torch.zeros_like(d_write)
        da = da + torch.stack([zero, d_read * read], -3).flatten(-4, -2)
        db = db + torch.stack([d_write * write, zero], -3).flatten(-4, -2)
    return PairGradient(da, db, levels)


def _blocks(x: Tensor, level: int) -> Tensor:
    """``[..., C, D]`` as blocks of ``2 ** level`` tokens."""
    return x.unflatten(-2, (-1, 1 << level))
