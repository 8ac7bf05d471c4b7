"""Linear attention, https://arxiv.org/abs/2006.16236."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import TypeError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._tensors.dtype import autocast_dtype, autocast_on, upcast
from flacompose.ops._tensors.packed import sequence_count

LinearAttentionState = Tensor | tuple[Tensor, Tensor]


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: LinearAttentionState | None = None,
    output_final_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState | Any]:
    r"""Linear attention, computed in chunks: the form for training and for prompts.

    $$S_t = S_{t-1} + k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    and with `normalize`

    $$z_t = z_{t-1} + k_t \qquad
    o_t = \frac{\text{scale} \cdot S_t^\top q_t}{\text{scale} \cdot z_t^\top q_t + 10^{-10}}$$

    From "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention"
    (<https://arxiv.org/abs/2006.16236>), on queries and keys that have passed a feature map. Normalised outputs are
    weighted means of the values only if ``q`` and ``k`` are positive, as after the feature map of the paper.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``S`` ``[N, HV, K, V]`` in any float dtype; with `normalize` the
            tuple ``(S, z)``, ``z`` being ``[N, H, K]``. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        normalize: Whether to divide by the sum of the weights.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``S``, or ``(S, z)`` with `normalize`, new tensors in float32 (float64 for float64 inputs),
            or None unless `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, or `scale` is not finite.
        TypeError: If an argument has the wrong type or dtype.
    """
    return _run(op.chunk, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: LinearAttentionState | None = None,
    output_final_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, LinearAttentionState | Any]:
    """[chunk_linear_attn][flacompose.ops.chunk_linear_attn], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``, or with
            `normalize` a tuple of it and ``[N, n, H, K]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    return _run(form, q, k, v, scale, initial_state, wanted, normalize, cu_seqlens)


def _run(
    form: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: LinearAttentionState | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, LinearAttentionState | None]:
    require.flags(normalize=normalize, output_final_state=output_final_state)
    scale = require.scale(scale, q)
    if not normalize:
        if isinstance(initial_state, (tuple, list)):
            got = require.kind(initial_state)
            raise TypeError(f"initial_state must be a tensor S without normalize, got {got}")
        inputs = op.Inputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
        check(op, inputs)
        return run(form, inputs, output_final_state)

    S, z = None, None
    if initial_state is not None:
        if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
            raise TypeError(
                f"initial_state must be a tuple (S, z) with normalize, got {require.kind(initial_state)}"
            )
        S, z = initial_state
        require.tensor("initial_state[0]", S)
        require.tensor("initial_state[1]", z)
    inputs = op.Inputs(q, k, v, initial_state=S, cu_seqlens=cu_seqlens, scale=scale)
    check(op, inputs, {"initial_state": "initial_state[0]"})
    B, T, H, K = q.shape
    if z is not None:
        require.like(q, "initial_state[1]", z, (sequence_count(q, cu_seqlens), H, K))
        z = z.unsqueeze(-1)
    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    dtype = v.dtype
    # Nothing is rounded before the division, since numerator and denominator may be large and their gradients cancel.
    q, k, v = upcast(q), upcast(k), upcast(v)
    with nullcontext() if not autocast_on(q.device) else torch.autocast(q.device.type, enabled=False):
        o, S = form(*inputs._replace(q=q, k=k, v=v))
        # z is the state of the recurrence with a single value, 1.
        weight, z = form(*inputs._replace(q=q, k=k, v=q.new_ones(B, T, H, 1), initial_state=z))
    o = (o.unflatten(2, (H, -1)) / (weight + 1e-10).unsqueeze(3)).flatten(2, 3).to(dtype)
    return o, (S, z.squeeze(-1)) if output_final_state else None
