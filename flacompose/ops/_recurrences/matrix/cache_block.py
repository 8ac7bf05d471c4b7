"""The tokens of a cache block in chunks, in PyTorch: state passing, the decays of gates, and pairs of tokens.

A scheme of a matrix state is a `CacheBlock`: the equations of one block's tokens. Everything is functional and
differentiable to any order. Exponents are sums of gates, never a difference of cumulative sums. So gates of at
most 0 overflow nowhere, no digits cancel, and a gate of -inf is a weight of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.matrix.inputs import Inputs

Wants = Callable[..., bool]


class PairGradient(NamedTuple):
    """The gradients that reach `a`, `b` and the exponents of gates through ``P = gates.pairs(a, b)``."""

    a: Tensor
    b: Tensor
    exponents: Any  # of the gates' exponents, for `gradient` of these gates


class HeadGates:
    """The decays in each chunk by gates of heads ``g [..., C, 1]``; without gates all are 1.

    `pair` ``[..., t, s]`` is the decay from a write to a later read, and 1 elsewhere; `read` and `write`
    ``[..., t, 1]`` are the decays from the chunk's start to a token and from a token to its end, `chunk_decay`
    ``[..., 1, 1]`` that of the chunk. With `read_before` a token reads before its own decay, so its sums of
    gates end at the token before it. Of `like` ``[..., C, K]`` only the size `C`, the dtype and the device count.
    """

    def __init__(self, g: Tensor | None, like: Tensor, read_before: bool = False) -> None:
        self.read_before = read_before
        ones = like.new_ones(like.shape[-2], like.shape[-2])
        self.before = ones.tril(-1)  # [t, s], 1 where s < t
        if g is None:
            self.pair = self.read = self.write = self.chunk_decay = ones[:1, :1]
            return
        sums = torch.where(self.before > 0, g, 0).cumsum(-2)  # [..., t, s], gates s + 1 to t
        since_start = g.cumsum(-2)
        self.write = sums[..., -1:, :].mT.exp()
        self.chunk_decay = since_start[..., -1:, :].exp()
        if read_before:
            sums, since_start = (F.pad(x, (0, 0, 1, -1)) for x in (sums, since_start))
        self.pair, self.read = sums.exp(), since_start.exp()

    def pairs(self, a: Tensor, b: Tensor, diagonal: int = 0) -> Tensor:
        """``P[t, s] = a_t . b_s`` for ``s <= t``, decayed by the gates ``s + 1`` to ``t``; ``a`` and ``b [..., C, K]``.

        With `diagonal` -1 only for ``s < t``.
        """
        return ((a @ b.mT) * self.pair).tril(diagonal)

    def pair_gradient(self, a: Tensor, b: Tensor, P: Tensor, dP: Tensor) -> PairGradient:
        """The gradients of `a`, `b` and the gates, from `dP`, the gradient of ``P = pairs(a, b)``.

        `dP` must be 0 where `pairs` leaves `P` at 0.
        """
        exponents, dP = dP * P, dP * self.pair
        return PairGradient(dP @ b, dP.mT @ a, exponents)

    def gradient(self, d_pair: Tensor, d_read: Tensor, d_write: Tensor, d_chunk_decay: Tensor) -> Tensor:
        """The gradient of every gate ``[..., C, 1]``, from those of the exponents of the decays of these names.

        Vectors ``[..., C, K]``, and ``d_chunk_decay [..., 1, K]``, are summed over `K`.
        """
        vectors = d_read, d_write, d_chunk_decay
        d_read, d_write, d_chunk_decay = (x.sum(-1, True) if x.shape[-1] > 1 else x for x in vectors)
        if self.read_before:
            d_pair, d_read = (F.pad(x, (0, 0, -1, 1)) for x in (d_pair, d_read))
        until_here = 1 - self.before.mT  # [t, j], 1 where t >= j
        # Vectors are rows of one matrix product, so that the matrix of sums is not copied for each.
        pairs = (d_pair @ self.before.mT * until_here).sum(-2, True)
        return (pairs + d_read.mT @ until_here + d_write.mT @ self.before.mT).mT + d_chunk_decay


class ChannelGates:
    """The decays in each chunk by gates of channels ``g [..., C, D]``. A decay is the exponential of a sum of gates.

    `read` ``[..., C, D]`` is the decay from the chunk's start to a token, `write` from a token to the chunk's
    end, and ``chunk_decay [..., 1, D]`` that of the chunk. The decay of a pair of tokens is the product of two
    factors: from the earlier token to a boundary between both, and from there to the later one. The chunk is
    halved, and halved again, and the boundary is the first that separates the tokens. `levels` are these factors
    for blocks of 1, 2, 4, ... tokens: from the start of each odd block, and to the end of each even block.
    """

    def __init__(self, g: Tensor, read_before: bool = False) -> None:
        self.read_before = read_before
        g = g.unsqueeze(-2)  # [..., C / b, b, D] with b = 1
        read, write, total = (torch.zeros_like(g) if read_before else g), torch.zeros_like(g), g
        self.levels: list[tuple[Tensor, Tensor]] = []
        while read.shape[-3] > 1:
            (read_0, read_1), (write_0, write_1), (total_0, total_1) = map(halves, (read, write, total))
            self.levels.append((read_1.exp(), write_0.exp()))
            read = torch.cat([read_0, read_1 + total_0], -2)
            write = torch.cat([write_0 + total_1, write_1], -2)
            total = total_0 + total_1
        self.read, self.write, self.chunk_decay = (x.squeeze(-3).exp() for x in (read, write, total))

    def pairs(self, a: Tensor, b: Tensor, diagonal: int = 0) -> Tensor:
        """`HeadGates.pairs`, for these gates: block by block, from single tokens to halves of the chunk.

        The block between two neighbouring blocks contains the products of the later one's `a` and the earlier
        one's `b`, both decayed to the boundary.
        """
        P = (a * b).sum(-1, keepdim=True).unsqueeze(-1)  # [..., C / b, b, b] with b = 1
        for level in range(len(self.levels)):
            a_1, b_0 = self._at_boundaries(a, b, level)
            P_0, P_1 = halves(P)
            P = _joined(P_0, a_1 @ b_0.mT, P_1)
        return P.squeeze(-3).tril(diagonal)

    def pair_gradient(self, a: Tensor, b: Tensor, P: Tensor, dP: Tensor) -> PairGradient:
        """`HeadGates.pair_gradient`, for these gates."""
        diagonal = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        da, db, levels = diagonal * b, diagonal * a, []
        for level, (read, write) in enumerate(self.levels):
            a_1, b_0 = self._at_boundaries(a, b, level)
            between = _between(dP, 1 << level)
            d_read, d_write = between @ b_0, between.mT @ a_1
            levels.append((a_1 * d_read, b_0 * d_write))
            zero = torch.zeros_like(d_write)
            da = da + _unhalve(zero, d_read * read).flatten(-3, -2)
            db = db + _unhalve(d_write * write, zero).flatten(-3, -2)
        return PairGradient(da, db, levels)

    def _at_boundaries(self, a: Tensor, b: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """`a` of the odd and `b` of the even blocks of this level, decayed to the boundary between both."""
        read, write = self.levels[level]
        return halves(_blocks(a, level))[1] * read, halves(_blocks(b, level))[0] * write

    def gradient(
        self, d_levels: list[tuple[Tensor, Tensor]], d_read: Tensor, d_write: Tensor, d_chunk_decay: Tensor
    ) -> Tensor:
        """The gradient of ``g`` from the gradients of all its sums: the constructor, transposed."""
        d_read, d_write, d_chunk_decay = (x.unsqueeze(-3) for x in (d_read, d_write, d_chunk_decay))
        for at_read, at_write in reversed(d_levels):
            (read_0, read_1), (write_0, write_1) = d_read.chunk(2, -2), d_write.chunk(2, -2)
            d_chunk_decay = _unhalve(
                d_chunk_decay + read_1.sum(-2, keepdim=True), d_chunk_decay + write_0.sum(-2, keepdim=True)
            )
            d_read = _unhalve(read_0, read_1 + at_read)
            d_write = _unhalve(write_0 + at_write, write_1)
        return (d_chunk_decay if self.read_before else d_chunk_decay + d_read).squeeze(-2)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd blocks of ``[..., C / b, b, D]``.

    Of four tokens in blocks of one:

    >>> [x.flatten().tolist() for x in halves(torch.arange(4).view(4, 1, 1))]
    [[0, 2], [1, 3]]
    """
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _unhalve(even: Tensor, odd: Tensor) -> Tensor:
    """The blocks whose `halves` are these."""
    return torch.stack([even, odd], -3).flatten(-4, -3)


def _blocks(x: Tensor, level: int) -> Tensor:
    """``[..., C, D]`` as blocks of ``2 ** level`` tokens."""
    return x.unflatten(-2, (-1, 1 << level))


def _diagonal(x: Tensor, b: int) -> Tensor:
    """The blocks of ``b`` tokens on the diagonal of ``[..., C, C]``, as ``[..., C / b, b, b]``."""
    return x.unflatten(-2, (-1, b)).unflatten(-1, (-1, b)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _between(x: Tensor, b: int) -> Tensor:
    """The blocks of ``[..., C, C]`` between odd blocks of ``b`` tokens, in rows, and the even blocks before them."""
    return _diagonal(x, 2 * b)[..., b:, :b]


def _joined(x_0: Tensor, between: Tensor, x_1: Tensor) -> Tensor:
    """``[..., 2b, 2b]`` of two neighbouring blocks, and of the later one with the earlier."""
    x_0, x_1 = x_0.expand_as(between), x_1.expand_as(between)
    return torch.cat([torch.cat([x_0, torch.zeros_like(x_0)], -1), torch.cat([between, x_1], -1)], -2)


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
        Y = _joined(Y_0, -(Y_1 @ _between(A, b) @ Y_0), Y_1)
        b *= 2
    return Y.squeeze(-3)


class CacheBlock:
    """The tokens of a cache block in chunks, ``[B, H, n, R, C, D]``: `n` heads of values share queries and keys."""

    # The inputs whose gradients need the states before the chunks.
    of_states: ClassVar[tuple[str, ...]]
    gates: HeadGates | ChannelGates

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        self.inputs, self.chunks = inputs, chunks
        self.q, self.k, self.v = map(self.split, (inputs.q, inputs.k, inputs.v))
        self.q = self.q * inputs.scale

    def compute_states(self, passing: StatePassing) -> tuple[Tensor, ...]:
        """The state before each chunk, and the written values where these depend on it."""
        raise NotImplementedError

    def compute_outputs(self, *states: Tensor) -> Tensor:
        """The outputs of all tokens, from the result of `compute_states`."""
        raise NotImplementedError

    def compute_gradients(
        self, wants: Wants, do: Tensor, states: tuple[Tensor, ...], backwards: StatePassing
    ) -> dict[str, Tensor]:
        """The wanted gradients of all tokens, by the names of the inputs; `states` are empty if they are not needed."""
        raise NotImplementedError

    def split(self, x: Tensor) -> Tensor:
        """``x [B, T, HV, D]`` or ``[B, T, H, D]`` in chunks."""
        return self.chunks.split(x).unflatten(1, (self.inputs.q.shape[2], -1))

    def read(self, x: Tensor) -> Tensor:
        """`x` decayed by the gates since the chunk's start."""
        return x * self.gates.read

    def write(self, x: Tensor) -> Tensor:
        """`x` decayed by the gates up to the chunk's end."""
        return x * self.gates.write

    def of_group(self, x: Tensor) -> Tensor:
        """The gradient of queries or keys that `n` heads of values share: the sum over these heads."""
        return x.sum(2, True) if x.shape[2] > 1 else x

    def pass_states(self, passing: StatePassing, added: Tensor, decay: Tensor) -> Tensor:
        """``S <- decay S + added`` over the chunks: the state before each."""
        added_, decay_ = (
            x.expand(*self.v.shape[:4], *x.shape[-2:]).flatten(1, 2).unbind(2) for x in (added, decay)
        )
        S = passing.over(self.chunks.at, lambda i, S: torch.addcmul(added_[i], S, decay_[i]))
        return S.unflatten(1, self.v.shape[1:3])

    def solve_states(
        self,
        passing: StatePassing,
        added: Tensor | None,
        decay: Tensor,
        Y: Tensor,
        x: Tensor,
        reads: Tensor,
        writes: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``S <- decay S + added + writes^T y`` over the chunks, ``y = Y (x + reads S)``: S before each, and y."""
        shape = self.v.shape[:4]

        def by_chunk(z: Tensor) -> tuple[Tensor, ...]:
            return z.expand(*shape, *z.shape[-2:]).flatten(0, 2).unbind(1)

        decays, Ys, xs, each_reads, each_writes = map(by_chunk, (decay, Y, x, reads, writes.mT))
        each_added = None if added is None else by_chunk(added)
        y = list(xs)  # replaced chunk by chunk, in either direction of time

        def step(i: int, S: Tensor) -> Tensor:
            batch, S = S.shape[:2], S.flatten(0, 1)
            y[i] = torch.bmm(Ys[i], torch.baddbmm(xs[i], each_reads[i], S))
            S = S * decays[i] if each_added is None else torch.addcmul(each_added[i], S, decays[i])
            return torch.baddbmm(S, each_writes[i], y[i]).unflatten(0, batch)

        S = passing.over(self.chunks.at, step).unflatten(1, shape[1:3])
        return S, torch.stack(y, 1).unflatten(0, shape[:3])
