"""Chunked PyTorch of the elementwise scan, for every device without a Triton kernel.

    h_t = exp(g_t) * h_{t-1} + x_t        o_t = h_t

All chunks are scanned in parallel, token by token, twice: from zero, for the transition of each chunk; and,
after state passing from chunk to chunk, from the state before each. The decay of a chunk is the exponential
of the sum of its gates, so a gate of -inf is a weight of 0 and nothing cancels. Backwards in time likewise.
Everything is functional and differentiable to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.chunks import Chunks
from flacompose.ops._recurrences.elementwise.scan.inputs import Inputs
from flacompose.ops._tensors.dtype import upcast


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    x, g, initial_state, cu_seqlens = inputs
    if x.shape[1] == 1 and cu_seqlens is None:
        h = upcast(x[:, 0])
        if initial_state is not None:
            h = torch.addcmul(h, g[:, 0].to(h.dtype).exp(), initial_state.to(h.dtype))
        h = h.clone(memory_format=torch.contiguous_format)
        return h.unsqueeze(1).to(x.dtype, copy=True), h  # an op returns no view
    scan = _Scan(x, g, cu_seqlens)
    x_ = scan.tokens(x)
    h, final_state = scan.states(x_, initial_state)
    o = []
    for a, x_t in zip(scan.decay, x_, strict=True):
        h = torch.addcmul(x_t, a, h)
        o.append(h)
    return scan.join(o).to(x.dtype), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    x, g, initial_state, cu_seqlens = call.inputs
    scan = _Scan(x, g, cu_seqlens)
    x_, do_ = scan.tokens(x), scan.tokens(call.do)
    # exp(g_t) * h_{t-1}, the decayed state.
    left = []
    if call.wants("g"):
        h, _ = scan.states(x_, initial_state)
        for a, x_t in zip(scan.decay, x_, strict=True):
            left.append(a * h)
            h = left[-1] + x_t

    # dh_t = do_t + exp(g_{t+1}) * dh_{t+1}; `dh` is its second term.
    dh, d_initial_state = scan.states(do_, call.arriving.final_state, reverse=True)
    dx = []
    if call.wants("x", "g"):
        for a, do_t in zip(reversed(scan.decay), reversed(do_), strict=True):
            dx.append(do_t + dh)
            dh = a * dx[-1]
        dx.reverse()
    return call.made(
        x=lambda: scan.join(dx),
        g=lambda: scan.join([d * h for d, h in zip(dx, left, strict=True)]),
        initial_state=d_initial_state,
    )


class _Scan:
    """The chunks of one call, cut by `Chunks`: one head, with keys of size 1."""

    def __init__(self, x: Tensor, g: Tensor, cu_seqlens: Tensor | None) -> None:
        self.chunks = Chunks(x, cu_seqlens)
        gates = self._split(g)
        self.decay = gates.exp().unbind(-2)
        self.total = gates.sum(-2, keepdim=True).exp()  # [B, 1, R, 1, D]

    def _split(self, x: Tensor) -> Tensor:
        return self.chunks.split(x.unsqueeze(2))

    def tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x [B, T, D]`` as ``[B, 1, R, D]`` for each token of a chunk."""
        return self._split(x).unbind(-2)

    def join(self, tokens: list[Tensor]) -> Tensor:
        x = self.chunks.tokens(torch.stack(tokens, -2)).squeeze(1)
        return x.clone(memory_format=torch.contiguous_format)  # an op returns no view

    def states(
        self, x: tuple[Tensor, ...], start: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The state before each chunk, ``[B, 1, R, D]``, and after the last of each sequence, ``[N, D]``.

        With `reverse`, backwards in time, where ``exp(g_t) * dh_t`` is passed on.
        """
        h = torch.zeros_like(x[0])
        if reverse:
            for a, x_t in zip(reversed(self.decay), reversed(x), strict=True):
                h = a * (x_t + h)
        else:
            for a, x_t in zip(self.decay, x, strict=True):
                h = torch.addcmul(x_t, a, h)
        start = None if start is None else start[:, None, None]
        S, end = self.chunks.pass_decayed(h.unsqueeze(-2), [self.total], start, reverse)
        return S.squeeze(-2), end.flatten(1).clone()
