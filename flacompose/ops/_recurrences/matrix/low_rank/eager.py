"""Chunked PyTorch of diagonal plus low rank, for every device without a Triton kernel.

    S' = diag(exp gk_t) S_{t-1}      u_t = S*^T a_t      S_t = S' + b_t u_t^T + k_t v_t^T      o_t = scale * S_t^T q_t

where S* is the state that `a` reads, before its decay or after it.

Given ``u``, this is linear attention with two keys per token. In a chunk that begins with the state S, ``u``
solves a triangular system, ``(I - A_ab) u = a_read S + A_ak v``, where ``A_ab[t, s]`` is the product of ``a``
of token `t` and ``b`` of ``s < t``, decayed by the gates between them, ``A_ak`` the same with the keys, and
`a_read` are the vectors ``a``, decayed by the gates since the chunk's start.

Backwards in time ``z``, the gradient of ``u``, obeys the transposed equations, where dS is the gradient of
the state after the chunk and the queries are scaled, ``(I - A_ab)^T z = A_qb^T do + b_write dS``. The state
then has two reads, by queries, with the gradient do, and by ``a``, with ``z``; and two writes, by ``b``, with
``u``, and by keys, with ``v``.

As in the delta rule, the tokens are processed in cache blocks, and everything is functional, differentiable
PyTorch.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from flacompose._torch import pytree
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.chunks import Chunks, Sweep
from flacompose.ops._recurrences.matrix.channel_decay.eager import Gate
from flacompose.ops._recurrences.matrix.delta_rule import row_split
from flacompose.ops._recurrences.matrix.delta_rule.factors import inverse, pair, pair_gradient
from flacompose.ops._recurrences.matrix.delta_rule.row_split import Segment
from flacompose.ops._recurrences.matrix.head_decay.eager import Decay
from flacompose.ops._recurrences.matrix.inputs import Inputs


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    return row_split.forward(inputs, _Rule)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    made, d_initial_state = row_split.gradients(call, _Rule, _segment_gradients, ("q", "a", "k", "b", "gk"))
    return call.made(**made, initial_state=d_initial_state)


def _segment_gradients(
    call: BackwardCall[Inputs],
    rule: _Rule,
    do: Tensor,
    written: tuple[Tensor, Tensor] | None,
    backwards: Sweep,
) -> dict[str, Tensor]:
    """The wanted gradients of a cache block's tokens, in chunks, by the names of the inputs."""
    wants, made = call.wants, {}
    if wants("a", "k", "v", "b", "gk", "initial_state"):
        dS, z = rule.gradients_of_states(do, backwards)
    if wants("v"):
        made["v"] = rule.A_qk.mT @ do + rule.A_ak.mT @ z + rule.write(rule.k) @ dS
    if written is None:
        return made
    # Two reads of the state, by queries, with the gradient do, and by `a`, with z; two writes, by `b` and by
    # keys.
    S, u = written
    dq_read = rule.read(do @ S.mT)
    of_qb = pair_gradient(rule.q, rule.b, rule.A_qb, (do @ u.mT).tril(), rule.gate)
    of_qk = pair_gradient(rule.q, rule.k, rule.A_qk, (do @ rule.v.mT).tril(), rule.gate)
    if wants("q"):
        made["q"] = (dq_read + of_qb.a + of_qk.a) * rule.scale
    if not wants("a", "k", "b", "gk"):
        return made
    da_read = rule.read_a(z @ S.mT)
    db_write, dk_write = rule.write(u @ dS.mT), rule.write(rule.v @ dS.mT)
    of_ab = pair_gradient(rule.a, rule.b, rule.A_ab, (z @ u.mT).tril(-1), rule.gate_a)
    of_ak = pair_gradient(rule.a, rule.k, rule.A_ak, (z @ rule.v.mT).tril(-1), rule.gate_a)
    gradients = {
        "a": da_read + of_ab.a + of_ak.a,
        "b": db_write + of_qb.b + of_ab.b,
        "k": dk_write + of_qk.b + of_ak.b,
    }
    if wants("gk"):
        of_q, of_a = (
            pytree.tree_map(torch.add, x.exponents, y.exponents) for x, y in ((of_qb, of_qk), (of_ab, of_ak))
        )
        total = rule.gate.total * (S * dS).sum(-1).unsqueeze(-2)
        writes, reads_of_a = rule.b * db_write + rule.k * dk_write, rule.a * da_read
        made["gk"] = rule.gate.gradient(of_q, rule.q * dq_read, writes, total)
        made["gk"] = made["gk"] + rule.gate_a.gradient(
            of_a, reads_of_a, torch.zeros_like(writes), torch.zeros_like(total)
        )
    return made | {name: x for name, x in gradients.items() if wants(name)}


class _Rule(Segment):
    """The tokens of a cache block in chunks, ``[B, H, 1, R, C, D]``, and the transition of each chunk."""

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        q, k, v, a, b, gk = inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, inputs.gk
        self.scale, read_before = inputs.scale, inputs.read_before
        assert a is not None and b is not None

        def gate(before: bool) -> Gate | Decay:
            if gk is None:
                return Decay(chunks, q, None, None)
            return Gate(chunks.split(gk).unsqueeze(2), read_before=before)

        super().__init__(chunks, q, v, gate(before=False))
        self.gate_a = gate(before=True) if read_before else self.gate
        self.k, self.a, self.b = map(self.split, (k, a, b))
        self.A_ab = pair(self.a, self.b, self.gate_a, -1)
        self.A_ak = pair(self.a, self.k, self.gate_a, -1)
        self.Y = inverse(-self.A_ab)

    @cached_property
    def q(self) -> Tensor:
        return self.split(self._q) * self.scale

    @cached_property
    def A_qb(self) -> Tensor:
        return pair(self.q, self.b, self.gate)

    @cached_property
    def A_qk(self) -> Tensor:
        return pair(self.q, self.k, self.gate)

    def outputs(self, S: Tensor, u: Tensor) -> Tensor:
        return self.read(self.q) @ S + self.A_qb @ u + self.A_qk @ self.v

    def read_a(self, x: Tensor) -> Tensor:
        return x * self.gate_a.read

    def states(self, sweep: Sweep) -> tuple[Tensor, Tensor]:
        """The state before each chunk, and ``u``, the reads by `a`, which `b` writes."""
        written = self.write(self.k).mT @ self.v
        return self.sweep(sweep, self.Y, self.A_ak @ self.v, self.read_a(self.a), self.write(self.b), written)

    def gradients_of_states(self, do: Tensor, sweep: Sweep) -> tuple[Tensor, Tensor]:
        """The gradient of the state after each chunk, and ``z``, the gradient of ``a_read S + A_ak v``."""
        read = self.read(self.q).mT @ do
        return self.sweep(sweep, self.Y.mT, self.A_qb.mT @ do, self.write(self.b), self.read_a(self.a), read)
