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

Heads of values that share queries and keys are a dimension ``n`` beside the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose._torch import pytree
from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.matrix.cache_block import CacheBlock, ChannelGates, HeadGates, Wants, inverse
from flacompose.ops._recurrences.matrix.inputs import Inputs

GATES = ("g", "gk")


class DeltaRule(CacheBlock):
    """The tokens of a cache block, and the transition of each chunk."""

    of_states = ("q", "k", "a", "beta", *GATES)

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        super().__init__(inputs, chunks)
        assert inputs.beta is not None
        self.beta = self.split(inputs.beta.unsqueeze(-1))
        self.a = self.k if inputs.a is None else self.split(inputs.a)
        g = None if inputs.g is None else self.split(inputs.g.unsqueeze(-1))
        gk = None if inputs.gk is None else self.split(inputs.gk)

        def gates(read_before: bool) -> HeadGates | ChannelGates:
            if gk is None:
                return HeadGates(g, self.q, read_before)
            return ChannelGates(gk if g is None else gk + g, read_before)

        self.gates = gates(read_before=False)
        self.gates_of_a = gates(read_before=True) if inputs.read_before else self.gates
        self.P = self.gates.pairs(self.q, self.k)
        self.A = self.gates_of_a.pairs(self.a, self.k, -1)
        self.Y = inverse(self.beta * self.A)
        self.a_read, self.k_write = self.a * self.gates_of_a.read, self.write(self.k)

    def compute_states(self, passing: StatePassing) -> tuple[Tensor, ...]:
        """The state before each chunk, and the updates ``u`` of the tokens."""
        system = self.Y, self.beta * self.v, -self.beta * self.a_read, self.k_write
        return self.solve_states(passing, None, self.gates.chunk_decay.mT, *system)

    def compute_outputs(self, *states: Tensor) -> Tensor:
        S, u = states
        return self.read(self.q) @ S + self.P @ u

    def compute_gradients(
        self, wants: Wants, do: Tensor, states: tuple[Tensor, ...], backwards: StatePassing
    ) -> dict[str, Tensor]:
        made, gates, inputs = {}, self.gates, self.inputs
        if wants("k", "a", "v", "beta", "initial_state", *GATES):
            # `solved` is ``Y^T du``.
            system = self.Y.mT, self.P.mT @ do, self.k_write, -self.beta * self.a_read
            dS, solved = self.solve_states(
                backwards, self.read(self.q).mT @ do, gates.chunk_decay.mT, *system
            )
            dv = self.beta * solved
        if wants("v"):
            made["v"] = dv
        if states:
            S, u = states
        if wants("beta"):
            made["beta"] = (solved * (self.v - self.a_read @ S - self.A @ u)).sum(-1, True)
        # Two reads of the state: by queries, with the gradient do, and by `a`, before the keys write, with -dv.
        if wants("q", "k", "a", *GATES):
            dq_read = self.read(do @ S.mT)
            d_qk = gates.pair_gradient(self.q, self.k, self.P, (do @ u.mT).tril())
        if wants("k", "a", *GATES):
            da_read, dk_write = -dv @ S.mT * self.gates_of_a.read, self.write(u @ dS.mT)
            d_ak = self.gates_of_a.pair_gradient(self.a, self.k, self.A, (-dv @ u.mT).tril(-1))
        if wants(*GATES):
            reads, reads_of_a, writes = self.q * dq_read, self.a * da_read, self.k * dk_write
            d_chunk_decay = gates.chunk_decay * (S * dS).sum(-1).unsqueeze(-2)
            if self.gates_of_a is gates:
                exponents = pytree.tree_map(torch.add, d_qk.exponents, d_ak.exponents)
                dg = gates.gradient(exponents, reads + reads_of_a, writes, d_chunk_decay)
            else:
                zeros = torch.zeros_like(writes), torch.zeros_like(d_chunk_decay)
                dg = gates.gradient(d_qk.exponents, reads, writes, d_chunk_decay)
                dg = dg + self.gates_of_a.gradient(d_ak.exponents, reads_of_a, *zeros)
            made |= {name: dg if name == "gk" else dg.sum(-1, True) for name in GATES if wants(name)}
        if wants("q"):
            made["q"] = self.of_group(dq_read + d_qk.a) * inputs.scale
        if wants("k"):
            dk = da_read + dk_write + d_qk.b + d_ak.a if inputs.a is None else dk_write + d_qk.b
            made["k"] = self.of_group(dk + d_ak.b)
        if wants("a"):
            made["a"] = self.of_group(da_read + d_ak.a)
        return made
