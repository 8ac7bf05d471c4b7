"""Attention with bounded memory (ABC), https://arxiv.org/abs/2110.02488."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._recurrences.matrix import op
from flacompose.ops.gsa import run


def chunk_abc(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...] | Any]:
    r"""Attention with bounded memory, computed in chunks: the form for training and for prompts.

    $$\tilde{k}_t = \sum_{i \le t} \operatorname{softmax}(s_{\le t})_i\, k_i \qquad
    \tilde{v}_t = \sum_{i \le t} \operatorname{softmax}(s_{\le t})_i\, v_i \qquad
    o_t = \sum_m \operatorname{softmax}_m(\text{scale} \cdot \tilde{k}_{t, m}^\top q_t)\, \tilde{v}_{t, m}$$

    for each slot ``m``. From "ABC: Attention with Bounded-memory Control" (<https://arxiv.org/abs/2110.02488>). It is
    [chunk_gsa][flacompose.ops.chunk_gsa] without gates. For its recurrent form call
    [fused_recurrent_gsa][flacompose.ops.fused_recurrent_gsa] without gates.

    Args:
        q: Queries, ``[B, T, HQ, K]``, in float32, bfloat16, float16 or float64. ``HQ`` is a multiple of ``H``, and
            query head ``h`` uses head ``h // (HQ / H)`` of keys and values.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, H, V]``, in the dtype of `q`.
        s: Logits of the write to each of ``M`` slots, ``[B, T, H, M]``, finite or -inf; any float dtype.
        scale: Factor of the second softmax's logits. Default: ``K ** -0.5``.
        initial_state: State before the first token, the tuple ``(Hk, Hv, z)``, ``[N, H, K, M]``, ``[N, H, M, V]`` and
            ``[N, H, M]``, the means of keys and of values and the logsumexp of ``s``, in any float dtype. Default:
            zeros, and ``z`` of -inf.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HQ, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``(Hk, Hv, z)``, new tensors in float32 (float64 for float64 inputs), or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``M`` is above 512, or `scale` is not finite.
        TypeError: If an argument has the wrong type or dtype.
    """
    return run(op.chunk, q, k, v, s, None, scale, initial_state, output_final_state, cu_seqlens)
