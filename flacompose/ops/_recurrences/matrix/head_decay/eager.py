"""Head decay in one block of chunks, in PyTorch, for every device without a Triton kernel.

    S_t = exp(g_t + g_gamma) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

A read takes the state before the chunk, decayed to its token, and the written values ``w = beta v`` of the
chunk: ``o = read(q) S + P w``, where ``P`` are the products of queries and keys, decayed between both.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.matrix.cache_block import CacheBlock, HeadGates, Wants
from flacompose.ops._recurrences.matrix.inputs import Inputs

GATES = ("g", "g_gamma")


class HeadDecay(CacheBlock):
    """The tokens of a cache block."""

    of_states = ("q", *GATES)

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        super().__init__(inputs, chunks)
        g, g_gamma, beta = inputs.g, inputs.g_gamma, inputs.beta
        gates = [x.to(chunks.dtype) for x in (g, g_gamma) if x is not None]
        g = sum(gates[1:], start=gates[0]).unsqueeze(-1) if gates else None
        # Padding is no token, and does not decay.
        g = None if g is None else self.split(g.expand(*inputs.q.shape[:2], -1, 1))
        self.gates: HeadGates = HeadGates(g, self.q)
        self.beta = None if beta is None else self.split(beta.unsqueeze(-1))
        self.w = self.v if self.beta is None else self.v * self.beta

    def compute_states(self, passing: StatePassing) -> tuple[Tensor, ...]:
        return (self.pass_states(passing, self.write(self.k).mT @ self.w, self.gates.chunk_decay),)

    def compute_outputs(self, *states: Tensor) -> Tensor:
        return self.read(self.q) @ states[0] + self.gates.pairs(self.q, self.k) @ self.w

    def compute_gradients(
        self, wants: Wants, do: Tensor, states: tuple[Tensor, ...], backwards: StatePassing
    ) -> dict[str, Tensor]:
        made = {}
        # Through other chunks: S is the state before each chunk, dS the gradient of the state after it.
        if wants("q", *GATES):
            (S,) = states
            dq = self.read(do @ S.mT)
        if wants("k", "v", "beta", "initial_state", *GATES):
            dS = self.pass_states(backwards, self.read(self.q).mT @ do, self.gates.chunk_decay)
        if wants("k", *GATES):
            dk = self.write(self.w @ dS.mT)
        # Within a chunk, and the sum of both.
        if wants("v", "beta", *GATES):
            P = self.gates.pairs(self.q, self.k)
        if wants("q", "k", *GATES):
            dP = (do @ self.w.mT).tril()
        if wants(*GATES):
            d_chunk_decay = self.gates.chunk_decay * (S * dS).sum((-2, -1), keepdim=True)
            made = dict.fromkeys(GATES, self.gates.gradient(dP * P, self.q * dq, self.k * dk, d_chunk_decay))
        if wants("v", "beta"):
            dw = P.mT @ do + self.write(self.k) @ dS
            made["v"] = dw if self.beta is None else dw * self.beta
            made["beta"] = (dw * self.v).sum(-1, True)
        if wants("q", "k"):
            dP = self.of_group(dP * self.gates.pair)
        if wants("q"):
            made["q"] = (self.of_group(dq) + dP @ self.k) * self.inputs.scale
        if wants("k"):
            made["k"] = self.of_group(dk) + dP.mT @ self.q
        return {name: x for name, x in made.items() if wants(name)}
