"""HGRN, https://arxiv.org/abs/2311.04823: the hierarchically gated recurrent network's elementwise recurrence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.elementwise.scan import op


def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""HGRN's recurrence, computed in chunks: the form for training and for prompts.

    $$h_t = e^{g_t} \odot h_{t-1} + x_t \qquad o_t = h_t$$

    From "Hierarchically Gated Recurrent Neural Network for Sequence Modeling" (<https://arxiv.org/abs/2311.04823>),
    where $x_t = (1 - e^{g_t}) \odot i_t$ of an input $i_t$.

    Args:
        x: Inputs, ``[B, T, D]``, in float32, bfloat16, float16 or float64.
        g: Decay, ``[B, T, D]``, per token, as natural logarithms from 0 to -inf; any float dtype.
        initial_state: State before the first token, ``[N, D]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, D]`` in the dtype of `x`, or of autocast where it is on; `final_state` is
            ``[N, D]`` in float32 (float64 for float64 inputs), a new tensor, or None unless `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong.
        TypeError: If an argument has the wrong type or dtype.
    """
    inputs = op.Inputs(x, g, initial_state, cu_seqlens)
    check(op, inputs, output_final_state=output_final_state)
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_hgrn][flacompose.ops.chunk_hgrn], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, D]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, x, output_final_state, cu_seqlens, output_states)
    inputs = op.Inputs(x, g, initial_state, cu_seqlens)
    check(op, inputs)
    return run(form, inputs, wanted)
