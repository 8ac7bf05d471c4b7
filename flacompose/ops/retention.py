"""Retention, https://arxiv.org/abs/2307.08621."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._tensors.dtensor import replicated
from flacompose.ops._tensors.dtype import state_dtype


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""Retention, computed in chunks: the form for training and for prompts.

    $$S_t = (1 - 2^{-5-h})\, S_{t-1} + k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    for head $h = 0, 1, \dots$ From "Retentive Network: A Successor to Transformer for Large Language Models"
    (<https://arxiv.org/abs/2307.08621>). Its rotary embedding, norm and gate are parts of the layer.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys. ``h`` in the decay counts value heads.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, or `scale` is not finite.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = op.Inputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(op, inputs, output_final_state=output_final_state)
    inputs = inputs._replace(g_gamma=log_decay(v.shape[2], q))
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_retention][flacompose.ops.chunk_retention], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(op, inputs)
    inputs = inputs._replace(g_gamma=log_decay(v.shape[2], q))
    return run(form, inputs, wanted)


def log_decay(HV: int, q: Tensor) -> Tensor:
    """The decays ``log(1 - 2 ** (-5 - h))``, ``[HV]``, in float32 (float64 for float64 queries `q`)."""
    dtype = state_dtype(q.dtype)
    power = torch.logspace(-5, -4 - HV, HV, base=2.0, dtype=dtype, device=q.device)
    # log1p keeps the digits that `1 - power` would round off.
    return replicated(power.neg_().log1p_(), q)
