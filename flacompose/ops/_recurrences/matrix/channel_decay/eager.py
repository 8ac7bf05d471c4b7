"""Chunked PyTorch of channel decay, for every device without a Triton kernel.

    S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T        o_t = scale * S_t^T q_t

or, with the bonus `u` of the current token, ``o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T q_t``.

`_sweep` passes the state from chunk to chunk. Within a chunk every pair of tokens ``t > s`` has the weight
``exp(g_{s+1} + ... + g_t)`` (`_pair`), split into two factors at a boundary between ``s`` and ``t``: both
exponents are sums of gates, never a difference of cumulative sums, so nothing overflows or cancels, and a
gate of -inf is a weight of 0. The chunk is halved, and halved again; the boundary is the first that separates
``s`` and ``t``: at level ``b`` the odd blocks of ``b`` tokens read the writes of the even blocks before them.
The pair of a token with itself is not decayed, and weighted by the bonus if there is one: then a read stops
before its own gate. Everything is functional and differentiable to any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.chunks import Chunks
from flacompose.ops._recurrences.matrix.inputs import Inputs


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    (q, k, v), u = inputs[:3], inputs.u
    chunks = Chunks(q, inputs.cu_seqlens)
    if inputs.softmax:
        q = q.softmax(-1, dtype=chunks.dtype)
    q_, k_, v_ = chunks.split(q) * inputs.scale, chunks.split(k), chunks.split(v)
    gate_k, gate_v = _gates(chunks, inputs)

    S, final_state = _sweep(chunks, k_, v_, gate_k, gate_v, inputs.initial_state)
    o = _read(_read(q_, gate_k) @ S, gate_v)
    diagonal = _dot(q_, _times(k_, _bonus(u, k_)))
    o = chunks.join(o + _pair(q_, k_, diagonal, v_, None, gate_k, gate_v).read)
    return o if inputs.full_precision else o.to(v.dtype), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, wants = call.inputs, call.wants
    (q, k, v), scale = inputs[:3], inputs.scale
    chunks = Chunks(q, inputs.cu_seqlens)
    if inputs.softmax:
        q = q.softmax(-1, dtype=chunks.dtype)
    q_, k_, v_, do_ = chunks.split(q) * scale, chunks.split(k), chunks.split(v), chunks.split(call.do)
    gate_k, gate_v = _gates(chunks, inputs)
    bonus, diagonal = _bonus(inputs.u, k_), _dot(do_, v_)

    # Through other chunks: S is the state before each chunk, dS the gradient of the state after it. Within a
    # chunk, by exchange of roles: dq, dk and dgk along the key axis, dv and dgv along the value axis.
    along_k, along_v = wants("q", "k", "gk"), wants("v", "gv")
    if wants("q", "gk", "gv"):
        S, _ = _sweep(chunks, k_, v_, gate_k, gate_v, inputs.initial_state)
    if wants("k", "gk", "v", "gv", "initial_state"):
        dS, d_initial_state = _sweep(chunks, q_, do_, gate_k, gate_v, call.arriving.final_state, reverse=True)
    if along_k:
        pairs_k = _pair(do_, v_, _times(diagonal, bonus), k_, q_, gate_v, gate_k)
    if along_v:
        pairs_v = _pair(q_, k_, _dot(q_, _times(k_, bonus)), v_, do_, gate_k, gate_v)
    if wants("q", "gk"):
        dq = _read(_read(do_, gate_v) @ S.mT, gate_k)
    if wants("k", "gk"):
        dk = _write(_write(v_, gate_v) @ dS.mT, gate_k)
    if along_v:
        dv = _write(_write(k_, gate_k) @ dS, gate_v)

    def of_q() -> Tensor:
        d_read = chunks.join((dq + pairs_k.read) * scale)
        if not inputs.softmax:
            return d_read
        d_read = d_read.to(q.dtype)
        return q * (d_read - (q * d_read).sum(-1, keepdim=True))

    def of_gk() -> Tensor:
        assert gate_k is not None
        total = (_decay(S, gate_k, gate_v) * dS).sum(-1)[..., None, :]
        return chunks.join(gate_k.gradient(pairs_k.exponents, q_ * dq, k_ * dk, total))

    def of_gv() -> Tensor:
        assert gate_v is not None
        o = _read(_read(q_, gate_k) @ S, gate_v)
        total = (_decay(S, gate_k, gate_v) * dS).sum(-2)[..., None, :]
        return chunks.join(gate_v.gradient(pairs_v.exponents, do_ * o, v_ * dv, total))

    return call.made(
        q=of_q,
        k=lambda: chunks.join(dk + pairs_k.write),
        v=lambda: chunks.join(dv + pairs_v.write),
        gk=of_gk,
        gv=of_gv,
        u=lambda: (diagonal * q_ * k_).sum((0, 2, 3)),
        initial_state=lambda: d_initial_state,
    )


class Gate:
    """The decays within one chunk, each the exponential of a sum of gates ``g [..., C, D]``.

    `read` is the decay from the chunk's start to a token, `write` from a token to the chunk's end, and
    `total` that of the chunk. `levels` are, for blocks of 1, 2, 4, ... tokens, the weights of the odd blocks
    (from their start) and of the even ones (to their end).
    """

    def __init__(self, g: Tensor, read_before: bool) -> None:
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
        self.read, self.write, self.total = (x.squeeze(-3).exp() for x in (read, write, total))

    def gradient(
        self, levels: list[tuple[Tensor, Tensor]], read: Tensor, write: Tensor, total: Tensor
    ) -> Tensor:
        """The gradient of ``g`` from those of all its sums: the constructor, transposed."""
        read, write, total = (x.unsqueeze(-3) for x in (read, write, total))
        for level_read, level_write in reversed(levels):
            (read_0, read_1), (write_0, write_1) = read.chunk(2, -2), write.chunk(2, -2)
            total = _unhalve(total + read_1.sum(-2, keepdim=True), total + write_0.sum(-2, keepdim=True))
            read = _unhalve(read_0, read_1 + level_read)
            write = _unhalve(write_0 + level_write, write_1)
        g = total if self.read_before else total + read
        return g.squeeze(-2)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd blocks of ``[..., C / b, b, D]``.

    Of four tokens in blocks of one:

    >>> [x.flatten().tolist() for x in halves(torch.arange(4).view(4, 1, 1))]
    [[0, 2], [1, 3]]
    """
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _unhalve(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack([even, odd], -3).flatten(-4, -3)


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _gates(chunks: Chunks, inputs: Inputs) -> tuple[Gate | None, Gate | None]:
    """The decays of the key axis and of the value axis. With a bonus, a read stops before its own gate."""
    before = inputs.u is not None
    gk, gv = (None if g is None else Gate(chunks.split(g), before) for g in (inputs.gk, inputs.gv))
    return gk, gv


def _bonus(u: Tensor | None, x: Tensor) -> Tensor | None:
    """``u [H, K]`` as a factor of ``x [B, H, R, C, K]``."""
    return None if u is None else u.to(x.dtype)[:, None, None]


def _read(x: Tensor, gate: Gate | None) -> Tensor:
    return x if gate is None else x * gate.read


def _write(x: Tensor, gate: Gate | None) -> Tensor:
    return x if gate is None else x * gate.write


def _decay(S: Tensor, gate_k: Gate | None, gate_v: Gate | None) -> Tensor:
    S = S if gate_k is None else S * gate_k.total.mT
    return S if gate_v is None else S * gate_v.total


def _sweep(
    chunks: Chunks,
    a: Tensor,
    x: Tensor,
    gate_k: Gate | None,
    gate_v: Gate | None,
    start: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The states of ``a^T x``, decayed by both gates, in the form of `Chunks.decaying_sweep`."""
    weigh = _read if reverse else _write
    decays = [] if gate_k is None else [gate_k.total.mT]
    decays += [] if gate_v is None else [gate_v.total]
    return chunks.decaying_sweep(weigh(a, gate_k).mT @ weigh(x, gate_v), decays, start, reverse)


class _Pairs(NamedTuple):
    read: Tensor  # sum over s <= t of P[t, s] x_s
    write: Tensor  # its transpose, sum over t >= s of P[t, s] y_t; empty without y
    exponents: list[tuple[Tensor, Tensor]]  # by level, the gradients of the outer gate's exponents


def _pair(
    a: Tensor,
    b: Tensor,
    diagonal: Tensor,
    x: Tensor,
    y: Tensor | None,
    inner: Gate | None,
    outer: Gate | None,
) -> _Pairs:
    """All pairs of a chunk: ``P[t, s] = a_t . b_s``, decayed by `inner`, with x_s, y_t, by `outer`.

    ``P[t, t]`` is `diagonal`, which may differ between the elements of x and y.
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
    return _Pairs(read.squeeze(-3), write.squeeze(-3), exponents)
