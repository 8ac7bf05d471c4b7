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
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose._torch import pytree
from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.matrix.cache_block import CacheBlock, ChannelGates, HeadGates, Wants, inverse
from flacompose.ops._recurrences.matrix.inputs import Inputs


class LowRank(CacheBlock):
    """The tokens of a cache block, and the transition of each chunk."""

    of_states = ("q", "a", "k", "b", "gk")

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        super().__init__(inputs, chunks)
        assert inputs.a is not None and inputs.b is not None
        self.a, self.b = map(self.split, (inputs.a, inputs.b))
        gk = None if inputs.gk is None else self.split(inputs.gk)
        self.gates = HeadGates(None, self.q) if gk is None else ChannelGates(gk)
        read_before = inputs.read_before and gk is not None
        self.gates_of_a = ChannelGates(gk, True) if read_before and gk is not None else self.gates
        self.A_qb, self.A_qk = (self.gates.pairs(self.q, x) for x in (self.b, self.k))
        self.A_ab, self.A_ak = (self.gates_of_a.pairs(self.a, x, -1) for x in (self.b, self.k))
        self.M = inverse(-self.A_ab)
        self.a_read, self.b_write, self.k_write = self.read_a(self.a), self.write(self.b), self.write(self.k)

    def read_a(self, x: Tensor) -> Tensor:
        return x * self.gates_of_a.read

    def compute_states(self, passing: StatePassing) -> tuple[Tensor, ...]:
        """The state before each chunk, and ``u``, the reads by `a`, which `b` writes."""
        system = self.M, self.A_ak @ self.v, self.a_read, self.b_write
        return self.solve_states(passing, self.k_write.mT @ self.v, self.gates.chunk_decay.mT, *system)

    def compute_outputs(self, *states: Tensor) -> Tensor:
        S, u = states
        return self.read(self.q) @ S + self.A_qb @ u + self.A_qk @ self.v

    def compute_gradients(
        self, wants: Wants, do: Tensor, states: tuple[Tensor, ...], backwards: StatePassing
    ) -> dict[str, Tensor]:
        made, gates = {}, self.gates
        if wants("a", "k", "v", "b", "gk", "initial_state"):
            # ``z`` is the gradient of ``a_read S + A_ak v``.
            system = self.M.mT, self.A_qb.mT @ do, self.b_write, self.a_read
            dS, z = self.solve_states(backwards, self.read(self.q).mT @ do, gates.chunk_decay.mT, *system)
        if wants("v"):
            made["v"] = self.A_qk.mT @ do + self.A_ak.mT @ z + self.k_write @ dS
        if not states:
            return made
        S, u = states
        dq_read = self.read(do @ S.mT)
        through_qb = gates.pair_gradient(self.q, self.b, self.A_qb, (do @ u.mT).tril())
        through_qk = gates.pair_gradient(self.q, self.k, self.A_qk, (do @ self.v.mT).tril())
        if wants("q"):
            made["q"] = (dq_read + through_qb.a + through_qk.a) * self.inputs.scale
        if not wants("a", "k", "b", "gk"):
            return made
        da_read = self.read_a(z @ S.mT)
        db_write, dk_write = self.write(u @ dS.mT), self.write(self.v @ dS.mT)
        through_ab = self.gates_of_a.pair_gradient(self.a, self.b, self.A_ab, (z @ u.mT).tril(-1))
        through_ak = self.gates_of_a.pair_gradient(self.a, self.k, self.A_ak, (z @ self.v.mT).tril(-1))
        made["a"] = da_read + through_ab.a + through_ak.a
        made["b"] = db_write + through_qb.b + through_ab.b
        made["k"] = dk_write + through_qk.b + through_ak.b
        if wants("gk"):
            exponents_q, exponents_a = (
                pytree.tree_map(torch.add, x.exponents, y.exponents)
                for x, y in ((through_qb, through_qk), (through_ab, through_ak))
            )
            d_chunk_decay = gates.chunk_decay * (S * dS).sum(-1).unsqueeze(-2)
            writes, reads_of_a = self.b * db_write + self.k * dk_write, self.a * da_read
            zeros = torch.zeros_like(writes), torch.zeros_like(d_chunk_decay)
            made["gk"] = gates.gradient(exponents_q, self.q * dq_read, writes, d_chunk_decay)
            made["gk"] = made["gk"] + self.gates_of_a.gradient(exponents_a, reads_of_a, *zeros)
        return made
