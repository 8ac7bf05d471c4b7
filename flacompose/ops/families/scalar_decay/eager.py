"""Chunked PyTorch for scalar decay: what every device without a Triton kernel runs.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

Between chunks the state is swept. Within a chunk every pair of tokens ``t >= s`` meets with the weight
``exp(g_{s+1} + ... + g_t)``: sums of gates, never a difference of cumulative sums, so nothing overflows or cancels, and
a gate of -inf is a weight of 0.

Everything is functional, differentiable PyTorch, so derivatives of any order exist. Heads of values that share one of
queries and keys are a dimension ``n`` beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops.families._chunks import Chunks

# What `gate_kind` may be: all tokens have the same constant gates, of gradient 0; they have one gradient per token;
# or these are going to be summed over tokens, where they cancel, so that they have to be finer.
FIXED, PER_TOKEN, SUMMED = range(3)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    gate_kind: int,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    chunks = Chunks(q, cu_seqlens)
    q_, k_, v_ = _by_group(chunks, q, k, v)
    q_, decay = q_ * scale, _Decay(chunks, q, g)

    S, final_state = _sweep(chunks, k_ * decay.write, v_, decay, initial_state)
    o = (q_ * decay.read) @ S + (q_ @ k_.mT * decay.pair) @ v_
    return chunks.join(o.flatten(1, 2)).to(v.dtype), final_state


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    gate_kind: int,
    do: Tensor | None,
    d_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dg, d_initial_state)``, empty for inputs that are absent; `dg` is 0 for `FIXED` gates."""
    chunks = Chunks(q, cu_seqlens)
    do = torch.zeros_like(v) if do is None else do
    q_, k_, v_, do_ = _by_group(chunks, q, k, v, do)
    q_, decay = q_ * scale, _Decay(chunks, q, g)

    # From other chunks: S is what they wrote before this one, dS the gradient of what they read after it.
    S, _ = _sweep(chunks, k_ * decay.write, v_, decay, initial_state)
    dS, d_initial_state = _sweep(chunks, q_ * decay.read, do_, decay, d_final_state, reverse=True)
    dq, dk = do_ @ S.mT * decay.read, v_ @ dS.mT * decay.write

    # From this chunk, and together.
    A = q_ @ k_.mT
    dA = do_ @ v_.mT * decay.pair
    dv = (A * decay.pair).mT @ do_ + (k_ * decay.write) @ dS
    dg = None
    if g is not None:
        dg = g.new_zeros(g.shape)
        if gate_kind != FIXED:
            through = (S * dS).sum((-2, -1), keepdim=True) * decay.total
            dg = decay.gradient(A * dA, (q_ * dq).sum(-1, True), (k_ * dk).sum(-1, True), through)
            dg = chunks.join(dg.flatten(1, 2)).squeeze(-1)
    dA = dA.sum(2, True)
    dq, dk = dq.sum(2, True) + dA @ k_, dk.sum(2, True) + dA.mT @ q_

    def grad(x: Tensor | None, dx: Tensor | None) -> Tensor:
        return q.new_empty(0) if x is None or dx is None else dx.to(x.dtype)

    return (
        grad(q, chunks.join(dq.flatten(1, 2)) * scale),
        grad(k, chunks.join(dk.flatten(1, 2))),
        grad(v, chunks.join(dv.flatten(1, 2))),
        grad(g, dg),
        grad(initial_state, d_initial_state),
    )


def _by_group(chunks: Chunks, q: Tensor, *others: Tensor) -> list[Tensor]:
    """``[B, T, H * n, D]`` as chunks ``[B, H, n, R, C, D]``, `q` having H heads."""
    return [chunks.split(x).unflatten(1, (q.shape[2], -1)) for x in (q, *others)]


class _Decay:
    """The weights within each chunk, exponentials of sums of gates; without gates all 1.

    `pair` ``[..., t, s]`` joins a write to a later read, `read` and `write` ``[..., t, 1]`` a token to the start
    and the end of the chunk, `total` ``[..., 1, 1]`` those two.
    """

    def __init__(self, chunks: Chunks, q: Tensor, g: Tensor | None) -> None:
        ones = torch.ones(chunks.size, chunks.size, dtype=chunks.dtype, device=q.device)
        self.before = ones.tril(-1)  # [t, s], 1 where s < t
        if g is None:
            self.pair, self.read, self.write, self.total = ones.tril(), ones[0, 0], ones[0, 0], ones[0, 0]
            return
        (g,) = _by_group(chunks, q, g.unsqueeze(-1))[1:]
        sums = torch.where(self.before > 0, g, 0).cumsum(-2)  # [..., t, s], gates s + 1 to t
        self.pair = sums.exp().tril()
        self.read = g.cumsum(-2).exp()
        self.write = sums[..., -1:, :].mT.exp()
        self.total = self.read[..., -1:, :]

    def gradient(self, pair: Tensor, read: Tensor, write: Tensor, total: Tensor) -> Tensor:
        """The gradient of every gate ``[..., C, 1]``, from those of the sums that hold it."""
        from_here = 1 - self.before  # [j, t], 1 where t >= j
        met = (from_here @ pair * self.before).sum(-1, True)
        return met + from_here @ read + self.before @ write + total


def _sweep(
    chunks: Chunks, a: Tensor, x: Tensor, decay: _Decay, start: Tensor | None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The states of ``a^T x``, as `Chunks.sweep` returns them, by group."""
    decays = [] if decay.total.dim() == 0 else [decay.total.flatten(1, 2)]
    S, end = chunks.sweep((a.mT @ x).flatten(1, 2), decays, start, reverse)
    return S.unflatten(1, x.shape[1:3]), end
