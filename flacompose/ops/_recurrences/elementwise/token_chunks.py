"""The walk of all elementwise recurrences in PyTorch: all chunks at the same time, token by token.

The chunks are scanned twice: from zero, for the transition of each chunk; and, after state passing from chunk
to chunk, from the state before each. Gradients go backwards in time likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flacompose.ops._recurrences.chunks import Chunks


class TokenChunks(Chunks):
    """The chunks of ``[B, T, D]``: one head, with keys of size 1."""

    def each(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x [B, T, D]`` as ``[B, 1, R, D]`` for each place in a chunk; zeros where there is no token."""
        return self.split(x.unsqueeze(2)).unbind(-2)

    def together(self, places: list[Tensor]) -> Tensor:
        """``[B, T, D]`` from ``[B, 1, R, D]`` for each place in a chunk."""
        x = self.tokens(torch.stack(places, -2)).squeeze(1)
        return x.clone(memory_format=torch.contiguous_format)  # an op returns no view

    def states(
        self, ends: Tensor, decay: Tensor, start: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The state before each chunk, ``[B, 1, R, D]``, and after each sequence, ``[N, D]``.

        `ends` and `decay`, ``[B, 1, R, D]``, are the transitions of chunks. With `reverse` it is the gradient of the
        state, after each chunk and before each sequence.
        """
        start = None if start is None else start[:, None, None]
        S, end = self.pass_decayed(ends.unsqueeze(-2), [decay.unsqueeze(-2)], start, reverse)
        return S.squeeze(-2), end.flatten(1).clone()


def state_after(decays: Iterable[Tensor], writes: Iterable[Tensor]) -> Tensor:
    """The state that chunks reach from zero, by ``h_t = a_t * h_{t-1} + e_t``."""
    h: Tensor | None = None
    for a, write in zip(decays, writes, strict=True):
        h = write if h is None else torch.addcmul(write, a, h)
    assert h is not None
    return h


def decayed_states(decays: Iterable[Tensor], writes: Iterable[Tensor], h: Tensor) -> list[Tensor]:
    """``a_t * h_{t-1}`` of each token, from the state before each chunk."""
    decayed = []
    for a, write in zip(decays, writes, strict=True):
        decayed.append(a * h)
        h = decayed[-1] + write
    return decayed


def gradient_before(decays: Sequence[Tensor], reads: Sequence[Tensor]) -> Tensor:
    """The gradient of the state before chunks through their own tokens, ``c_t = a_t * (do_t + c_{t+1})``."""
    c: Tensor | None = None
    for a, read in zip(reversed(decays), reversed(reads), strict=True):
        c = a * (read if c is None else read + c)
    assert c is not None
    return c


def gradients(decays: Sequence[Tensor], reads: Sequence[Tensor], c: Tensor) -> list[Tensor]:
    """``dh_t = do_t + c_{t+1}`` of each token, from the gradient `c` of the state after each chunk."""
    dh = []
    for a, read in zip(reversed(decays), reversed(reads), strict=True):
        dh.append(read + c)
        c = a * dh[-1]
    return dh[::-1]
