"""Transitions, the affine maps of the state over spans of tokens such as a rank's, and their join.

Over any span of tokens a recurrence maps the state ``S`` to ``A(S) + end``, where `end` is the state reached
from zero. `A` multiplies each number of the state (`Decay`), or its keys by a matrix (`Matrix`). Backwards in
time, the gradient ``dS`` of the state after the span becomes ``A^T(dS) + d_initial``, where `d_initial` is the
gradient of the state before it that comes from the outputs of the span. In a recurrence's `op`,
``transition(inputs)`` returns ``(A, end)``, and ``d_initial(inputs, do)`` returns `d_initial`.

Everything is PyTorch on tensors as small as a state, so nothing here needs an operator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Decay(NamedTuple):
    """``A(S) = exp(g) * S``, with `g` the sum of the logarithms, each of which broadcasts to ``S [N, H, K, V]``."""

    logs: tuple[Tensor, ...]

    def __call__(self, S: Tensor) -> Tensor:
        for g in self.logs:
            S = g.exp() * S
        return S

    def transposed(self) -> Decay:
        return self

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.logs

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Decay:
        return Decay(tuple(tensors))


class Matrix(NamedTuple):
    """``A(S) = M S``, with ``M [N, H, K, K]``."""

    M: Tensor

    def __call__(self, S: Tensor) -> Tensor:
        return self.M @ S

    def transposed(self) -> Matrix:
        return Matrix(self.M.mT)

    @property
    def tensors(self) -> tuple[Tensor]:
        return (self.M,)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Matrix:
        return Matrix(*tensors)


Map = Decay | Matrix


def join(
    maps: Sequence[Map], ends: Sequence[Tensor], initial: Tensor | None = None, reverse: bool = False
) -> tuple[list[Tensor], Tensor]:
    """The state before each span, and after the last, from that before the first, zero if None.

    With `reverse`, backwards in time: `ends` are the `d_initial` of all spans, and `initial` is the gradient of
    the state after the last one. The results are the gradients of the states after each span and before the
    first.
    """
    S = torch.zeros_like(ends[0]) if initial is None else initial
    starts = [S] * len(ends)
    for i in reversed(range(len(ends))) if reverse else range(len(ends)):
        starts[i] = S
        S = (maps[i].transposed() if reverse else maps[i])(S) + ends[i]
    return starts, S
