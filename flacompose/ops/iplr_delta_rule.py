"""Identity plus low rank, the generalized delta rule without a decay, https://arxiv.org/abs/2406.06484."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op


def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The generalized delta rule without a decay, identity plus low rank: the form for training and for prompts.

    $$S_t = S_{t-1} + b_t (S_{t-1}^\top a_t)^\top + k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    ``a`` reads the state, and ``b`` writes the result back. With ``a = -k`` and ``b = beta k`` a token erases as in the
    delta rule. "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
    (<https://arxiv.org/abs/2406.06484>) names this generalisation. The growth of states is described at
    [chunk_dplr_delta_rule][flacompose.ops.chunk_dplr_delta_rule].

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, H, V]``, in the dtype of `q`.
        a: Vectors that read the state, ``[B, T, H, K]``, in the dtype of `q`.
        b: Vectors that write the result of the read back, ``[B, T, H, K]``, in the dtype of `q`.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, H, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, H, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, H, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, or `scale` is not finite.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, read_before=True
    )
    check(op, inputs, required=("a", "b"), shared_heads=False, output_final_state=output_final_state)
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_iplr_delta_rule][flacompose.ops.chunk_iplr_delta_rule], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, H, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, read_before=True
    )
    check(op, inputs, required=("a", "b"), shared_heads=False)
    return run(form, inputs, wanted)
