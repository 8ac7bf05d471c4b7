"""Chunked PyTorch of RWKV-4, for every device without a Triton kernel.

    o_t = (a_{t-1} + exp(u + k_t) v_t) / (b_{t-1} + exp(u + k_t))
    a_t = exp(w) a_{t-1} + exp(k_t) v_t        b_t = exp(w) b_{t-1} + exp(k_t)

The sums are stored divided by ``exp(m_t)``, with ``m_t = max(w + m_{t-1}, k_t)``. So a state is a, b and m.
The transition of a span of tokens follows from their number and the state that they reach from the empty
state: see `join`.

The chunks are scanned as in `token_chunks`, from the empty state. The maximum after a token follows from that
before the chunk and that of the chunk's own tokens, as in `join`, so that both agree to the bit. Everything
is functional and differentiable to any order; maxima are constants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.rwkv4.inputs import LOWEST, Inputs
from flacompose.ops._recurrences.elementwise.token_chunks import TokenChunks
from flacompose.ops._tensors.dtype import state_dtype
from flacompose.ops._tensors.packed import bounds, sequence_count


class State(NamedTuple):
    """Both sums, divided by ``exp(m)``, and `m`."""

    a: Tensor
    b: Tensor
    m: Tensor


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(o [B, T, D], final_a [N, D], final_b [N, D], final_m [N, D])``."""
    if inputs.v.shape[1] == 1 and inputs.cu_seqlens is None:
        return _token(inputs)
    wkv = _WKV(inputs)
    before, end = wkv.states()
    o = wkv.chunks.together([step.o for step in wkv.steps(before)])
    a, b, m = (x.clone(memory_format=torch.contiguous_format) for x in end)
    if (
        inputs.initial_m is not None and inputs.cu_seqlens is not None
    ):  # the copy that a sequence without tokens returns
        m = torch.where(_filled(inputs), m, inputs.initial_m.to(m.dtype).clamp(min=LOWEST))
    return o.to(inputs.v.dtype), a, b, m


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wkv = _WKV(call.inputs)
    before, _ = wkv.states()
    steps = wkv.steps(before)
    # 1. Through the outputs: the gradients of a and b before each token, and exp(u + k_t) times that of the numerator.
    reads = []
    for step, do in zip(steps, wkv.chunks.each(call.do), strict=True):
        d_numerator = do / step.weight
        of_a = step.past * d_numerator
        reads.append((of_a, -of_a * step.o, step.present * d_numerator))
    # 2. Through the states, backwards in time: the gradients through the outputs of a chunk, and from chunk
    # to chunk.
    da = db = torch.zeros_like(steps[0].o)
    for step, (of_a, of_b, _) in zip(reversed(steps), reversed(reads), strict=True):
        da, db = step.kept * da + of_a, step.kept * db + of_b
    arriving = call.arriving.final_a, call.arriving.final_b
    decay = wkv.decay(before.m, steps[-1].m)
    da, d_initial_a = wkv.chunks.states(da, decay, arriving[0], reverse=True)
    db, d_initial_b = wkv.chunks.states(db, decay, arriving[1], reverse=True)
    # 3. And from token to token.
    dv, dk, dw, du = [], [], [], []
    for j in reversed(range(len(steps))):
        step, (of_a, of_b, of_present) = steps[j], reads[j]
        of_weight = of_present * (wkv.v[j] - step.o)
        dv.append(step.written * da + of_present)
        dk.append(torch.where(wkv.is_low[j], 0, step.written * (da * wkv.v[j] + db) + of_weight))
        dw.append(torch.where(wkv.exists[j], step.kept * (da * step.a + db * step.b), 0))
        du.append(of_weight)
        da, db = step.kept * da + of_a, step.kept * db + of_b
    return call.select(
        v=lambda: wkv.chunks.together(dv[::-1]),
        k=lambda: wkv.chunks.together(dk[::-1]),
        w=lambda: torch.stack(dw).sum((0, 1, 2, 3)),
        u=lambda: torch.stack(du).sum((0, 1, 2, 3)),
        initial_a=d_initial_a,
        initial_b=d_initial_b,
        initial_m=lambda: _d_initial_m(call),
    )


def join(state: State, end: State, w: Tensor, tokens: Tensor) -> State:
    """The state after `tokens`, which reach `end` from the empty state, from the `state` before them."""
    total = tokens * _finite(w)
    m = torch.maximum(state.m + total, end.m).detach()
    kept, written = (total + (state.m.detach() - m)).exp(), (end.m - m).exp()
    return State(kept * state.a + written * end.a, kept * state.b + written * end.b, m)


def _d_initial_m(call: BackwardCall[Inputs]) -> Tensor:
    """The gradient of the copy that a sequence without tokens returns."""
    m, dm = call.inputs.initial_m, call.arriving.final_m
    assert m is not None
    zeros = m.new_zeros(m.shape)
    return (
        zeros
        if call.inputs.cu_seqlens is None or dm is None
        else torch.where(_filled(call.inputs), zeros, dm)
    )


def _filled(inputs: Inputs) -> Tensor:
    """``[N, 1]``, whether a packed sequence has any tokens."""
    assert inputs.cu_seqlens is not None
    return (bounds(inputs.cu_seqlens, inputs.v.shape[1]).diff() > 0)[:, None]


def _finite(w: Tensor) -> Tensor:
    """Decays with the lowest number in place of -inf, which times 0 tokens would be NaN."""
    return w.clamp(min=torch.finfo(w.dtype).min)


class _Step(NamedTuple):
    """The intermediate results of one token of each chunk."""

    a: Tensor  # before the token
    b: Tensor
    m: Tensor  # after it
    kept: Tensor  # exp(w + m_{t-1} - m_t)
    written: Tensor  # exp(k_t - m_t)
    past: Tensor  # the weights of a and b, and of the token, in the output
    present: Tensor
    weight: Tensor  # the denominator
    o: Tensor

    @classmethod
    def of(
        cls, state: State, m: Tensor, k: Tensor, v: Tensor, u: Tensor, decay: Tensor, key: Tensor
    ) -> _Step:
        """From the `state` before and `m` after the token; without one, `decay` is 0 and `key` -inf."""
        a, b, before = state
        # The maximum of a state without writes is meaningless.
        past, now = torch.where(b > 0, before, LOWEST), u + k
        top = torch.maximum(past, now).detach()
        past, present = (past - top).exp(), (now - top).exp()
        weight = past * b + present
        o = (past * a + present * v) / weight
        return cls(a, b, m, (decay + (before - m)).exp(), (key - m).exp(), past, present, weight, o)

    def after(self, v: Tensor) -> State:
        return State(self.kept * self.a + self.written * v, self.kept * self.b + self.written, self.m)


def _token(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward` of rows of one token each."""
    dtype = state_dtype(inputs.v.dtype)
    v, k = inputs.v[:, 0].to(dtype), inputs.k[:, 0].to(dtype).clamp(min=LOWEST)
    w, u = (x.to(dtype) for x in (inputs.w, inputs.u))
    start = _start(inputs, v)
    m = torch.maximum(w + start.m, k).clamp(min=LOWEST).detach()
    step = _Step.of(start, m, k, v, u, w, k)
    return step.o.unsqueeze(1).to(inputs.v.dtype, copy=True), *step.after(v)  # an op returns no view


def _start(inputs: Inputs, like: Tensor) -> State:
    """The state before the first token, ``[N, D]`` each, in the dtype of `like`."""
    a, b, m = inputs.initial_a, inputs.initial_b, inputs.initial_m
    if a is None or b is None or m is None:
        zeros = like.new_zeros(sequence_count(inputs.v, inputs.cu_seqlens), inputs.v.shape[2])
        return State(zeros, zeros, torch.full_like(zeros, LOWEST))
    a, b, m = a.to(like.dtype), b.to(like.dtype), m.detach().to(like.dtype).clamp(min=LOWEST)
    return State(a, b, torch.where(b == 0, LOWEST, m))


class _WKV:
    """The chunks of one call, cut by `Chunks`: one head, whose states are the rows a, b and m of a matrix."""

    def __init__(self, inputs: Inputs) -> None:
        v, k, w, u, *_, cu_seqlens = inputs
        self.chunks = TokenChunks(v, cu_seqlens)
        self.v, keys = self.chunks.each(v), self.chunks.each(k)
        self.k, self.is_low = [x.clamp(min=LOWEST) for x in keys], [x < LOWEST for x in keys]
        self.w, self.u = (x.to(self.chunks.dtype) for x in (w, u))
        ones = self.chunks.each(torch.ones_like(v[:1, :, :1], dtype=self.chunks.dtype))
        self.elapsed = torch.stack(ones).cumsum(0)  # tokens of the chunk up to each, [C, 1, 1, R, 1]
        self.exists = [x > 0 for x in ones]
        # Places of a chunk without a token leave the state as it is.
        self.decays = [torch.where(x, self.w, 0) for x in self.exists]
        self.keys = [torch.where(x, y, -torch.inf) for x, y in zip(self.exists, self.k, strict=True)]
        self.start = torch.stack(_start(inputs, self.w), 1)[:, None]  # [N, 1, 3, D]
        self.maxima = []  # after each token, from the empty state
        m = torch.full_like(self.v[0], LOWEST)
        for decay, key in zip(self.decays, self.keys, strict=True):
            m = torch.maximum(decay + m, key).clamp(min=LOWEST).detach()
            self.maxima.append(m)

    def states(self) -> tuple[State, State]:
        """The state before each chunk, ``[B, 1, R, D]`` each, and after each sequence, ``[N, D]`` each."""
        a = b = torch.zeros_like(self.v[0])
        before = torch.full_like(a, LOWEST)
        for decay, key, v, m in zip(self.decays, self.keys, self.v, self.maxima, strict=True):
            kept, written = (decay + (before - m)).exp(), (key - m).exp()
            a, b, before = kept * a + written * v, kept * b + written, m

        def step(i: int, S: Tensor) -> Tensor:
            end = State(a[:, :, i], b[:, :, i], before[:, :, i])
            return torch.stack(join(State(*S.unbind(2)), end, self.w, self.elapsed[-1][:, :, i]), 2)

        S, end = self.chunks.pass_states(step, a.shape[2], self.start)
        return State(*S.unbind(3)), State(*end.squeeze(1).unbind(1))

    def steps(self, state: State) -> list[_Step]:
        """All tokens, from the state before each chunk."""
        first, steps = state.m, []
        for j, own in enumerate(self.maxima):
            m = torch.maximum(first + self.elapsed[j] * _finite(self.w), own).detach()
            state = State(state.a, state.b, state.m.detach())
            steps.append(_Step.of(state, m, self.k[j], self.v[j], self.u, self.decays[j], self.keys[j]))
            state = steps[-1].after(self.v[j])
        return steps

    def decay(self, m: Tensor, end: Tensor) -> Tensor:
        """The decay of a and b over a chunk, from the maximum before it and the one after it."""
        return (self.elapsed[-1] * _finite(self.w) + (m.detach() - end)).exp()
