"""The real-gated linear recurrent unit of Griffin, https://arxiv.org/abs/2402.19427, section 2.4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose._errors import TypeError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.elementwise.rg_lru import op


def chunk_rg_lru(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    a_param: Tensor,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The real-gated linear recurrent unit (RG-LRU), computed in chunks: the form for training and for prompts.

    $$a_t = \exp\bigl(-8 \operatorname{softplus}(a\_param) \odot \sigma(r_t)\bigr) \qquad
    h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot \sigma(i_t) \odot x_t \qquad o_t = h_t$$

    where $\sigma$ is the sigmoid. From "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models" (<https://arxiv.org/abs/2402.19427>), equations 1 to 4. Where ``reset`` is True, $a_t$ is 0 and the
    square root is 1, as in the code of Griffin and of RecurrentGemma at tokens of position 0. The first
    token of a sequence is no reset unless `reset` says so.

    Args:
        x: Inputs, ``[B, T, D]``, in float32, bfloat16, float16 or float64.
        r: Recurrence gates before their sigmoid, ``[B, T, D]``, in any float dtype.
        i: Input gates before their sigmoid, ``[B, T, D]``, in any float dtype.
        a_param: Rates of decay before softplus, ``[D]``, finite, in any float dtype.
        reset: Tokens that multiply the state by 0 and write their input with weight 1, ``[B, T]``, bool. A state that
            is infinite or NaN stays so. Default: none.
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
    require.flags(output_final_state=output_final_state)
    return run(op.chunk, _inputs(x, r, i, a_param, reset, initial_state, cu_seqlens), output_final_state)


def fused_recurrent_rg_lru(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    a_param: Tensor,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_rg_lru][flacompose.ops.chunk_rg_lru], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, D]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, x, output_final_state, cu_seqlens, output_states)
    return run(form, _inputs(x, r, i, a_param, reset, initial_state, cu_seqlens), wanted)


def _inputs(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    a_param: Tensor,
    reset: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> op.Inputs:
    """The checked arguments of the op."""
    inputs = op.Inputs(x, r, i, a_param, initial_state, None, cu_seqlens)
    check(op, inputs, logits=("r", "i", "a_param"))
    if reset is None:
        return inputs
    require.tensor("reset", reset)
    if reset.dtype != torch.bool:
        raise TypeError(f"reset must be bool, got {str(reset.dtype).removeprefix('torch.')}")
    require.shape_and_device(x, "reset", reset, x.shape[:2], "x")
    return inputs._replace(reset=reset.unsqueeze(2))
