"""RWKV6 (Finch), https://arxiv.org/abs/2404.05892, section 4."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The recurrence of RWKV6, computed in chunks: the form for training and for prompts.

    $$o_t = \text{scale} \cdot (S_{t-1} + \operatorname{diag}(u)\, k_t v_t^\top)^\top r_t \qquad
    S_t = \operatorname{diag}(e^{w_t})\, S_{t-1} + k_t v_t^\top$$

    From "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"
    (<https://arxiv.org/abs/2404.05892>). The query reads the state before the token's decay and write. The bonus ``u``
    weights the token's own contribution.

    Args:
        r: Receptances, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `r`.
        v: Values, ``[B, T, H, V]``, in the dtype of `r`.
        w: Decay of the key axis, ``[B, T, H, K]``, per token, as natural logarithms from 0 to -inf; any float dtype.
        u: Bonus of the current token, ``[H, K]``; any float dtype.
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
    scale = require.scale(scale, r)
    inputs = op.Inputs(r, k, v, gk=w, u=u, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(
        op,
        inputs,
        {"q": "r", "gk": "w"},
        required=("gk", "u"),
        shared_heads=False,
        output_final_state=output_final_state,
    )
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_rwkv6][flacompose.ops.chunk_rwkv6], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, H, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, r, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, r)
    inputs = op.Inputs(r, k, v, gk=w, u=u, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(op, inputs, {"q": "r", "gk": "w"}, required=("gk", "u"), shared_heads=False)
    return run(form, inputs, wanted)
