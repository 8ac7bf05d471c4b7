"""The delta rule, https://arxiv.org/abs/2406.06484."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._recurrences.matrix.eager import normalized
from flacompose.ops._tensors.packed import without_tail


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The delta rule, computed in chunks: the form for training and for prompts.

    $$S_t = S_{t-1} + \beta_t\, k_t (v_t - S_{t-1}^\top k_t)^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    A token replaces the value stored under its key, completely if ``beta`` is 1 and the key has norm 1.
    From "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
    (<https://arxiv.org/abs/2406.06484>).

    A token multiplies the state along its key by ``1 - beta |k|^2``. While this factor is between -1 and 1, as for
    keys of norm 1 and ``beta`` from 0 to 2, the state grows at most linearly in time. Otherwise it may grow
    exponentially.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`; usually of norm 1.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        beta: Share of the stored value that is replaced, ``[B, T, HV]``, usually from 0 to 1 or to 2; any float dtype.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether queries and keys are first divided by their norms,
            ``sqrt(sum of squares + 1e-6)``.
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
    inputs = op.Inputs(
        q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, delta_rule=True
    )
    check(op, inputs, required=("beta",), output_final_state=output_final_state)
    require.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if use_qk_l2norm_in_kernel:
        inputs = with_norms(inputs)
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_delta_rule][flacompose.ops.chunk_delta_rule], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, delta_rule=True
    )
    check(op, inputs, required=("beta",))
    require.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if use_qk_l2norm_in_kernel:
        inputs = with_norms(inputs)
    return run(form, inputs, wanted)


def with_norms(inputs: op.Inputs) -> op.Inputs:
    """`inputs` with normalised queries and keys."""
    q, k = map(normalized, without_tail(inputs.cu_seqlens, inputs.q, inputs.k))
    return inputs._replace(q=q, k=k)
