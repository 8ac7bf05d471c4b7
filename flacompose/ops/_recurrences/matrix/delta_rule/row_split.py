"""The loop over the cache blocks of a call, a few chunks of tokens each, in chunked PyTorch.

The `rule` of a recurrence holds the equations of a block's tokens, whose triangular systems do not depend on
the state. State passing takes three products for each chunk, forwards and, with the inverse transposed,
backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall
from flacompose.ops._recurrences.chunks import Chunks, Sweep
from flacompose.ops._recurrences.matrix.channel_decay.eager import Gate
from flacompose.ops._recurrences.matrix.head_decay.eager import Decay
from flacompose.ops._tensors.dtype import state_dtype
from flacompose.ops._tensors.packed import sequence_count


def cut(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Chunks, list[Chunks]]:
    """The chunks of all tokens, and of each cache block, of ``q [B, T, H, K]`` and ``v [B, T, HV, V]``."""
    chunks = Chunks(q, cu_seqlens)
    (B, _, HV, V), K = v.shape, q.shape[-1]
    return chunks, chunks.segments(B * HV * max(chunks.size * max(chunks.size, K, V), K * V))


def join(chunks: Chunks, segments: Sequence[Tensor]) -> Tensor:
    """``[B, T, HV, D]`` from the chunks of all cache blocks, ``[B, H, n, R, C, D]`` each."""
    return chunks.join(*(x.flatten(1, 2) for x in segments))


def state_or_zeros(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state: Tensor | None) -> Tensor:
    """`state`, ``[N, HV, K, V]``, or zeros if it is absent."""
    if state is None:
        N = sequence_count(q, cu_seqlens)
        return q.new_zeros(N, v.shape[2], q.shape[-1], v.shape[-1], dtype=state_dtype(q.dtype))
    return state.to(state_dtype(q.dtype))


def forward(inputs: Any, rule: Callable[[Any, Chunks], Any]) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``, cache block by cache block.

    ``rule(inputs, chunks)`` returns the equations of one block's tokens.
    """
    tokens = inputs.q, inputs.v, inputs.cu_seqlens
    chunks, segments = cut(*tokens)
    sweep = Sweep(chunks, state_or_zeros(*tokens, inputs.initial_state))
    outputs = []
    for segment in segments:
        of_segment = rule(inputs, segment)
        outputs.append(of_segment.outputs(*of_segment.states(sweep)).to(inputs.v.dtype))
    # A view would make callers compile a second time, besides for states that are no views.
    return join(chunks, outputs), sweep.end().clone()


def gradients(
    call: BackwardCall[Any],
    rule: Callable[[Any, Chunks], Any],
    of_segment: Callable[..., dict[str, Tensor]],
    of_states: tuple[str, ...],
) -> tuple[dict[str, Tensor], Callable[[], Tensor]]:
    """The gradients that `of_segment` returns, and a function for that of the initial state.

    ``rule(inputs, chunks)`` returns the equations of one block's tokens. If the gradient of one of the inputs
    `of_states` is wanted, a loop forwards over the blocks computes the states; then a loop goes backwards.
    """
    inputs, do = call.inputs, call.do
    tokens = inputs.q, inputs.v, inputs.cu_seqlens
    chunks, segments = cut(*tokens)
    rules = [rule(inputs, segment) for segment in segments]
    written: list[tuple[Tensor, Tensor] | None] = [None] * len(rules)
    if call.wants(*of_states):
        forwards = Sweep(chunks, state_or_zeros(*tokens, inputs.initial_state))
        written = [x.states(forwards) for x in rules]
    backwards = Sweep(chunks, state_or_zeros(*tokens, call.arriving.final_state), reverse=True)
    made = [of_segment(call, x, x.split(do), S, backwards) for x, S in zip(rules[::-1], written[::-1])]
    parts = {name: [part[name] for part in made[::-1]] for name in made[0]}
    return {name: join(chunks, x) for name, x in parts.items()}, lambda: backwards.end().clone()


class Segment:
    """The tokens of a cache block in chunks, ``[B, H, n, R, C, D]``: `n` heads of values share keys."""

    def __init__(self, chunks: Chunks, q: Tensor, v: Tensor, gate: Gate | Decay) -> None:
        self.chunks, self.heads, self.gate, self._q = chunks, q.shape[2], gate, q
        self.v = self.split(v)

    def split(self, x: Tensor) -> Tensor:
        return self.chunks.split(x).unflatten(1, (self.heads, -1))

    def read(self, x: Tensor) -> Tensor:
        """`x` decayed by the gates since the chunk's start."""
        return x * self.gate.read

    def write(self, x: Tensor) -> Tensor:
        """`x` decayed by the gates up to the chunk's end."""
        return x * self.gate.write

    def sweep(
        self, sweep: Sweep, Y: Tensor, x: Tensor, reads: Tensor, writes: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``y = Y (x + reads S)`` and ``S <- decay S + writes^T y + added`` over the chunks: S before each, and y."""
        Y_, x_, reads_, writes_ = map(self.by_chunk, (Y, x, reads, writes.mT))
        decay = self.by_chunk(torch.atleast_2d(self.gate.total).mT)
        added_ = None if added is None else self.by_chunk(added)
        y = list(x_)

        def step(i: int, S: Tensor) -> Tensor:
            heads, S = S.shape[:2], S.flatten(0, 1)
            y[i] = torch.bmm(Y_[i], torch.baddbmm(x_[i], reads_[i], S))
            S = S * decay[i] if added_ is None else torch.addcmul(added_[i], S, decay[i])
            return torch.baddbmm(S, writes_[i], y[i]).unflatten(0, heads)

        S = sweep.over(self.chunks.at, step)
        return S.unflatten(1, self.v.shape[1:3]), torch.stack(y, 1).unflatten(0, self.v.shape[:3])

    def by_chunk(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[B, H, n, R, ...]``, or broadcast to it, as one ``[B * HV, ...]`` for each chunk."""
        return x.expand(*self.v.shape[:4], *x.shape[-2:]).flatten(0, 2).unbind(1)
