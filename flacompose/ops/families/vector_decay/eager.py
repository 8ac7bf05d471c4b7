"""Chunked PyTorch for vector decay: what every device without a Triton kernel runs.

    S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T        o_t = scale * S_t^T q_t

Between chunks the state is swept (`_sweep`). Within a chunk every pair of tokens ``t > s`` meets with the weight
``exp(g_{s+1} + ... + g_t)`` (`_pair`), split in two factors at a boundary between ``s`` and ``t``: both exponents are
sums of gates, never a difference of cumulative sums, so nothing overflows or cancels, and a gate of -inf is a weight
of 0. The boundary is the one at which ``s`` and ``t`` part when the chunk is halved, and halved again: at level ``b``
the odd blocks of ``b`` tokens read what the even blocks before them wrote. A token meets itself undecayed, with the
bonus `u` where there is one: then a read stops before its own gate. With `softmax`, `q` are logits of what reads.

Everything is functional, differentiable PyTorch, so derivatives of any order exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flacompose.ops.families._chunks import Chunks


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    softmax: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    chunks = Chunks(q, cu_seqlens)
    if softmax:
        q = q.softmax(-1, dtype=chunks.dtype)
    q_, k_, v_ = chunks.split(q) * scale, chunks.split(k), chunks.split(v)
    gate_k, gate_v = (None if g is None else _Gate(chunks.split(g), u is not None) for g in (gk, gv))

    S, final_state = _sweep(chunks, k_, v_, gate_k, gate_v, initial_state)
    o = _read(_read(q_, gate_k) @ S, gate_v)
    own = _dot(q_, _times(k_, _bonus(u, k_)))
    o = o + _pair(q_, k_, own, v_, None, gate_k, gate_v).read
    o = chunks.join(o)
    return o if wide else o.to(v.dtype), final_state


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    softmax: bool,
    wide: bool,
    do: Tensor | None,
    d_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dgk, dgv, du, d_initial_state)``, empty for inputs that are absent."""
    chunks = Chunks(q, cu_seqlens)
    do = torch.zeros_like(v) if do is None else do
    logits = q
    if softmax:
        q = q.softmax(-1, dtype=chunks.dtype)
    q_, k_, v_, do_ = chunks.split(q) * scale, chunks.split(k), chunks.split(v), chunks.split(do)
    gate_k, gate_v = (None if g is None else _Gate(chunks.split(g), u is not None) for g in (gk, gv))

    # From other chunks: S is what they wrote before this one, dS the gradient of what they read after it.
    S, _ = _sweep(chunks, k_, v_, gate_k, gate_v, initial_state)
    dS, d_initial_state = _sweep(chunks, q_, do_, gate_k, gate_v, d_final_state, reverse=True)
    dq = _read(_read(do_, gate_v) @ S.mT, gate_k)
    dk = _write(_write(v_, gate_v) @ dS.mT, gate_k)
    dv = _write(_write(k_, gate_k) @ dS, gate_v)
    through = _decay(S, gate_k, gate_v) * dS

    # From this chunk, by exchange of roles: dq, dk and dgk along the key axis, dv and dgv along the value axis.
    bonus, own = _bonus(u, k_), _dot(do_, v_)
    along_k = _pair(do_, v_, _times(own, bonus), k_, q_, gate_v, gate_k)
    along_v = _pair(q_, k_, _dot(q_, _times(k_, bonus)), v_, do_, gate_k, gate_v)
    dgk = dgv = None
    if gate_k is not None:
        dgk = gate_k.gradient(along_k.exponents, q_ * dq, k_ * dk, through.sum(-1)[..., None, :])
    if gate_v is not None:
        o = _read(_read(q_, gate_k) @ S, gate_v)
        dgv = gate_v.gradient(along_v.exponents, do_ * o, v_ * dv, through.sum(-2)[..., None, :])

    def grad(x: Tensor | None, dx: Tensor | None) -> Tensor:
        return logits.new_empty(0) if x is None or dx is None else chunks.join(dx).to(x.dtype)

    dq = grad(q, (dq + along_k.read) * scale)
    if softmax:
        dq = (q * (dq - (q * dq).sum(-1, keepdim=True))).to(logits.dtype)
    return (
        dq,
        grad(k, dk + along_k.write),
        grad(v, dv + along_v.write),
        grad(gk, dgk),
        grad(gv, dgv),
        logits.new_empty(0) if u is None else (own * q_ * k_).sum((0, 2, 3)).to(u.dtype),
        logits.new_empty(0) if initial_state is None else d_initial_state.to(initial_state.dtype),
    )


class _Gate:
    """The decays within one chunk, each the exponential of a sum of gates ``g [..., C, D]``.

    `read` and `write` join a token to the chunk's start and end, `total` those two; `levels` holds, for blocks of
    1, 2, 4, ... tokens, the weights of the odd blocks (from their start) and of the even ones (to their end).
    """

    def __init__(self, g: Tensor, read_before: bool) -> None:
        self.read_before = read_before
        g = g.unsqueeze(-2)  # [..., C / b, b, D] with b = 1
        read, write, total = (torch.zeros_like(g) if read_before else g), torch.zeros_like(g), g
        self.levels: list[tuple[Tensor, Tensor]] = []
        while read.shape[-3] > 1:
            (read_0, read_1), (write_0, write_1), (total_0, total_1) = map(_halves, (read, write, total))
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


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd blocks of ``[..., C / b, b, D]``."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _unhalve(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack([even, odd], -3).flatten(-4, -3)


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _bonus(u: Tensor | None, x: Tensor) -> Tensor | None:
    """``u [H, K]`` as a factor of ``x [B, H, R, C, K]``."""
    return None if u is None else u.to(x.dtype)[:, None, None]


def _read(x: Tensor, gate: _Gate | None) -> Tensor:
    return x if gate is None else x * gate.read


def _write(x: Tensor, gate: _Gate | None) -> Tensor:
    return x if gate is None else x * gate.write


def _decay(S: Tensor, gate_k: _Gate | None, gate_v: _Gate | None) -> Tensor:
    S = S if gate_k is None else S * gate_k.total.mT
    return S if gate_v is None else S * gate_v.total


def _sweep(
    chunks: Chunks,
    a: Tensor,
    x: Tensor,
    gate_k: _Gate | None,
    gate_v: _Gate | None,
    start: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The states of ``a^T x``, decayed by both gates, as `Chunks.sweep` returns them."""
    weigh = _read if reverse else _write
    decays = [] if gate_k is None else [gate_k.total.mT]
    decays += [] if gate_v is None else [gate_v.total]
    return chunks.sweep(weigh(a, gate_k).mT @ weigh(x, gate_v), decays, start, reverse)


class _Pairs(NamedTuple):
    read: Tensor  # sum over s <= t of P[t, s] x_s
    write: Tensor  # its transpose, sum over t >= s of P[t, s] y_t; empty without y
    exponents: list[tuple[Tensor, Tensor]]  # by level, the gradients of the outer gate's exponents


def _pair(
    a: Tensor,
    b: Tensor,
    own: Tensor,
    x: Tensor,
    y: Tensor | None,
    inner: _Gate | None,
    outer: _Gate | None,
) -> _Pairs:
    """All pairs of one chunk: ``P[t, s] = a_t . b_s``, decayed by `inner`, joins x_s to y_t, decayed by `outer`.

    ``P[t, t]`` is `own`, which may differ from one element of x and y to the next.
    """
    a, b, own, x = (z.unsqueeze(-2) for z in (a, b, own, x))  # [..., C / b, b, D] with b = 1
    read, write = own * x, a.new_empty(1, 1, 0)
    exponents: list[tuple[Tensor, Tensor]] = []
    if y is not None:
        y = y.unsqueeze(-2)
        write = own * y
    level = 0
    while a.shape[-3] > 1:
        (_, a_1), (b_0, _), (x_0, x_1) = map(_halves, (a, b, x))
        if inner is not None:
            a_1, b_0 = a_1 * inner.levels[level][0], b_0 * inner.levels[level][1]
        odd, even = (None, None) if outer is None else outer.levels[level]
        P = a_1 @ b_0.mT
        read_1 = _times(P @ _times(x_0, even), odd)
        read = torch.cat([_halves(read)[0], _halves(read)[1] + read_1], -2)
        if y is not None:
            y_0, y_1 = _halves(y)
            write_0 = _times(P.mT @ _times(y_1, odd), even)
            write = torch.cat([_halves(write)[0] + write_0, _halves(write)[1]], -2)
            exponents.append((y_1 * read_1, x_0 * write_0))
            y = y.flatten(-3, -2).unflatten(-2, (-1, 2 * y.shape[-2]))
        a, b, x = (z.flatten(-3, -2).unflatten(-2, (-1, 2 * z.shape[-2])) for z in (a, b, x))
        level += 1
    return _Pairs(read.squeeze(-3), write.squeeze(-3), exponents)
