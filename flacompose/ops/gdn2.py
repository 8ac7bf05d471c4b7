"""Gated DeltaNet-2, which erases and writes by gates of channels, https://arxiv.org/abs/2605.22791."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._operators.checked import check_values, checking
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._recurrences.matrix.eager import normalized
from flacompose.ops._tensors.dtype import autocast_dtype, product
from flacompose.ops._tensors.packed import without_tail
from flacompose.ops.gated_delta_rule import decay


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The delta rule of Gated DeltaNet-2, computed in chunks: the form for training and for prompts.

    $$S'_t = \operatorname{diag}(e^{g_t})\, S_{t-1} \qquad
    S_t = S'_t + k_t (w_t \odot v_t - {S'_t}^\top (b_t \odot k_t))^\top \qquad
    o_t = \text{scale} \cdot S_t^\top q_t$$

    ``b`` gates the erased value per channel of the key, and ``w`` gates the written value per channel of the value.
    With ``b = w = beta``, a number per head, it is [chunk_kda][flacompose.ops.chunk_kda]. The products ``b * k`` and
    ``w * v`` are rounded to the dtype of `k`. From "Gated DeltaNet-2"
    (<https://arxiv.org/abs/2605.22791>).

    A token multiplies the state by ``I - k (b k)^T``. If all channels of ``b`` are equal and from 0 to 2,
    and keys have norm 1, no token enlarges the state. Otherwise the norm of this factor may reach ``1 + |k| |b k|``,
    and the state may grow exponentially.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`; usually of norm 1.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        g: Decay of the key axis, ``[B, T, HV, K]``, per token, as natural logarithms from 0 to -inf; any float dtype.
            With `use_gate_in_kernel`, the input of the formula of the decay.
        b: Gate of the erased value, ``[B, T, H, K]``, usually from 0 to 1 or to 2; any float dtype.
        w: Gate of the written value, ``[B, T, HV, V]``, usually from 0 to 1; any float dtype.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether queries and keys are first divided by their norms,
            ``sqrt(sum of squares + 1e-6)``.
        use_gate_in_kernel: Whether the decay is ``-exp(A_log) * softplus(g + dt_bias)`` or, with `lower_bound`,
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        A_log: ``HV`` numbers in any shape, in any float dtype; given with `use_gate_in_kernel` alone. With
            `lower_bound` it may be absent, and its exponential is then 1.
        dt_bias: ``[HV, K]``, or as many numbers in another shape, in any float dtype; given with `use_gate_in_kernel`
            alone. Default: 0.
        lower_bound: The lowest decay, below 0 and finite; given with `use_gate_in_kernel` alone. Default: none.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` is not finite, `lower_bound`
            is not finite or not below 0, or an option comes without the option that it needs.
        TypeError: If an argument has the wrong type or dtype.
    """
    return _run(
        op.chunk, q, k, v, g, b, w, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, lower_bound, cu_seqlens,
    )  # fmt: skip


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_gdn2][flacompose.ops.chunk_gdn2], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    return _run(
        form, q, k, v, g, b, w, scale, initial_state, wanted, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, lower_bound, cu_seqlens,
    )  # fmt: skip


def _run(
    form: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalize: bool,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, apply the gates, and call one form of the delta rule's op."""
    scale = require.scale(scale, q)
    given = op.Inputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(op, given, output_final_state=output_final_state)
    require.like(q, "g", g, (*v.shape[:3], q.shape[3]))
    require.like(q, "b", b, k.shape)
    require.like(q, "w", w, v.shape)
    require.flags(use_qk_l2norm_in_kernel=normalize, use_gate_in_kernel=use_gate)
    if checking():
        check_values({"b": b, "w": w, "g": g}, cu_seqlens, () if use_gate else ("g",), lowest=("g",))
    g = decay(q, g, use_gate, A_log, dt_bias, lower_bound, cu_seqlens)
    q, k, v, b, w = without_tail(cu_seqlens, q, k, v, b, w)
    if normalize:
        q, k = normalized(q), normalized(k)
    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    erased, written = product(k, b), product(v, w)
    beta = torch.ones_like(written[..., 0])
    inputs = op.Inputs(
        q, k, written, gk=g, beta=beta, a=erased, initial_state=initial_state, cu_seqlens=cu_seqlens,
        scale=scale, delta_rule=True,
    )  # fmt: skip
    return run(form, inputs, output_final_state)
