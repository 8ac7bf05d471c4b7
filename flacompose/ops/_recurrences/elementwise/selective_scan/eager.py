"""Chunked PyTorch of the selective scan, for every device without a Triton kernel.

    h_t = exp(dt_t A) * h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t

The states of all tokens would be S times as large as the inputs, so they are computed for one cache block of
chunks at a time. Within a block all chunks are scanned in parallel, token by token, twice: from zero, for the
transition of each chunk; and, after state passing from chunk to chunk, from the state before each. Exponents
are products of A and time steps, or of A and sums of time steps, and nothing is divided by their
exponentials. Backwards in time likewise; the states of a block are computed again from the states before its
chunks. Everything is functional and differentiable to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.elementwise.selective_scan.inputs import Inputs
from flacompose.ops._recurrences.elementwise.token_chunks import (
    decayed_states,
    gradient_before,
    gradients,
    state_after,
)
from flacompose.ops._tensors.gates import decays_to_zero


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, S])``."""
    scan = _Scan(inputs)
    passing = StatePassing(scan.chunks, scan.initial(inputs.initial_state))
    y = []
    for chunks in scan.segments:
        segment = _Segment(scan, chunks)
        before = segment.pass_states(passing, state_after(segment.decays, segment.writes))
        h = torch.stack(decayed_states(segment.decays, segment.writes, before)) + segment.writes
        y.append((h @ segment.C.unsqueeze(-1)).squeeze(-1))
    return scan.join(y).flatten(2).to(inputs.x.dtype, copy=True), scan.final(passing)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants = call.wants
    scan = _Scan(call.inputs, call.do)
    before = []
    if wants("dt", "A", "C"):
        passing = StatePassing(scan.chunks, scan.initial(call.inputs.initial_state))
        for chunks in scan.segments:
            segment = _Segment(scan, chunks)
            before.append(segment.pass_states(passing, state_after(segment.decays, segment.writes)))

    passing = StatePassing(scan.chunks, scan.initial(call.arriving.final_state), reverse=True)
    dx, ddt, dB, dC = [], [], [], []
    dA = torch.zeros_like(scan.A)
    for chunks in reversed(scan.segments):
        segment = _Segment(scan, chunks)
        x, dt = segment.x, segment.dt
        decays, reads = segment.decays.unbind(), segment.reads.unbind()
        after = segment.pass_states(passing, gradient_before(decays, reads))
        if wants("dt", "A", "C"):
            decayed = torch.stack(decayed_states(decays, segment.writes, before.pop()))
        if wants("C"):
            dC.append((segment.dy.unsqueeze(-2) @ (decayed + segment.writes)).squeeze(-2))
        if not wants("x", "dt", "A", "B"):
            continue
        dh = torch.stack(gradients(decays, reads, after))
        if wants("x", "dt"):
            d_product = (dh @ segment.B.unsqueeze(-1)).squeeze(-1)  # the gradient of dt * x
            dx.append(dt * d_product)
        if wants("dt", "A"):
            d_exponent = dh * decayed
        if wants("dt"):
            ddt.append(x * d_product + (d_exponent * scan.A_of_dt).sum(-1))
        if wants("A"):
            dA = dA + (d_exponent * dt.unsqueeze(-1)).sum((0, 1, 3)).unsqueeze(1)
        if wants("B"):
            dB.append(((dt * x).unsqueeze(-2) @ dh).squeeze(-2))
    return call.made(
        x=lambda: scan.join(dx[::-1]).flatten(2).clone(),
        dt=lambda: scan.join(ddt[::-1]).flatten(2).clone(),
        A=lambda: dA.flatten(0, 2).clone(),
        B=lambda: scan.join(dB[::-1]),
        C=lambda: scan.join(dC[::-1]),
        initial_state=lambda: scan.final(passing),
    )


class _Scan:
    """The chunks of one call, cut by `Chunks`: its heads are groups of P channels."""

    def __init__(self, inputs: Inputs, dy: Tensor | None = None) -> None:
        x, dt, A, B, C, _, cu_seqlens = inputs
        self.groups = B.shape[2], x.shape[2] // B.shape[2]
        self.x, self.dt = (y.unflatten(2, self.groups) for y in (x, dt))
        self.dy = None if dy is None else dy.unflatten(2, self.groups)
        self.B, self.C = B, C
        self.chunks = Chunks(x, cu_seqlens)
        # A rate of -inf times a time step of 0 would be NaN.
        A = A.to(self.chunks.dtype).contiguous().unflatten(0, self.groups).unsqueeze(1)  # [G, 1, P, S]
        self.A = A.clamp(min=torch.finfo(A.dtype).min)
        self.A_of_dt = A.masked_fill(decays_to_zero(A), 0)
        self.segments = self.chunks.cache_blocks(self.chunks.B * self.chunks.size * A.numel())

    def initial(self, state: Tensor | None) -> Tensor:
        """A state, or the gradient of one, as ``[N, G, P, S]``."""
        if state is None:
            return self.A.new_zeros(self.chunks.N, *self.groups, self.A.shape[-1])
        return state.to(self.chunks.dtype).contiguous().unflatten(1, self.groups)

    def final(self, passing: StatePassing) -> Tensor:
        return passing.end().flatten(1, 2).clone()

    def join(self, segments: list[Tensor]) -> Tensor:
        """``[B, T, G, ...]`` from the tokens of all cache blocks."""
        return self.chunks.join(*(x.movedim(0, 3) for x in segments))


class _Segment:
    """The tokens of a cache block, as tensors ``[C, B, G, R, ...]``, the place in a chunk first."""

    def __init__(self, scan: _Scan, chunks: Chunks) -> None:
        def split(x: Tensor) -> Tensor:
            return chunks.split(x).movedim(3, 0).contiguous()

        self.A, self.at = scan.A, chunks.at
        self.x, self.dt = split(scan.x), split(scan.dt)  # [C, B, G, R, P]
        self.B, self.C = split(scan.B), split(scan.C)  # [C, B, G, R, S]
        self.decays = (self.dt.unsqueeze(-1) * self.A).exp()  # [C, B, G, R, P, S]
        self.writes = (self.dt * self.x).unsqueeze(-1) * self.B.unsqueeze(-2)
        if scan.dy is not None:
            self.dy = split(scan.dy)
            # The gradients of states from the outputs of their tokens.
            self.reads = self.dy.unsqueeze(-1) * self.C.unsqueeze(-2)

    def pass_states(self, passing: StatePassing, ends: Tensor) -> Tensor:
        """State passing over these chunks: the state before each; backwards, its gradient after each."""
        total = (self.dt.sum(0).unsqueeze(-1) * self.A).exp()
        return passing.over(self.at, lambda i, S: torch.addcmul(ends[:, :, i], total[:, :, i], S))
