"""Chunked PyTorch for the delta rule: what every device without a Triton kernel runs.

    S' = diag(exp g_t) S_{t-1}      u_t = beta_t (v_t - S'^T a_t)      S_t = S' + k_t u_t^T      o_t = scale * S_t^T q_t

where `a` is the key, if it is not given.

Given ``u``, this is linear attention with the values ``u``. Within a chunk that begins with the state S, the tokens'
equations are one triangular system, ``(I + diag(beta) A) u = diag(beta) (v - k_read S)``, where ``A[t, s]`` is the
product of the reading key of token `t` and the writing one of ``s < t``, decayed by the gates between them, and
`k_read` the reading keys decayed by the gates since the chunk's start. With the inverse ``Y`` of the system, which does
not depend on S, a sweep over the chunks takes three products for each: ``k_read S``, ``u = Y diag(beta) (v - k_read
S)``, and ``k_write^T u``, which the state gains.

Backwards in time the gradient du obeys the transposed equations, ``Y^T`` solves them, and ``dv = beta * solved``. The
gradients of the rest are those of two reads from linear attention: of the queries, with the gradient do, and of the
keys, with -dv.

All is done segment by segment of a few chunks, whose tensors a cache holds. The backward goes forwards over the
segments, for the states, and then backwards.

Everything is functional, differentiable PyTorch, so derivatives of any order exist. Heads of values that share one of
queries and keys are a dimension ``n`` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose._torch import pytree
from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._chunks import Chunks, Sweep
from flacompose.ops.families._signature import BackwardCall, Gradients
from flacompose.ops.families._token import token
from flacompose.ops.families.delta_rule.inputs import Inputs
from flacompose.ops.families.scalar_decay.eager import Decay
from flacompose.ops.families.vector_decay.eager import Gate, halves

GATES = ("g", "gk")


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
        return token(**inputs._asdict(), delta_rule=True)
    chunks, segments = _cut(inputs)
    sweep = Sweep(chunks, _start(inputs, inputs.initial_state))
    outputs = []
    for segment in segments:
        rule = _Rule(inputs, segment)
        S, u = rule.states(sweep)
        outputs.append((rule.read(rule.q) @ S + rule.P @ u).to(inputs.v.dtype))
    # A state that is a view would be compiled for once more, beside those that are none.
    return _join(chunks, outputs), sweep.end().clone()


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, do = call.inputs, call.do
    chunks, segments = _cut(inputs)
    rules = [_Rule(inputs, segment) for segment in segments]

    written: list[tuple[Tensor, Tensor] | None] = [None] * len(rules)
    if call.wants("q", "k", "a", "beta", *GATES):
        forwards = Sweep(chunks, _start(inputs, inputs.initial_state))
        written = [rule.states(forwards) for rule in rules]
    backwards = Sweep(chunks, _start(inputs, call.arriving.final_state), reverse=True)
    made = [
        _segment_gradients(call, rule, do, states, backwards)
        for rule, states in zip(reversed(rules), reversed(written))
    ]
    dq, dk, dv, dbeta, d_gates, da = (x[::-1] for x in zip(*made))

    return call.made(
        q=lambda: _join(chunks, dq),
        k=lambda: _join(chunks, dk),
        v=lambda: _join(chunks, dv),
        beta=lambda: _join(chunks, dbeta).squeeze(-1),
        g=lambda: _join(chunks, d_gates).sum(-1),
        gk=lambda: _join(chunks, d_gates),
        a=lambda: _join(chunks, da),
        initial_state=backwards.end,
    )


def _segment_gradients(
    call: BackwardCall[Inputs],
    rule: _Rule,
    do: Tensor,
    written: tuple[Tensor, Tensor] | None,
    backwards: Sweep,
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, dbeta, d_gates, da)`` of a segment's chunks, those that are wanted."""
    wants, gates_wanted = call.wants, call.wants(*GATES)
    dq = dk = dv = dbeta = d_gates = da = do.new_empty(0)
    do = rule.split(do)
    if wants("k", "a", "v", "beta", "initial_state", *GATES):
        dS, solved = rule.gradients_of_states(do, backwards)
        dv = rule.beta * solved
    if written is not None:
        S, u = written
    if wants("beta"):
        dbeta = (solved * rule.errors(S, u)).sum(-1, True)
    # The state is read by queries, with the gradient do, and by `a`, before the keys write, with -dv.
    if wants("q", "k", "a", *GATES):
        dq_read = rule.read(do @ S.mT)
        of_q = _pair_gradient(rule.q, rule.k, rule.P, (do @ u.mT).tril(), rule.gate)
    if wants("k", "a", *GATES):
        minus_dv = -dv
        dk_read, dk_write = rule.read(minus_dv @ S.mT), rule.write(u @ dS.mT)
        of_k = _pair_gradient(rule.a, rule.k, rule.A, (minus_dv @ u.mT).tril(-1), rule.gate)
    if gates_wanted:
        reads, writes = rule.q * dq_read + rule.a * dk_read, rule.k * dk_write
        total = rule.gate.total * (S * dS).sum(-1).unsqueeze(-2)
        if rule.gate.total.shape[-1] != rule.k.shape[-1]:
            reads, writes, total = (x.sum(-1, keepdim=True) for x in (reads, writes, total))
        exponents = pytree.tree_map(torch.add, of_q.exponents, of_k.exponents)
        d_gates = rule.gate.gradient(exponents, reads, writes, total)
    if wants("q"):
        dq = rule.of_group(dq_read + of_q.a) * rule.scale
    if wants("k"):
        reads = dk_read + dk_write + of_q.b + of_k.a if call.inputs.a is None else dk_write + of_q.b
        dk = rule.of_group(reads + of_k.b)
    if wants("a"):
        da = rule.of_group(dk_read + of_k.a)
    return dq, dk, dv, dbeta, d_gates, da


def _cut(inputs: Inputs) -> tuple[Chunks, list[Chunks]]:
    """The chunks of all tokens, and of the segments."""
    chunks = Chunks(inputs.q, inputs.cu_seqlens)
    (B, _, HV, V), K = inputs.v.shape, inputs.q.shape[-1]
    return chunks, chunks.segments(B * HV * max(chunks.size * max(chunks.size, K, V), K * V))


def _join(chunks: Chunks, segments: Sequence[Tensor]) -> Tensor:
    """``[B, T, HV, D]`` from what lies in the chunks of segments, ``[B, H, n, R, C, D]``."""
    return chunks.join(*(x.flatten(1, 2) for x in segments))


def _start(inputs: Inputs, state: Tensor | None) -> Tensor:
    """A state ``[N, HV, K, V]``, zeros where there is none."""
    q, (*_, HV, V) = inputs.q, inputs.v.shape
    if state is None:
        N = sequence_count(q, inputs.cu_seqlens)
        return q.new_zeros(N, HV, q.shape[-1], V, dtype=state_dtype(q.dtype))
    return state.to(state_dtype(q.dtype))


class _Rule:
    """The tokens of a segment in chunks, ``[B, H, n, R, C, D]``, and what each chunk does to a state."""

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        q, k, v, beta, g, gk, a, _, _, self.scale = inputs
        self.chunks, self.heads, self._q = chunks, q.shape[2], q
        self.k, self.v, self.beta = self.split(k), self.split(v), self.split(beta.unsqueeze(-1))
        self.a = self.k if a is None else self.split(a)
        self.gate: Gate | Decay
        if gk is None:
            self.gate = Decay(chunks, q, g, None)
        else:
            gates = self.split(gk)
            self.gate = Gate(gates if g is None else gates + self.split(g.unsqueeze(-1)), read_before=False)
        self.A = _pair(self.a, self.k, self.gate, -1)
        self.Y = _inverse(self.beta * self.A)
        self.k_read, self.k_write = self.read(self.a), self.write(self.k)

    @cached_property
    def q(self) -> Tensor:
        return self.split(self._q) * self.scale

    @cached_property
    def P(self) -> Tensor:
        return _pair(self.q, self.k, self.gate)

    def split(self, x: Tensor) -> Tensor:
        return self.chunks.split(x).unflatten(1, (self.heads, -1))

    def read(self, x: Tensor) -> Tensor:
        return x * self.gate.read

    def write(self, x: Tensor) -> Tensor:
        return x * self.gate.write

    def of_group(self, x: Tensor) -> Tensor:
        """The gradient of queries or keys that `n` heads of values share: the sum over these heads."""
        return x.sum(2, True) if x.shape[2] > 1 else x

    def errors(self, S: Tensor, u: Tensor) -> Tensor:
        """``v_t - S'^T a_t``: what each value differs by from the one that is read in its place."""
        return self.v - self.k_read @ S - self.A @ u

    def states(self, sweep: Sweep) -> tuple[Tensor, Tensor]:
        """The state before each chunk, and ``u``, what the tokens write."""
        return self._sweep(sweep, self.Y, self.beta * self.v, -self.beta * self.k_read, self.k_write)

    def gradients_of_states(self, do: Tensor, sweep: Sweep) -> tuple[Tensor, Tensor]:
        """The gradient of the state after each chunk, and ``Y^T du``, which is ``dv / beta``."""
        x, added = self.P.mT @ do, self.read(self.q).mT @ do
        return self._sweep(sweep, self.Y.mT, x, self.k_write, -self.beta * self.k_read, added)

    def _sweep(
        self, sweep: Sweep, Y: Tensor, x: Tensor, reads: Tensor, writes: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``y = Y (x + reads S)`` and ``S <- decay S + writes^T y + added`` over the chunks: S before each, and y."""
        Y_, x_, reads_, writes_ = map(self._by_chunk, (Y, x, reads, writes.mT))
        decay = self._by_chunk(torch.atleast_2d(self.gate.total).mT)
        added_ = None if added is None else self._by_chunk(added)
        y = list(x_)

        def step(i: int, S: Tensor) -> Tensor:
            heads, S = S.shape[:2], S.flatten(0, 1)
            y[i] = torch.bmm(Y_[i], torch.baddbmm(x_[i], reads_[i], S))
            S = S * decay[i] if added_ is None else torch.addcmul(added_[i], S, decay[i])
            return torch.baddbmm(S, writes_[i], y[i]).unflatten(0, heads)

        S = sweep.over(self.chunks.at, step)
        return S.unflatten(1, self.v.shape[1:3]), torch.stack(y, 1).unflatten(0, self.v.shape[:3])

    def _by_chunk(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[B, H, n, R, ...]``, or broadcast to it, as one ``[B * HV, ...]`` for each chunk."""
        return x.expand(*self.v.shape[:4], *x.shape[-2:]).flatten(0, 2).unbind(1)


def _inverse(A: Tensor) -> Tensor:
    """``(I + A)^-1`` of ``A [..., C, C]``, which is 0 on and above the diagonal.

    By substitution within small blocks, whose error hardly grows where keys are alike; a power series would lose all
    digits. From the inverses of two blocks follows that of both.
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
    """``[..., b, b]`` of two neighbouring blocks, and of the later one with the earlier, as ``[..., 2b, 2b]``."""
    return torch.cat([torch.cat([x_0, torch.zeros_like(x_0)], -1), torch.cat([between, x_1], -1)], -2)


def _pair(a: Tensor, b: Tensor, gate: Gate | Decay, diagonal: int = 0) -> Tensor:
    """``P[t, s] = a_t . b_s`` for ``s <= t``, decayed by the gates ``s + 1`` to ``t``; ``a`` and ``b [..., C, K]``.

    With `diagonal` -1 only for ``s < t``.

    Gates of channels take part in the products: the two blocks of the next size have between them the products of the
    later one's `a` and the earlier one's `b`, both decayed to the boundary. These are sums of gates, never a difference
    of two, so that nothing overflows or cancels.
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


class _PairGradient(NamedTuple):
    a: Tensor
    b: Tensor
    exponents: Any  # those of the gates, as `gate.gradient` takes them


def _pair_gradient(a: Tensor, b: Tensor, P: Tensor, dP: Tensor, gate: Gate | Decay) -> _PairGradient:
    """The gradients from that of ``P = _pair(a, b, gate)``."""
    if isinstance(gate, Decay):
        exponents, dP = dP * P, dP * gate.pair
        return _PairGradient(dP @ b, dP.mT @ a, exponents)
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
    return _PairGradient(da, db, levels)


def _blocks(x: Tensor, level: int) -> Tensor:
    """``[..., C, D]`` as blocks of ``2 ** level`` tokens."""
    return x.unflatten(-2, (-1, 1 << level))
