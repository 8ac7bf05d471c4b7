"""Channel decay in one block of chunks, in PyTorch, for every device without a Triton kernel.

    S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T        o_t = scale * S_t^T q_t

or, with the bonus `u` of the current token, ``o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T q_t``.

The pairs of tokens in a chunk are decayed for each key and each value, so they are summed block by block, with
the factors of `ChannelGates` for both axes. No gate decays the pair of a token with itself. If there is a bonus,
it weights this pair, and a read stops before its own gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.matrix.cache_block import CacheBlock, ChannelGates, Wants, halves
from flacompose.ops._recurrences.matrix.inputs import Inputs


class ChannelDecay(CacheBlock):
    """The tokens of a cache block."""

    of_states = ("q", "gk", "gv")

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        super().__init__(inputs, chunks)
        if inputs.softmax:
            self.p = self.split(inputs.q).softmax(-1)
            self.q = self.p * inputs.scale
        before, u = inputs.u is not None, inputs.u
        gk, gv = (None if g is None else ChannelGates(self.split(g), before) for g in (inputs.gk, inputs.gv))
        self.gk, self.gv = gk, gv
        decay = self.q.new_ones(1, 1) if gk is None else gk.chunk_decay.mT
        self.chunk_decay = decay if gv is None else decay * gv.chunk_decay  # of the state
        self.u = None if u is None else u.to(chunks.dtype)[:, None, None, None]  # [H, 1, 1, 1, K]

    def compute_states(self, passing: StatePassing) -> tuple[Tensor, ...]:
        written = _write(self.k, self.gk).mT @ _write(self.v, self.gv)
        return (self.pass_states(passing, written, self.chunk_decay),)

    def compute_outputs(self, *states: Tensor) -> Tensor:
        diagonal = _dot(self.q, _times(self.k, self.u))
        of_chunk = _pair_sums(self.q, self.k, diagonal, self.v, None, self.gk, self.gv)
        return self.past(*states) + of_chunk.read

    def past(self, S: Tensor) -> Tensor:
        """The reads of the state before the chunk."""
        return _read(_read(self.q, self.gk) @ S, self.gv)

    def compute_gradients(
        self, wants: Wants, do: Tensor, states: tuple[Tensor, ...], backwards: StatePassing
    ) -> dict[str, Tensor]:
        q, k, v, gk, gv, u = self.q, self.k, self.v, self.gk, self.gv, self.u
        made, diagonal = {}, _dot(do, v)
        # Through other chunks: S is the state before each chunk, dS the gradient of the state after it. Within a
        # chunk, by exchange of roles: dq, dk and dgk along the key axis, dv and dgv along the value axis.
        if wants("q", "gk", "gv"):
            (S,) = states
        if wants("k", "gk", "v", "gv", "initial_state"):
            dS = self.pass_states(backwards, _read(q, gk).mT @ _read(do, gv), self.chunk_decay)
        if wants("gk", "gv"):
            d_chunk_decay = S * self.chunk_decay * dS
        if wants("q", "k", "gk"):
            pairs = _pair_sums(do, v, _times(diagonal, u), k, q, gv, gk)
        if wants("q", "gk"):
            dq = _read(_read(do, gv) @ S.mT, gk)
        if wants("k", "gk"):
            dk = _write(_write(v, gv) @ dS.mT, gk)
        if wants("q"):
            made["q"] = (dq + pairs.read) * self.inputs.scale
            if self.inputs.softmax:
                made["q"] = self.p * (made["q"] - _dot(self.p, made["q"]))
        if wants("k"):
            made["k"] = dk + pairs.write
        if gk is not None and wants("gk"):
            made["gk"] = gk.gradient(pairs.exponents, q * dq, k * dk, d_chunk_decay.sum(-1).unsqueeze(-2))
        if wants("u"):
            made["u"] = diagonal * q * k
        if wants("v", "gv"):
            pairs = _pair_sums(q, k, _dot(q, _times(k, u)), v, do, gk, gv)
            dv = _write(_write(k, gk) @ dS, gv)
        if wants("v"):
            made["v"] = dv + pairs.write
        if gv is not None and wants("gv"):
            reads = do * self.past(S)
            made["gv"] = gv.gradient(pairs.exponents, reads, v * dv, d_chunk_decay.sum(-2).unsqueeze(-2))
        return made


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _read(x: Tensor, gates: ChannelGates | None) -> Tensor:
    return x if gates is None else x * gates.read


def _write(x: Tensor, gates: ChannelGates | None) -> Tensor:
    return x if gates is None else x * gates.write


class _PairSums(NamedTuple):
    read: Tensor  # sum over s <= t of P[t, s] x_s
    write: Tensor  # its transpose, sum over t >= s of P[t, s] y_t; empty without y
    exponents: list[tuple[Tensor, Tensor]]  # by level, the gradients of the outer gates' exponents


def _pair_sums(
    a: Tensor,
    b: Tensor,
    diagonal: Tensor,
    x: Tensor,
    y: Tensor | None,
    inner: ChannelGates | None,
    outer: ChannelGates | None,
) -> _PairSums:
    """All pairs of a chunk: ``P[t, s] = a_t . b_s``, decayed by `inner`, with x_s, y_t, by `outer`.

    ``P[t, t]`` is `diagonal`, which may differ between the elements of x and y. At level ``b`` the odd blocks of
    ``b`` tokens read the writes of the even blocks before them.
    """
    a, b, diagonal, x = (z.unsqueeze(-2) for z in (a, b, diagonal, x))  # [..., C / b, b, D] with b = 1
    read, write = diagonal * x, a.new_empty(1, 1, 0)
    exponents: list[tuple[Tensor, Tensor]] = []
    if y is not None:
        y = y.unsqueeze(-2)
        write = diagonal * y
    level = 0
    while a.shape[-3] > 1:
        (_, a_1), (b_0, _), (x_0, x_1) = map(halves, (a, b, x))
        if inner is not None:
            a_1, b_0 = a_1 * inner.levels[level][0], b_0 * inner.levels[level][1]
        odd, even = (None, None) if outer is None else outer.levels[level]
        P = a_1 @ b_0.mT
        read_1 = _times(P @ _times(x_0, even), odd)
        read = torch.cat([halves(read)[0], halves(read)[1] + read_1], -2)
        if y is not None:
            y_0, y_1 = halves(y)
            write_0 = _times(P.mT @ _times(y_1, odd), even)
            write = torch.cat([halves(write)[0] + write_0, halves(write)[1]], -2)
            exponents.append((y_1 * read_1, x_0 * write_0))
            y = y.flatten(-3, -2).unflatten(-2, (-1, 2 * y.shape[-2]))
        a, b, x = (z.flatten(-3, -2).unflatten(-2, (-1, 2 * z.shape[-2])) for z in (a, b, x))
        level += 1
    return _PairSums(read.squeeze(-3), write.squeeze(-3), exponents)
