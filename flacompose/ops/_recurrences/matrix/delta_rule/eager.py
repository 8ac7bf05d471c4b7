"""Chunked PyTorch of the delta rule, for every device without a Triton kernel.

    S' = diag(exp g_t) S_{t-1}      u_t = beta_t (v_t - S*^T a_t)      S_t = S' + k_t u_t^T      o_t = scale * S_t^T q_t

where `a` is the key, if it is not given, and S* is the state that it reads, after its decay or before it.

Given ``u``, this is linear attention with the values ``u``. In a chunk that begins with the state S, the
tokens' equations are one triangular system, ``(I + diag(beta) A) u = diag(beta) (v - k_read S)``, where
``A[t, s]`` is the product of the reading key of token `t` and the writing key of ``s < t``, decayed by the
gates between them, and `k_read` are the reading keys, decayed by the gates since the chunk's start. The
inverse ``Y`` of the system does not depend on S, so state passing takes three products for each chunk:
``k_read S``, ``u = Y diag(beta) (v - k_read S)``, and the update ``k_write^T u`` of the state.

Backwards in time the gradient du obeys the transposed equations, ``Y^T`` solves them, and ``dv = beta *
solved``. The other gradients are those of two reads in linear attention: by queries, with the gradient do,
and by keys, with -dv.

The tokens are processed in cache blocks of a few chunks. The backward goes forwards over the blocks, for the
states, and then backwards.

Everything is functional, differentiable PyTorch, so derivatives of any order exist. Heads of values that
share queries and keys are a dimension ``n`` beside the head.
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

GATES = ("g", "gk")


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    return row_split.forward(inputs, _Rule)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    of_states = ("q", "k", "a", "beta", *GATES)
    made, d_initial_state = row_split.gradients(call, _Rule, _segment_gradients, of_states)
    if "beta" in made:
        made["beta"] = made["beta"].squeeze(-1)
    return call.made(
        **made, g=lambda: made["gates"].sum(-1), gk=made.get("gates"), initial_state=d_initial_state
    )


def _segment_gradients(
    call: BackwardCall[Inputs],
    rule: _Rule,
    do: Tensor,
    written: tuple[Tensor, Tensor] | None,
    backwards: Sweep,
) -> dict[str, Tensor]:
    """The wanted gradients of a cache block's tokens, in chunks, by input name and "gates"."""
    wants, made = call.wants, {}
    if wants("k", "a", "v", "beta", "initial_state", *GATES):
        dS, solved = rule.gradients_of_states(do, backwards)
        dv = rule.beta * solved
    if wants("v"):
        made["v"] = dv
    if written is not None:
        S, u = written
    if wants("beta"):
        made["beta"] = (solved * rule.errors(S, u)).sum(-1, True)
    # Two reads of the state: by queries, with the gradient do, and by `a`, before the keys write, with -dv.
    if wants("q", "k", "a", *GATES):
        dq_read = rule.read(do @ S.mT)
        of_q = pair_gradient(rule.q, rule.k, rule.P, (do @ u.mT).tril(), rule.gate)
    if wants("k", "a", *GATES):
        minus_dv = -dv
        dk_read, dk_write = rule.read_a(minus_dv @ S.mT), rule.write(u @ dS.mT)
        of_k = pair_gradient(rule.a, rule.k, rule.A, (minus_dv @ u.mT).tril(-1), rule.gate_a)
    if wants(*GATES):
        reads, reads_of_a, writes = rule.q * dq_read, rule.a * dk_read, rule.k * dk_write
        total = rule.gate.total * (S * dS).sum(-1).unsqueeze(-2)
        if rule.gate.total.shape[-1] != rule.k.shape[-1]:
            of_head = (x.sum(-1, keepdim=True) for x in (reads, reads_of_a, writes, total))
            reads, reads_of_a, writes, total = of_head
        if rule.gate_a is rule.gate:
            exponents = pytree.tree_map(torch.add, of_q.exponents, of_k.exponents)
            made["gates"] = rule.gate.gradient(exponents, reads + reads_of_a, writes, total)
        else:
            zeros = torch.zeros_like(writes), torch.zeros_like(total)
            made["gates"] = rule.gate.gradient(of_q.exponents, reads, writes, total)
            made["gates"] = made["gates"] + rule.gate_a.gradient(of_k.exponents, reads_of_a, *zeros)
    if wants("q"):
        made["q"] = rule.of_group(dq_read + of_q.a) * rule.scale
    if wants("k"):
        reads = dk_read + dk_write + of_q.b + of_k.a if call.inputs.a is None else dk_write + of_q.b
        made["k"] = rule.of_group(reads + of_k.b)
    if wants("a"):
        made["a"] = rule.of_group(dk_read + of_k.a)
    return made


class _Rule(Segment):
    """The tokens of a cache block in chunks, ``[B, H, n, R, C, D]``, and the transition of each chunk."""

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        q, k, v, beta, a = inputs.q, inputs.k, inputs.v, inputs.beta, inputs.a
        assert beta is not None
        self.scale, read_before = inputs.scale, inputs.read_before
        super().__init__(chunks, q, v, _gate(inputs, chunks, read_before=False))
        self.gate_a = _gate(inputs, chunks, read_before) if read_before else self.gate
        self.k, self.beta = self.split(k), self.split(beta.unsqueeze(-1))
        self.a = self.k if a is None else self.split(a)
        self.A = pair(self.a, self.k, self.gate_a, -1)
        self.Y = inverse(self.beta * self.A)
        self.k_read, self.k_write = self.read_a(self.a), self.write(self.k)

    @cached_property
    def q(self) -> Tensor:
        return self.split(self._q) * self.scale

    @cached_property
    def P(self) -> Tensor:
        return pair(self.q, self.k, self.gate)

    def outputs(self, S: Tensor, u: Tensor) -> Tensor:
        return self.read(self.q) @ S + self.P @ u

    def read_a(self, x: Tensor) -> Tensor:
        return x * self.gate_a.read

    def of_group(self, x: Tensor) -> Tensor:
        """The gradient of queries or keys that `n` heads of values share: the sum over these heads."""
        return x.sum(2, True) if x.shape[2] > 1 else x

    def errors(self, S: Tensor, u: Tensor) -> Tensor:
        """``v_t - S*^T a_t``: the error of each value."""
        return self.v - self.k_read @ S - self.A @ u

    def states(self, sweep: Sweep) -> tuple[Tensor, Tensor]:
        """The state before each chunk, and the updates ``u`` of the tokens."""
        return self.sweep(sweep, self.Y, self.beta * self.v, -self.beta * self.k_read, self.k_write)

    def gradients_of_states(self, do: Tensor, sweep: Sweep) -> tuple[Tensor, Tensor]:
        """The gradient of the state after each chunk, and ``Y^T du``, which is ``dv / beta``."""
        x, added = self.P.mT @ do, self.read(self.q).mT @ do
        return self.sweep(sweep, self.Y.mT, x, self.k_write, -self.beta * self.k_read, added)


def _gate(inputs: Inputs, chunks: Chunks, read_before: bool) -> Gate | Decay:
    q, g, gk = inputs.q, inputs.g, inputs.gk
    if gk is None:
        return Decay(chunks, q, g, None, read_before)

    def split(x: Tensor) -> Tensor:
        return chunks.split(x).unflatten(1, (q.shape[2], -1))

    gates = split(gk)
    return Gate(gates if g is None else gates + split(g.unsqueeze(-1)), read_before)
