"""Chunked PyTorch of the selective scan, for every device without a Triton kernel.

    Delta_t = softplus(dt_t + dt_bias)        h_t = exp(Delta_t A) * h_{t-1} + Delta_t x_t B_t^T
    y_t = h_t C_t        o_t = (y_t + D x_t) * silu(z_t)

The states of all tokens would be S times as large as the inputs, so they are computed for one cache block of
chunks at a time. Within a block all chunks are scanned in parallel, token by token, twice: from zero, for the
transition of each chunk; and, after state passing from chunk to chunk, from the state before each. Exponents
are products of A and time steps, or of A and sums of time steps, and nothing is divided by their
exponentials. Backwards in time likewise; the states of a block are computed again from the states before its
chunks. Everything is functional and differentiable to any order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.gate_formulas import decays_to_zero, time_step
from flacompose.ops._tensors.packed import without_tail


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D, S])``."""
    inputs = _without_tail(inputs)
    y, final_state = _forward(inputs)
    return gated(inputs, y), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, inputs = call.wants, _without_tail(call.inputs)
    (do,) = without_tail(inputs.cu_seqlens, call.do)
    dy, dz = do, None
    if inputs.z is not None:
        dy, dz = of_gate(inputs, inputs.z, _forward(inputs)[0] if wants("z") else None, do)
    found = _backward(call, inputs, dy)
    if "x" in found and inputs.D is not None:
        skipped = upcast(dy, found["x"]) * inputs.D
        found["x"] = without_tail(inputs.cu_seqlens, found["x"] + skipped)[0]
    if "dt" in found and inputs.softplus:
        raw = time_step(inputs.dt, inputs.dt_bias, False, inputs.x)
        found["dt"] = found["dt"] * raw.sigmoid()
    return call.select(
        **found,
        D=lambda: (upcast(dy, inputs.x) * upcast(inputs.x)).sum((0, 1)),
        z=dz,
        dt_bias=lambda: found["dt"].sum((0, 1)),
    )


def gated(inputs: Inputs, y: Tensor) -> Tensor:
    """The output, a new tensor, from ``y [B, T, D]`` in the dtype of states."""
    if inputs.D is not None:
        y = y + upcast(inputs.x) * inputs.D
    if inputs.z is not None:
        y = y * F.silu(upcast(inputs.z, inputs.x))
    # A product of an infinite `D` with the zeros of a token in no sequence would be NaN.
    (y,) = without_tail(inputs.cu_seqlens, y)
    return y.to(inputs.x.dtype, copy=True)


def of_gate(inputs: Inputs, z: Tensor, y: Tensor | None, do: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of the gated sum and, from `y`, of `z`."""
    z, do = upcast(z, inputs.x), upcast(do)
    if y is None:
        return do * F.silu(z), None
    if inputs.D is not None:
        y = y + upcast(inputs.x) * inputs.D
    opened = z.sigmoid()
    (dz,) = without_tail(inputs.cu_seqlens, do * y * opened * (1 + z * (1 - opened)))
    return do * F.silu(z), dz


def _without_tail(inputs: Inputs) -> Inputs:
    """Zeros for tokens in no sequence: they add nothing to the gradients of `D` and `dt_bias`."""
    x, dt, z, cu_seqlens = inputs.x, inputs.dt, inputs.z, inputs.cu_seqlens
    x, dt = without_tail(cu_seqlens, x, dt)
    return inputs._replace(x=x, dt=dt, z=None if z is None else without_tail(cu_seqlens, z)[0])


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, S])`` in the dtype of states."""
    scan = _Scan(inputs)
    passing = StatePassing(scan.chunks, scan.initial(inputs.initial_state))
    y = []
    for chunks in scan.cache_blocks:
        block = _CacheBlock(scan, chunks)
        before = block.pass_states(passing, state_after(block.decays, block.writes))
        h = torch.stack(decayed_states(block.decays, block.writes, before)) + block.writes
        y.append((h @ block.C.unsqueeze(-1)).squeeze(-1))
    return scan.join(y).flatten(2), scan.final(passing)


def _backward(call: BackwardCall[Inputs], inputs: Inputs, dy: Tensor) -> Gradients:
    """The gradients of the scan that are wanted, those of time steps for `dt`."""
    wants, scan = call.wants, _Scan(inputs, dy)
    before = []
    if wants("dt", "dt_bias", "A", "C"):
        passing = StatePassing(scan.chunks, scan.initial(inputs.initial_state))
        for chunks in scan.cache_blocks:
            block = _CacheBlock(scan, chunks)
            before.append(block.pass_states(passing, state_after(block.decays, block.writes)))

    passing = StatePassing(scan.chunks, scan.initial(call.arriving.final_state), reverse=True)
    dx, ddt, dB, dC = [], [], [], []
    dA = torch.zeros_like(scan.A)
    for chunks in reversed(scan.cache_blocks):
        block = _CacheBlock(scan, chunks)
        x, dt = block.x, block.dt
        decays, reads = block.decays.unbind(), block.reads.unbind()
        after = block.pass_states(passing, gradient_before(decays, reads))
        if before:
            decayed = torch.stack(decayed_states(decays, block.writes, before.pop()))
        if wants("C"):
            dC.append((block.dy.unsqueeze(-2) @ (decayed + block.writes)).squeeze(-2))
        if not wants("x", "dt", "dt_bias", "A", "B"):
            continue
        dh = torch.stack(gradients(decays, reads, after))
        if wants("x", "dt", "dt_bias"):
            d_product = (dh @ block.B.unsqueeze(-1)).squeeze(-1)  # the gradient of dt * x
            dx.append(dt * d_product)
        if wants("dt", "dt_bias", "A"):
            d_exponent = dh * decayed
        if wants("dt", "dt_bias"):
            ddt.append(x * d_product + (d_exponent * scan.A_of_dt).sum(-1))
        if wants("A"):
            dA = dA + (d_exponent * dt.unsqueeze(-1)).sum((0, 1, 3)).unsqueeze(1)
        if wants("B"):
            dB.append(((dt * x).unsqueeze(-2) @ dh).squeeze(-2))
    found = {
        "x": lambda: scan.join(dx[::-1]).flatten(2).clone(),
        "dt": lambda: scan.join(ddt[::-1]).flatten(2).clone(),
        "A": lambda: dA.flatten(0, 2).clone(),
        "B": lambda: scan.join(dB[::-1]),
        "C": lambda: scan.join(dC[::-1]),
        "initial_state": lambda: scan.final(passing),
    }
    needed = call.wanted | ({"dt"} if wants("dt_bias") else set())
    return {name: make() for name, make in found.items() if name in needed}


class _Scan:
    """The chunks of one call, cut by `Chunks`: its heads are groups of P channels."""

    def __init__(self, inputs: Inputs, dy: Tensor | None = None) -> None:
        x, A, B, C, cu_seqlens = inputs.x, inputs.A, inputs.B, inputs.C, inputs.cu_seqlens
        dt = time_step(inputs.dt, inputs.dt_bias, inputs.softplus, x)
        self.groups = B.shape[2], x.shape[2] // B.shape[2]
        self.x, self.dt = (y.unflatten(2, self.groups) for y in (x, dt))
        self.dy = None if dy is None else dy.unflatten(2, self.groups)
        self.B, self.C = B, C
        self.chunks = Chunks(x, cu_seqlens)
        # A rate of -inf times a time step of 0 would be NaN.
        A = A.to(self.chunks.dtype).contiguous().unflatten(0, self.groups).unsqueeze(1)  # [G, 1, P, S]
        self.A = A.clamp(min=torch.finfo(A.dtype).min)
        self.A_of_dt = A.masked_fill(decays_to_zero(A), 0)
        self.cache_blocks = self.chunks.cache_blocks(self.chunks.B * self.chunks.size * A.numel())

    def initial(self, state: Tensor | None) -> Tensor:
        """A state, or the gradient of one, as ``[N, G, P, S]``."""
        if state is None:
            return self.A.new_zeros(self.chunks.N, *self.groups, self.A.shape[-1])
        return state.to(self.chunks.dtype).contiguous().unflatten(1, self.groups)

    def final(self, passing: StatePassing) -> Tensor:
        return passing.end().flatten(1, 2).clone()

    def join(self, blocks: list[Tensor]) -> Tensor:
        """``[B, T, G, ...]`` from the tokens of all cache blocks."""
        return self.chunks.join(*(x.movedim(0, 3) for x in blocks))


class _CacheBlock:
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
