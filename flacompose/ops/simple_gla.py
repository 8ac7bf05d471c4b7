"""Simple GLA: gated linear attention with one decay per head, https://arxiv.org/abs/2405.21060 and 2312.06635."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""Linear attention with one decay per head and token, in chunks: the form for training and for prompts.

    $$S_t = e^{g_t + \gamma}\, S_{t-1} + \beta_t\, k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    The recurrence of Mamba-2, "Transformers are SSMs" (<https://arxiv.org/abs/2405.21060>), and a special case of
    "Gated Linear Attention Transformers with Hardware-Efficient Training" (<https://arxiv.org/abs/2312.06635>).

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        g: Decay per token, ``[B, T, HV]``, as natural logarithms from 0 to -inf; any float dtype. Default: none.
        g_gamma: Decay of every token, ``[HV]``, likewise. With `g` the two decays are multiplied. Default: none.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.
        beta: Weight of each token's write, ``[B, T, HV]``, in any float dtype, such as the time step of Mamba-2 or the
            input gate of mLSTM. Default: 1.

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
        q, k, v, g, g_gamma, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )
    check(op, inputs, output_final_state=output_final_state)
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_simple_gla][flacompose.ops.chunk_simple_gla], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, g, g_gamma, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale
    )
    check(op, inputs)
    return run(form, inputs, wanted)
