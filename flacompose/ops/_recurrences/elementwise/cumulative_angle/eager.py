"""The cumulative angle in PyTorch, for every device without a Triton kernel.

    o_t = o_{t-1} + tanh(x_t) dt_t, modulo 2, from -1 to 1        states, in radians: pi o

The sums are in float64, since a turn is a small part of the sum of a long sequence.
"""

from __future__ import annotations

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.cumulative_angle.inputs import Inputs
from flacompose.ops._recurrences.elementwise.scan import eager as scan
from flacompose.ops._recurrences.elementwise.scan.inputs import Inputs as ScanInputs
from flacompose.ops._tensors.dtype import state_dtype, upcast
from flacompose.ops._tensors.packed import bounds, last_token, of_tokens, without_tail
from flacompose.ops._tensors.sizes import always_true, is_known


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, A], final_state [N, HV, A])``."""
    x, dt, initial_state, cu_seqlens = inputs
    dtype = state_dtype(x.dtype)
    speed, dt = _speed(inputs)
    start = None if initial_state is None else upcast(initial_state) / pi
    total = _sums(speed * dt, start, cu_seqlens)
    (o,) = without_tail(cu_seqlens, ((total + 1).remainder(2) - 1).to(dtype))
    if cu_seqlens is None:
        return o, pi * last_token(o, None, None)
    return o, last_token(pi * o, initial_state, cu_seqlens)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    x, dt, initial_state, cu_seqlens = call.inputs
    speed, dt = _speed(call.inputs)
    (do,) = without_tail(cu_seqlens, call.do)
    d_state = call.arriving.final_state
    # The gradient of a step is the sum of those of all later angles.
    cu = None if cu_seqlens is None else x.shape[1] - cu_seqlens.flip(0)
    flipped = (lambda y: y) if cu is None else (lambda y: y.flip(0))
    start = None if d_state is None else pi * flipped(d_state)
    steps = _sums(do.flip(1), start, cu)
    d_initial = flipped(last_token(steps, start, cu)) / pi
    (steps,) = without_tail(cu_seqlens, steps.flip(1).to(dt.dtype))
    return call.select(
        x=lambda: (steps * dt * (1 - speed.square())).unflatten(2, (x.shape[2], -1)).sum(3),
        dt=lambda: (steps * speed).sum(-1),
        initial_state=d_initial,
    )


def _speed(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``tanh(x)`` of each head, ``[B, T, HV, A]``, and ``dt [B, T, HV, 1]``, zeros for tokens in no sequence."""
    x, dt = without_tail(inputs.cu_seqlens, upcast(inputs.x), inputs.dt.to(state_dtype(inputs.x.dtype)))
    return x.tanh().repeat_interleave(dt.shape[2] // x.shape[2], 2), dt.unsqueeze(-1)


def _sums(x: Tensor, start: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The sums of ``x [B, T, H, A]`` up to each token of its sequence, from ``start [N, H, A]`` on, in float64.

    For packed sequences the values are differences of sums over the whole row. Their gradients would mix, and
    numbers that are not finite would reach other sequences, so gradients go through a scan of zeros.
    """
    T = x.shape[1]
    if cu_seqlens is None or always_true(T == 0):
        total = running(x)
        return total if start is None else total + start.unsqueeze(1)
    known = x.detach()
    sums = running(known.where(known.isfinite(), 0))
    before = (sums - known)[0, bounds(cu_seqlens, T)[:-1].clamp(max=T - 1)]
    zeros = (x - known).flatten(2)
    start = None if start is None else start.flatten(1)
    carried, _ = scan.forward(ScanInputs(zeros, torch.zeros_like(zeros), start, cu_seqlens))
    return sums - of_tokens(before, T, cu_seqlens) + carried.view_as(x)


def running(x: Tensor) -> Tensor:
    """The sums of ``x [B, T, ...]`` up to each token, in float64, by blocks of 32 tokens.

    One sum over a long row takes milliseconds on a GPU. A graph that leaves ``T`` open has one sum
    nevertheless.
    """
    T = x.shape[1]
    if always_true(T == 1):
        return x.double()
    first = torch.zeros_like(x[:, :1])
    if not is_known(T) or T <= 32:
        # The gradient of a sum of T numbers would guard on whether T is 1, which only the data may know. T +
        # 1 is not 1.
        return torch.cat([first, x], 1).cumsum(1, dtype=torch.float64)[:, 1:]
    padded = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, -T % 32))
    within = padded.unflatten(1, (-1, 32)).cumsum(2, dtype=torch.float64)
    before = torch.cat([first.double(), running(within[:, :, -1])[:, :-1]], 1)
    return (within + before.unsqueeze(2)).flatten(1, 2)[:, :T]
