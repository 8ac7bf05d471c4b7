"""Chunked PyTorch of the elementwise scan, for every device without a Triton kernel.

    h_t = exp(g_t) * h_{t-1} + x_t        o_t = h_t

The decay of a chunk is the exponential of the sum of its gates, so a gate of -inf is a weight of 0 and nothing
cancels. Everything is functional and differentiable to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.scan.inputs import Inputs
from flacompose.ops._recurrences.elementwise.token_chunks import (
    TokenChunks,
    decayed_states,
    gradient_before,
    gradients,
    state_after,
)
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
    chunks = TokenChunks(x, cu_seqlens)
    writes, (decays, decay) = chunks.each(x), _decays(chunks, g)
    h, final_state = chunks.states(state_after(decays, writes), decay, initial_state)
    o = []
    for a, write in zip(decays, writes, strict=True):
        h = torch.addcmul(write, a, h)
        o.append(h)
    return chunks.together(o).to(x.dtype), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    x, g, initial_state, cu_seqlens = call.inputs
    chunks = TokenChunks(x, cu_seqlens)
    reads, (decays, decay) = chunks.each(call.do), _decays(chunks, g)
    decayed = []
    if call.wants("g"):
        writes = chunks.each(x)
        h, _ = chunks.states(state_after(decays, writes), decay, initial_state)
        decayed = decayed_states(decays, writes, h)
    d_final = call.arriving.final_state
    c, d_initial_state = chunks.states(gradient_before(decays, reads), decay, d_final, reverse=True)
    dh = gradients(decays, reads, c) if call.wants("x", "g") else []
    return call.select(
        x=lambda: chunks.together(dh),
        g=lambda: chunks.together([d * h for d, h in zip(dh, decayed, strict=True)]),
        initial_state=d_initial_state,
    )


def _decays(chunks: TokenChunks, g: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The decay of each place in a chunk, and of whole chunks, ``[B, 1, R, D]`` each."""
    gates = chunks.split(g.unsqueeze(2))
    return gates.exp().unbind(-2), gates.sum(-2).exp()
