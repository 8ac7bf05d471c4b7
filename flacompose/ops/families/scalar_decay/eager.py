"""Chunked PyTorch for scalar decay: what every device without a Triton kernel runs.

    S_t = exp(g_t + g_gamma) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Between chunks the state is swept. Within a chunk every pair of tokens ``t >= s`` meets with the weight
``exp(g_{s+1} + ... + g_t)``: sums of gates, never a difference of cumulative sums, so nothing overflows or cancels, and
a gate of -inf is a weight of 0. Heads of values that share one of queries and keys are a dimension ``n`` beside it.
All is functional and differentiable to any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flacompose.ops._dtype import upcast
from flacompose.ops.families._chunks import Chunks, gradients
from flacompose.ops.families.scalar_decay.inputs import Inputs


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    q, k, v, g, g_gamma, beta, initial_state, cu_seqlens, scale = inputs
    if q.shape[1] == 1 and cu_seqlens is None:
        return _token(inputs)
    chunks = Chunks(q, cu_seqlens)
    q_, k_, v_ = _by_group(chunks, q, k, v)
    v_ = _times(v_, _strength(chunks, q, beta))
    q_, decay = q_ * scale, Decay(chunks, q, g, g_gamma)

    S, final_state = _sweep(chunks, k_ * decay.write, v_, decay, initial_state)
    o = (q_ * decay.read) @ S + ((q_ @ k_.mT).tril() * decay.pair) @ v_
    return chunks.join(o.flatten(1, 2)).to(v.dtype), final_state


def _token(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`forward` of one token: the recurrence itself."""
    q, k, v, g, g_gamma, beta, initial_state, _, scale = inputs
    q_, k_, v_ = (upcast(x[:, 0]) for x in (q, k, v))  # [B, H, D]
    if beta is not None:
        v_ = v_ * beta[:, 0].to(v_.dtype).unsqueeze(-1)
    H, HV = q.shape[2], v.shape[2]
    if HV != H:
        q_, k_ = (x.repeat_interleave(HV // H, 1) for x in (q_, k_))
    S = k_.unsqueeze(-1) * v_.unsqueeze(-2)
    if initial_state is not None:
        before = initial_state.to(S.dtype)
        if g is not None or g_gamma is not None:
            before = before * _gates(q_, None if g is None else g[:, 0], g_gamma).exp().unsqueeze(-1)
        S = S + before
    o = ((q_ * scale).unsqueeze(-2) @ S).squeeze(-2)
    return o.unsqueeze(1).to(v.dtype, copy=True), S.contiguous()  # an op returns no view


def _gates(x: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor:
    """``[B, T, HV, 1]``, or ``[HV, 1]`` without `g`: the sum of both decays, in the dtype of `x`."""
    gates = [y.to(x.dtype) for y in (g, g_gamma) if y is not None]
    return sum(gates[1:], start=gates[0]).unsqueeze(-1)


def backward(
    inputs: Inputs, do: Tensor | None, d_final_state: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, dg, dg_gamma, dbeta, d_initial_state)``, empty where `output_mask` is False or an input absent."""
    q, k, v, g, g_gamma, beta, initial_state, cu_seqlens, scale = inputs
    want_q, want_k, want_v, want_g, want_g_gamma, want_beta, want_state = output_mask
    gates_wanted = want_g or want_g_gamma
    chunks = Chunks(q, cu_seqlens)
    do = torch.zeros_like(v) if do is None else do
    q_, k_, values, do_ = _by_group(chunks, q, k, v, do)
    strength = _strength(chunks, q, beta)
    v_ = _times(values, strength)  # what is written
    q_, decay = q_ * scale, Decay(chunks, q, g, g_gamma)

    # From other chunks: S is what they wrote before this one, dS the gradient of what they read after it.
    if want_q or gates_wanted:
        S, _ = _sweep(chunks, k_ * decay.write, v_, decay, initial_state)
        dq = do_ @ S.mT * decay.read
    if want_k or want_v or want_beta or gates_wanted or want_state:
        dS, d_initial_state = _sweep(chunks, q_ * decay.read, do_, decay, d_final_state, reverse=True)
    if want_k or gates_wanted:
        dk = v_ @ dS.mT * decay.write

    # From this chunk, and together.
    if want_v or want_beta or gates_wanted:
        A = (q_ @ k_.mT).tril()
    if want_q or want_k or gates_wanted:
        dA = (do_ @ v_.mT).tril() * decay.pair
    if gates_wanted:
        d_total = (S * dS).sum((-2, -1), keepdim=True) * decay.total
        dg = decay.gradient(A * dA, (q_ * dq).sum(-1, True), (k_ * dk).sum(-1, True), d_total)
        dg = chunks.join(dg.flatten(1, 2)).squeeze(-1)
    if want_v or want_beta:
        d_written = (A * decay.pair).mT @ do_ + (k_ * decay.write) @ dS
    if want_q or want_k:
        dA = dA.sum(2, True)

    return gradients(
        inputs,
        output_mask,
        lambda: chunks.join((dq.sum(2, True) + dA @ k_).flatten(1, 2)) * scale,
        lambda: chunks.join((dk.sum(2, True) + dA.mT @ q_).flatten(1, 2)),
        lambda: chunks.join(_times(d_written, strength).flatten(1, 2)),
        lambda: dg,
        lambda: dg.sum((0, 1)),
        lambda: chunks.join((d_written * values).sum(-1, True).flatten(1, 2)).squeeze(-1),
        lambda: d_initial_state,
    )


def _by_group(chunks: Chunks, q: Tensor, *others: Tensor) -> list[Tensor]:
    """``[B, T, H * n, D]`` as chunks ``[B, H, n, R, C, D]``, `q` having H heads."""
    return [chunks.split(x).unflatten(1, (q.shape[2], -1)) for x in (q, *others)]


def _strength(chunks: Chunks, q: Tensor, beta: Tensor | None) -> Tensor | None:
    """How strongly tokens are written, ``[B, H, n, R, C, 1]``."""
    return None if beta is None else chunks.split(beta.unsqueeze(-1)).unflatten(1, (q.shape[2], -1))


def _times(x: Tensor, strength: Tensor | None) -> Tensor:
    return x if strength is None else x * strength


class Decay:
    """The weights within each chunk, exponentials of sums of gates; without gates all 1.

    `pair` ``[..., t, s]`` joins a write to a later read, and is 1 where there is none; `read` and `write`
    ``[..., t, 1]`` join a token to the start and the end of the chunk, `total` ``[..., 1, 1]`` those two.
    """

    def __init__(self, chunks: Chunks, q: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> None:
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
        self.pair = sums.exp()
        self.read = g.cumsum(-2).exp()
        self.write = sums[..., -1:, :].mT.exp()
        self.total = self.read[..., -1:, :]

    def gradient(self, pair: Tensor, read: Tensor, write: Tensor, total: Tensor) -> Tensor:
        """The gradient of every gate ``[..., C, 1]``, from those of the sums that hold it."""
        until_here = 1 - self.before.mT  # [t, j], 1 where t >= j
        # Vectors are multiplied as rows of one matrix, not each as a column by its own copy of the sums.
        pairs = (pair @ self.before.mT * until_here).sum(-2, True)
        return (pairs + read.mT @ until_here + write.mT @ self.before.mT).mT + total


def _sweep(
    chunks: Chunks, a: Tensor, x: Tensor, decay: Decay, start: Tensor | None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The states of ``a^T x``, as `Chunks.decaying_sweep` returns them, by group."""
    decays = [] if decay.total.dim() == 0 else [decay.total.flatten(1, 2)]
    S, end = chunks.decaying_sweep((a.mT @ x).flatten(1, 2), decays, start, reverse)
    return S if S.dim() == 2 else S.unflatten(1, x.shape[1:3]), end
