"""The walk over the tokens of a call in PyTorch, which all schemes of a matrix state share.

It takes cache blocks of a few chunks, one after the other, so that their tensors stay in the cache, and passes
the state from chunk to chunk. The backward goes forwards over the blocks, for the states, and then backwards.
A scheme is a `Segment`: the equations of one block's tokens. Everything is functional, differentiable
PyTorch, so derivatives of any order exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.matrix.inputs import SIGNATURE, Inputs
from flacompose.ops._recurrences.matrix.pairs import ChannelGates, HeadGates

Wants = Callable[..., bool]


class Segment:
    """The tokens of a cache block in chunks, ``[B, H, n, R, C, D]``: `n` heads of values share queries and keys."""

    # The inputs whose gradients need the states before the chunks.
    of_states: ClassVar[tuple[str, ...]]
    gates: HeadGates | ChannelGates

    def __init__(self, inputs: Inputs, chunks: Chunks) -> None:
        self.inputs, self.chunks = inputs, chunks
        self.q, self.k, self.v = map(self.split, (inputs.q, inputs.k, inputs.v))
        self.q = self.q * inputs.scale

    def states(self, passing: StatePassing) -> tuple[Tensor, ...]:
        """The state before each chunk, and the written values where these depend on it."""
        raise NotImplementedError

    def outputs(self, *states: Tensor) -> Tensor:
        """The outputs of all tokens, from the result of `states`."""
        raise NotImplementedError

    def gradients(
        self, wants: Wants, do: Tensor, states: tuple[Tensor, ...], backwards: StatePassing
    ) -> dict[str, Tensor]:
        """The wanted gradients of all tokens, by the names of the inputs; `states` are empty if they are not needed."""
        raise NotImplementedError

    def split(self, x: Tensor) -> Tensor:
        return self.chunks.split(x).unflatten(1, (self.inputs.q.shape[2], -1))

    def read(self, x: Tensor) -> Tensor:
        """`x` decayed by the gates since the chunk's start."""
        return x * self.gates.read

    def write(self, x: Tensor) -> Tensor:
        """`x` decayed by the gates up to the chunk's end."""
        return x * self.gates.write

    def of_group(self, x: Tensor) -> Tensor:
        """The gradient of queries or keys that `n` heads of values share: the sum over these heads."""
        return x.sum(2, True) if x.shape[2] > 1 else x

    def pass_states(self, passing: StatePassing, added: Tensor, decay: Tensor) -> Tensor:
        """``S <- decay S + added`` over the chunks: the state before each."""
        added_, decay_ = (
            x.expand(*self.v.shape[:4], *x.shape[-2:]).flatten(1, 2).unbind(2) for x in (added, decay)
        )
        S = passing.over(self.chunks.at, lambda i, S: torch.addcmul(added_[i], S, decay_[i]))
        return S.unflatten(1, self.v.shape[1:3])

    def solve_states(
        self,
        passing: StatePassing,
        added: Tensor | None,
        decay: Tensor,
        Y: Tensor,
        x: Tensor,
        reads: Tensor,
        writes: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``S <- decay S + added + writes^T y`` over the chunks, ``y = Y (x + reads S)``: S before each, and y."""
        shape, tensors = (
            self.v.shape[:4],
            (decay, Y, x, reads, writes.mT, *([] if added is None else [added])),
        )
        decay_, Y_, x_, reads_, writes_, *added_ = (
            z.expand(*shape, *z.shape[-2:]).flatten(0, 2).unbind(1) for z in tensors
        )
        y = list(x_)

        def step(i: int, S: Tensor) -> Tensor:
            heads, S = S.shape[:2], S.flatten(0, 1)
            y[i] = torch.bmm(Y_[i], torch.baddbmm(x_[i], reads_[i], S))
            S = torch.addcmul(added_[0][i], S, decay_[i]) if added_ else S * decay_[i]
            return torch.baddbmm(S, writes_[i], y[i]).unflatten(0, heads)

        S = passing.over(self.chunks.at, step).unflatten(1, shape[1:3])
        return S, torch.stack(y, 1).unflatten(0, shape[:3])


def forward(inputs: Inputs, scheme: type[Segment]) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``, cache block by cache block."""
    chunks, blocks = _cut(inputs)
    passing = StatePassing(chunks, _state(chunks, inputs, inputs.initial_state))
    dtype, outputs = chunks.dtype if inputs.full_precision else inputs.v.dtype, []
    for block in blocks:
        segment = scheme(inputs, block)
        outputs.append(segment.outputs(*segment.states(passing)).flatten(1, 2).to(dtype))
    # A view would make callers compile a second time, besides for states that are no views.
    return chunks.join(*outputs), passing.end().clone()


def backward(call: BackwardCall[Inputs], scheme: type[Segment]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, wants, do = call.inputs, call.wants, call.do
    chunks, blocks = _cut(inputs)
    segments = [scheme(inputs, block) for block in blocks]
    states: list[tuple[Tensor, ...]] = [()] * len(segments)
    if wants(*scheme.of_states):
        forwards = StatePassing(chunks, _state(chunks, inputs, inputs.initial_state))
        states = [segment.states(forwards) for segment in segments]
    backwards = StatePassing(chunks, _state(chunks, inputs, call.arriving.final_state), reverse=True)
    parts: dict[str, list[Tensor]] = {}
    while segments:  # the tensors of each are freed
        segment = segments.pop()
        for name, dx in segment.gradients(wants, segment.split(do), states.pop(), backwards).items():
            parts.setdefault(name, []).append(dx.flatten(1, 2))
    made: Gradients = {}
    for name, dx_parts in parts.items():
        dx = chunks.join(*dx_parts[::-1])
        of_tokens = "T" in SIGNATURE.axes[name].split()
        made[name] = (dx if of_tokens else dx.sum((0, 1))).reshape(getattr(inputs, name).shape)
    return call.made(**made, initial_state=lambda: backwards.end().clone())


def _cut(inputs: Inputs) -> tuple[Chunks, list[Chunks]]:
    """The chunks of all tokens, and of each cache block."""
    chunks, K, (B, _, HV, V) = Chunks(inputs.q, inputs.cu_seqlens), inputs.k.shape[-1], inputs.v.shape
    return chunks, chunks.segments(B * HV * max(chunks.size * max(chunks.size, K, V), K * V))


def _state(chunks: Chunks, inputs: Inputs, x: Tensor | None) -> Tensor:
    """A state, ``[N, HV, K, V]``; zeros if it is absent."""
    k, v = inputs.k, inputs.v
    if x is None:
        return v.new_zeros(chunks.N, v.shape[2], k.shape[-1], v.shape[-1], dtype=chunks.dtype)
    return x.to(chunks.dtype)
