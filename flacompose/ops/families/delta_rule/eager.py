"""Chunked PyTorch for the delta rule: what every device without a Triton kernel runs.

    S' = diag(exp g_t) S_{t-1}      u_t = beta_t (v_t - S'^T k_t)      S_t = S' + k_t u_t^T      o_t = scale * S_t^T q_t

Given ``u``, this is linear attention with the values ``u``. Within a chunk that begins with the state S, the tokens'
equations are one triangular system, ``(I + diag(beta) A) u = diag(beta) (v - k_read S)``, where ``A[t, s]`` is the
product of the keys of tokens ``s < t``, decayed by the gates between them, and `k_read` the keys decayed by the gates
since the chunk's start. Its solution ``U - W S`` is linear in S, so a chunk takes S to ``M S + k_write^T U``. Here `M`
is the product of the transitions ``(I - beta_t k_t k_t^T) diag(exp g_t)``, and the sweep takes one matrix product for
each chunk.

Backwards in time the gradient of u obeys the transposed equations, and dv is their solution. The gradients of the rest
are those of two reads from linear attention: of the queries, with the gradient do, and of the keys, with -dv.

Everything is functional, differentiable PyTorch, so derivatives of any order exist. Heads of values that share one of
queries and keys are a dimension ``n`` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._define import tree_map
from flacompose.ops._dtype import upcast
from flacompose.ops.families._chunks import Chunks, gradients
from flacompose.ops.families.delta_rule.inputs import Inputs
from flacompose.ops.families.scalar_decay.eager import Decay
from flacompose.ops.families.vector_decay.eager import Gate, halves


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
        return _token(inputs)
    rule = _Rule(inputs)
    S, final_state = rule.states(inputs.initial_state)
    o = rule.read(rule.q) @ S + rule.P @ rule.written(S)
    return rule.join(o).to(inputs.v.dtype), final_state


def _token(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`forward` of one token: the recurrence itself."""
    q, k, v, beta, g, gk, initial_state, _, scale = inputs
    q_, k_, v_ = (upcast(x[:, 0]) for x in (q, k, v))  # [B, H, D]
    beta_ = beta[:, 0, :, None].to(v_.dtype)
    HV = v.shape[2]
    q_, k_ = (x.repeat_interleave(HV // x.shape[1], 1).unsqueeze(-2) for x in (q_, k_))  # [B, HV, 1, K]
    u, S = v_, torch.zeros((), dtype=q_.dtype, device=q.device)
    if initial_state is not None:
        S = initial_state.to(q_.dtype)
        for gate in (None if g is None else g.unsqueeze(-1), gk):
            if gate is not None:
                S = S * gate[:, 0].to(S.dtype).exp().unsqueeze(-1)
        u = u - (k_ @ S).squeeze(-2)
    S = S + k_.mT * (beta_ * u).unsqueeze(-2)
    o = (q_ * scale @ S).squeeze(-2)
    return o.unsqueeze(1).to(v.dtype, copy=True), S.contiguous()  # an op returns no view


def backward(
    inputs: Inputs, do: Tensor | None, d_final_state: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, dbeta, dg, dgk, d_initial_state)``, empty where `output_mask` is False or the input is absent."""
    q, k, v, beta, g, gk, initial_state, _, scale = inputs
    want_q, want_k, want_v, want_beta, want_g, want_gk, want_state = output_mask
    gates_wanted = (want_g and g is not None) or (want_gk and gk is not None)
    rule = _Rule(inputs)
    do_ = rule.split(torch.zeros_like(v) if do is None else do)

    if want_q or want_k or want_beta or gates_wanted:
        S, _ = rule.states(initial_state)
        u = rule.written(S)
    if want_k or want_v or want_beta or want_state or gates_wanted:
        dS, d_initial_state = rule.gradients_of_states(do_, d_final_state)
        du = rule.P.mT @ do_ + rule.write(rule.k) @ dS
        solved = torch.linalg.solve_triangular(rule.system.mT, du, upper=True, unitriangular=True)
        dv = rule.beta * solved
    if want_q or want_k or gates_wanted:
        # The state is read by queries, with the gradient do, and by keys, before they write, with -dv.
        dq = rule.read(do_ @ S.mT)
        of_q = _pair_gradient(rule.q, rule.k, rule.P, (do_ @ u.mT).tril(), rule.gate)
    if want_k or gates_wanted:
        dk_read, dk_write = -rule.read(dv @ S.mT), rule.write(u @ dS.mT)
        of_k = _pair_gradient(rule.k, rule.k, rule.A, -(dv @ u.mT).tril(-1), rule.gate)
    if gates_wanted:
        reads, writes = rule.q * dq + rule.k * dk_read, rule.k * dk_write
        total = (rule.gate.total.mT * S * dS).sum(-1).unsqueeze(-2)
        if rule.gate.total.shape[-1] != k.shape[-1]:
            reads, writes, total = (x.sum(-1, keepdim=True) for x in (reads, writes, total))
        exponents = tree_map(torch.add, of_q.exponents, of_k.exponents)
        d_gates = rule.join(rule.gate.gradient(exponents, reads, writes, total))

    return gradients(
        inputs,
        output_mask,
        lambda: rule.join((dq + of_q.a).sum(2, True)) * scale,
        lambda: rule.join((dk_read + dk_write + of_q.b + of_k.a + of_k.b).sum(2, True)),
        lambda: rule.join(dv),
        lambda: rule.join((solved * rule.errors(S, u)).sum(-1, True)).squeeze(-1),
        lambda: d_gates.sum(-1),
        lambda: d_gates,
        lambda: d_initial_state,
    )


class _Rule:
    """The tokens of one call in chunks, ``[B, H, n, R, C, D]``, and what each chunk does to a state."""

    def __init__(self, inputs: Inputs) -> None:
        q, k, v, beta, g, gk, _, cu_seqlens, scale = inputs
        self.chunks, self.H = Chunks(q, cu_seqlens), q.shape[2]
        self.q, self.k, self.v = self.split(q) * scale, self.split(k), self.split(v)
        self.beta = self.split(beta.unsqueeze(-1))
        self.gate: Gate | Decay
        if gk is None:
            self.gate = Decay(self.chunks, q, g, None)
        else:
            gk = gk.to(self.chunks.dtype)
            self.gate = Gate(self.split(gk if g is None else gk + g.unsqueeze(-1)), read_before=False)

        self.P, self.A = _pair(self.q, self.k, self.gate), _pair(self.k, self.k, self.gate).tril(-1)
        eye = torch.eye(self.chunks.size, dtype=self.A.dtype, device=q.device)
        self.system = eye + self.beta * self.A
        # Solved by substitution, whose error hardly grows where keys are alike; a power series would lose all digits.
        known = self.beta * torch.cat([self.read(self.k).expand(*self.v.shape[:-1], -1), self.v], -1)
        solved = torch.linalg.solve_triangular(self.system, known, upper=False, unitriangular=True)
        self.W, self.U = solved.split([k.shape[-1], v.shape[-1]], -1)
        eye = torch.eye(k.shape[-1], dtype=self.A.dtype, device=q.device)
        self.M = eye * self.gate.total - self.write(self.k).mT @ self.W

    def split(self, x: Tensor) -> Tensor:
        return self.chunks.split(x).unflatten(1, (self.H, -1))

    def join(self, x: Tensor) -> Tensor:
        return self.chunks.join(x.flatten(1, 2))

    def read(self, x: Tensor) -> Tensor:
        return x * self.gate.read

    def write(self, x: Tensor) -> Tensor:
        return x * self.gate.write

    def written(self, S: Tensor) -> Tensor:
        """``u``, what the tokens write, from the states before the chunks."""
        return self.U - self.W @ S

    def errors(self, S: Tensor, u: Tensor) -> Tensor:
        """``v_t - S'^T k_t``: what each value differs by from the one that its key had."""
        return self.v - self.read(self.k) @ S - self.A @ u

    def states(self, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state before each chunk, and after the last of each sequence, ``[N, HV, K, V]``."""
        return self._sweep(self.M, self.write(self.k).mT @ self.U, start)

    def gradients_of_states(self, do: Tensor, end: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradient of the state after each chunk, and of that before the first of each sequence."""
        return self._sweep(self.M.mT, (self.read(self.q) - self.P @ self.W).mT @ do, end, reverse=True)

    def _sweep(
        self, M: Tensor, added: Tensor, start: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        n = added.shape[2]
        M, added = M.expand(*added.shape[:4], -1, -1).flatten(1, 2), added.flatten(1, 2)
        _, HV, R, K, V = added.shape
        start = added.new_zeros(self.chunks.N, HV, K, V) if start is None else start.to(added.dtype)
        S, end = self.chunks.sweep(lambda i, S: M[:, :, i] @ S + added[:, :, i], R, start, reverse)
        return S.unflatten(1, (-1, n)), end


def _pair(a: Tensor, b: Tensor, gate: Gate | Decay) -> Tensor:
    """``P[t, s] = a_t . b_s`` for ``s <= t``, decayed by the gates ``s + 1`` to ``t``; ``a`` and ``b [..., C, K]``.

    Gates of channels take part in the products: the two blocks of the next size have between them the products of the
    later one's `a` and the earlier one's `b`, both decayed to the boundary. These are sums of gates, never a difference
    of two, so that nothing overflows or cancels.
    """
    if isinstance(gate, Decay):
        return (a @ b.mT).tril() * gate.pair
    P = (a * b).sum(-1, keepdim=True).unsqueeze(-1)  # [..., C / b, b, b] with b = 1
    for level, (read, write) in enumerate(gate.levels):
        a_1, b_0 = halves(_blocks(a, level))[1] * read, halves(_blocks(b, level))[0] * write
        between = a_1 @ b_0.mT
        P_0, P_1 = (x.expand_as(between) for x in halves(P))
        P = torch.cat([torch.cat([P_0, torch.zeros_like(P_0)], -1), torch.cat([between, P_1], -1)], -2)
    return P.squeeze(-3)


class _PairGradient(NamedTuple):
    a: Tensor
    b: Tensor
    exponents: Any  # those of the gates, as `gate.gradient` takes them


def _pair_gradient(a: Tensor, b: Tensor, P: Tensor, dP: Tensor, gate: Gate | Decay) -> _PairGradient:
    """The gradients from that of ``P = _pair(a, b, gate)``."""
    if isinstance(gate, Decay):
        exponents, dP = dP * P, dP * gate.pair
        return _PairGradient(dP @ b, dP.mT @ a, exponents)
    itself = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    da, db, levels = itself * b, itself * a, []
    for level, (read, write) in enumerate(gate.levels):
        a_1, b_0 = halves(_blocks(a, level))[1] * read, halves(_blocks(b, level))[0] * write
        size = 1 << level
        blocks = dP.unflatten(-2, (-1, 2 * size)).unflatten(-1, (-1, 2 * size))
        between = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
        d_read, d_write = between @ b_0, between.mT @ a_1
        levels.append((a_1 * d_read, b_0 * d_write))
        zero = torch.zeros_like(d_write)
        da = da + torch.stack([zero, d_read * read], -3).flatten(-4, -2)
        db = db + torch.stack([d_write * write, zero], -3).flatten(-4, -2)
    return _PairGradient(da, db, levels)


def _blocks(x: Tensor, level: int) -> Tensor:
    """``[..., C, D]`` as blocks of ``2 ** level`` tokens."""
    return x.unflatten(-2, (-1, 1 << level))
