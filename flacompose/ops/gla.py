"""Gated linear attention (GLA), https://arxiv.org/abs/2312.06635."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""Gated linear attention, computed in chunks: the form for training and for prompts.

    $$S_t = \operatorname{diag}(e^{g_t})\, S_{t-1} + k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    From "Gated Linear Attention Transformers with Hardware-Efficient Training" (<https://arxiv.org/abs/2312.06635>).

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, H, V]``, in the dtype of `q`.
        g: Decay of the key axis, ``[B, T, H, K]``, per token, as natural logarithms from 0 to -inf; any float dtype.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, H, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, H, V]`` in the dtype of `v`, or of autocast where it is on; `final_state`
            is ``[N, H, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, or `scale` is not finite.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = op.Inputs(q, k, v, gk=g, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(
        op, inputs, {"gk": "g"}, required=("gk",), shared_heads=False, output_final_state=output_final_state
    )
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""Gated linear attention, computed token by token: the form for decoding, one token at a time or a few.

    $$S_t = \operatorname{diag}(e^{gk_t})\, S_{t-1} \operatorname{diag}(e^{gv_t}) + k_t v_t^\top \qquad
    o_t = \text{scale} \cdot S_t^\top q_t$$

    With ``gk`` alone it is the same function as [chunk_gla][flacompose.ops.chunk_gla], derivatives included.
    From "Gated Linear Attention Transformers with Hardware-Efficient Training" (<https://arxiv.org/abs/2312.06635>).
    The other arguments, the results and the errors are as in [chunk_gla][flacompose.ops.chunk_gla].

    Args:
        gk: Decay of the key axis, ``[B, T, H, K]``, per token, as natural logarithms from 0 to -inf; any float dtype.
            Default: no decay.
        gv: Decay of the value axis, ``[B, T, H, V]``, likewise. Default: no decay.
        output_states: Number ``n`` of states to return instead of the final one: the states after each of the last
            ``n`` tokens of every row, from 1 to 16, and at most ``T``. The second result is then ``[N, n, H, K, V]``,
            the final state last. `output_final_state` is not needed, `cu_seqlens` is not allowed. Default: the final
            state alone, if `output_final_state`.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(q, k, v, gk=gk, gv=gv, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(op, inputs, shared_heads=False)
    return run(form, inputs, wanted)
