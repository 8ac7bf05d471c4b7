"""Chunked PyTorch of head decay, for every device without a Triton kernel.

    S_t = exp(g_t + g_gamma) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

The state is passed from chunk to chunk. Within a chunk every pair of tokens ``t >= s`` has the weight
``exp(g_{s+1} + ... + g_t)``: sums of gates, never a difference of cumulative sums, so nothing overflows or
cancels, and a gate of -inf is a weight of 0. Heads of values that share queries and keys are a dimension
``n`` beside the head. Everything is functional and differentiable to any order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.chunks import Chunks
from flacompose.ops._recurrences.matrix.inputs import Inputs


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    q, k, v = inputs[:3]
    chunks = Chunks(q, inputs.cu_seqlens)
    q_, k_, v_ = _by_group(chunks, q, k, v)
    v_ = _times(v_, _strength(chunks, q, inputs.beta))
    q_, decay = q_ * inputs.scale, Decay(chunks, q, inputs.g, inputs.g_gamma)

    S, final_state = _sweep(chunks, k_ * decay.write, v_, decay, inputs.initial_state)
    o = (q_ * decay.read) @ S + ((q_ @ k_.mT).tril() * decay.pair) @ v_
    return chunks.join(o.flatten(1, 2)).to(v.dtype), final_state


def _gates(x: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor:
    """``[B, T, HV, 1]``, or ``[HV, 1]`` without `g`: the sum of both decays, in the dtype of `x`."""
    gates = [y.to(x.dtype) for y in (g, g_gamma) if y is not None]
    return sum(gates[1:], start=gates[0]).unsqueeze(-1)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, wants, gates = call.inputs, call.wants, ("g", "g_gamma")
    (q, k, v), scale = inputs[:3], inputs.scale
    chunks = Chunks(q, inputs.cu_seqlens)
    q_, k_, values, do_ = _by_group(chunks, q, k, v, call.do)
    strength = _strength(chunks, q, inputs.beta)
    v_ = _times(values, strength)  # the written values
    q_, decay = q_ * scale, Decay(chunks, q, inputs.g, inputs.g_gamma)

    # Through other chunks: S is the state before each chunk, dS the gradient of the state after it.
    if wants("q", *gates):
        S, _ = _sweep(chunks, k_ * decay.write, v_, decay, inputs.initial_state)
        dq = do_ @ S.mT * decay.read
    if wants("k", "v", "beta", "initial_state", *gates):
        dS, d_initial_state = _sweep(
            chunks, q_ * decay.read, do_, decay, call.arriving.final_state, reverse=True
        )
    if wants("k", *gates):
        dk = v_ @ dS.mT * decay.write

    # Within a chunk, and the sum of both.
    if wants("v", "beta", *gates):
        A = (q_ @ k_.mT).tril()
    if wants("q", "k", *gates):
        dA = (do_ @ v_.mT).tril() * decay.pair
    if wants(*gates):
        d_total = (S * dS).sum((-2, -1), keepdim=True) * decay.total
        dg = decay.gradient(A * dA, (q_ * dq).sum(-1, True), (k_ * dk).sum(-1, True), d_total)
        dg = chunks.join(dg.flatten(1, 2)).squeeze(-1)
    if wants("v", "beta"):
        d_written = (A * decay.pair).mT @ do_ + (k_ * decay.write) @ dS
    if wants("q", "k"):
        dA = dA.sum(2, True)

    return call.made(
        q=lambda: chunks.join((dq.sum(2, True) + dA @ k_).flatten(1, 2)) * scale,
        k=lambda: chunks.join((dk.sum(2, True) + dA.mT @ q_).flatten(1, 2)),
        v=lambda: chunks.join(_times(d_written, strength).flatten(1, 2)),
        g=lambda: dg,
        g_gamma=lambda: dg.sum((0, 1)),
        beta=lambda: chunks.join((d_written * values).sum(-1, True).flatten(1, 2)).squeeze(-1),
        initial_state=lambda: d_initial_state,
    )


def _by_group(chunks: Chunks, q: Tensor, *others: Tensor) -> list[Tensor]:
    """``[B, T, H * n, D]`` as chunks ``[B, H, n, R, C, D]``, `q` having H heads."""
    return [chunks.split(x).unflatten(1, (q.shape[2], -1)) for x in (q, *others)]


def _strength(chunks: Chunks, q: Tensor, beta: Tensor | None) -> Tensor | None:
    """`beta`, ``[B, H, n, R, C, 1]``."""
    return None if beta is None else chunks.split(beta.unsqueeze(-1)).unflatten(1, (q.shape[2], -1))


def _times(x: Tensor, strength: Tensor | None) -> Tensor:
    return x if strength is None else x * strength


class Decay:
    """The weights within each chunk, exponentials of sums of gates; without gates all 1.

    `pair` ``[..., t, s]`` is the decay from a write to a later read, and 1 elsewhere; `read` and `write`
    ``[..., t, 1]`` are the decays from the chunk's start to a token and from a token to its end, `total`
    ``[..., 1, 1]`` that of the chunk. With `read_before` a token reads before its own decay, so its sums of
    gates end at the token before it.
    """

    def __init__(
        self,
        chunks: Chunks,
        q: Tensor,
        g: Tensor | None,
        g_gamma: Tensor | None,
        read_before: bool = False,
    ) -> None:
        self.read_before = read_before
        ones = torch.ones(chunks.size, chunks.size, dtype=chunks.dtype, device=q.device)
        self.before = ones.tril(-1)  # [t, s], 1 where s < t
        if g is None and g_gamma is None:
            self.pair = self.read = self.write = self.total = ones[0, 0]
            return
        gates = _gates(ones, g, g_gamma)
        if g is None:
            gates = gates.expand(*q.shape[:2], -1, 1)
        # Padding is no token, and does not decay.
        g = chunks.split(gates).unflatten(1, (q.shape[2], -1))
        sums = torch.where(self.before > 0, g, 0).cumsum(-2)  # [..., t, s], gates s + 1 to t
        since_start = g.cumsum(-2)
        self.write = sums[..., -1:, :].mT.exp()
        self.total = since_start[..., -1:, :].exp()
        if read_before:
            sums, since_start = (F.pad(x, (0, 0, 1, -1)) for x in (sums, since_start))
        self.pair, self.read = sums.exp(), since_start.exp()

    def gradient(self, pair: Tensor, read: Tensor, write: Tensor, total: Tensor) -> Tensor:
        """The gradient of every gate ``[..., C, 1]``, from the gradients of the sums that contain it."""
        if self.read_before:
            pair, read = (F.pad(x, (0, 0, -1, 1)) for x in (pair, read))
        until_here = 1 - self.before.mT  # [t, j], 1 where t >= j
        # Vectors are rows of one matrix product, so that the matrix of sums is not copied for each.
        pairs = (pair @ self.before.mT * until_here).sum(-2, True)
        return (pairs + read.mT @ until_here + write.mT @ self.before.mT).mT + total


def _sweep(
    chunks: Chunks, a: Tensor, x: Tensor, decay: Decay, start: Tensor | None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The states of ``a^T x``, by group, in the form of `Chunks.decaying_sweep`."""
    decays = [] if decay.total.dim() == 0 else [decay.total.flatten(1, 2)]
    S, end = chunks.decaying_sweep((a.mT @ x).flatten(1, 2), decays, start, reverse)
    return S if S.dim() == 2 else S.unflatten(1, x.shape[1:3]), end
