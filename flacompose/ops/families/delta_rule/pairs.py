"""The pairs of tokens in a chunk, and the triangular systems made of them, in chunked PyTorch.

In rules that erase, what a token writes depends on what the tokens before it in its chunk have written. The equations
of these tokens are one triangular system, whose inverse does not depend on the state. So a sweep over the chunks takes
three products for each, forwards and, with the inverse transposed, backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._chunks import Chunks, Sweep
from flacompose.ops.families._signature import BackwardCall
from flacompose.ops.families.scalar_decay.eager import Decay
from flacompose.ops.families.vector_decay.eager import Gate, halves


def cut(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Chunks, list[Chunks]]:
    """The chunks of all tokens, and of the segments, of ``q [B, T, H, K]`` and ``v [B, T, HV, V]``."""
    chunks = Chunks(q, cu_seqlens)
    (B, _, HV, V), K = v.shape, q.shape[-1]
    return chunks, chunks.segments(B * HV * max(chunks.size * max(chunks.size, K, V), K * V))


def join(chunks: Chunks, segments: Sequence[Tensor]) -> Tensor:
    """``[B, T, HV, D]`` from what lies in the chunks of segments, ``[B, H, n, R, C, D]``."""
    return chunks.join(*(x.flatten(1, 2) for x in segments))


def state_or_zeros(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state: Tensor | None) -> Tensor:
    """`state`, ``[N, HV, K, V]``, zeros where there is none."""
    if state is None:
        N = sequence_count(q, cu_seqlens)
        return q.new_zeros(N, v.shape[2], q.shape[-1], v.shape[-1], dtype=state_dtype(q.dtype))
    return state.to(state_dtype(q.dtype))


def forward(inputs: Any, rule: Callable[[Any, Chunks], Any]) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])`` of what a family's `rule` is for each segment."""
    tokens = inputs.q, inputs.v, inputs.cu_seqlens
    chunks, segments = cut(*tokens)
    sweep = Sweep(chunks, state_or_zeros(*tokens, inputs.initial_state))
    outputs = []
    for segment in segments:
        of_segment = rule(inputs, segment)
        outputs.append(of_segment.outputs(*of_segment.states(sweep)).to(inputs.v.dtype))
    # A state that is a view would be compiled for once more, beside those that are none.
    return join(chunks, outputs), sweep.end().clone()


def gradients(
    call: BackwardCall[Any],
    rule: Callable[[Any, Chunks], Any],
    of_segment: Callable[..., dict[str, Tensor]],
    of_states: tuple[str, ...],
) -> tuple[dict[str, Tensor], Callable[[], Tensor]]:
    """The gradients that `of_segment` gives, by their names, and a function that gives that of the initial state.

    It goes forwards over the segments, for the states, if a gradient of those inputs is wanted, and then backwards.
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
    """The tokens of a segment in chunks, ``[B, H, n, R, C, D]``: `n` heads of values share one of queries and keys."""

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


def inverse(A: Tensor) -> Tensor:
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


def pair(a: Tensor, b: Tensor, gate: Gate | Decay, diagonal: int = 0) -> Tensor:
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


class PairGradient(NamedTuple):
    a: Tensor
    b: Tensor
    exponents: Any  # those of the gates, as `gate.gradient` takes them


def pair_gradient(a: Tensor, b: Tensor, P: Tensor, dP: Tensor, gate: Gate | Decay) -> PairGradient:
    """The gradients from that of ``P = pair(a, b, gate)``."""
    if isinstance(gate, Decay):
        exponents, dP = dP * P, dP * gate.pair
        return PairGradient(dP @ b, dP.mT @ a, exponents)
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
    return PairGradient(da, db, levels)


def _blocks(x: Tensor, level: int) -> Tensor:
    """``[..., C, D]`` as blocks of ``2 ** level`` tokens."""
    return x.unflatten(-2, (-1, 1 << level))
