"""The short causal convolution in front of a recurrence, as in Mamba, https://arxiv.org/abs/2312.00752."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._arguments import intermediate_states, require
from flacompose.ops._arguments.call import check
from flacompose.ops._parallel.exchange import last_tokens
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._recurrences.short_conv import op
from flacompose.ops._tensors.dtype import autocast_dtype, upcast


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""Depthwise causal convolution over time, with explicit state: the form for training, prompts and single tokens.

    $$y_t = \operatorname{activation}\Bigl(\text{bias} + \sum_{w=0}^{W-1} \text{weight}_w \odot x_{t-(W-1)+w}\Bigr)$$

    Inputs before the first token come from the state, or are zeros. Sums are taken in float32 (float64 for float64
    inputs). It is the convolution of "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"
    (<https://arxiv.org/abs/2312.00752>, section 3.4), which many later layers have too.

    Args:
        x: Inputs, ``[B, T, D]``, in float32, bfloat16, float16 or float64.
        weight: ``[D, W]`` of any width ``W``. Column ``W - 1`` weights the newest token; any float dtype.
        bias: ``[D]``, in any float dtype. Default: none.
        activation: "silu", its other name "swish", or None for none.
        initial_state: The ``W`` inputs before the first token, ``[N, D, W]``, the newest in column ``W - 1``, in any
            float dtype. No output reads column 0; a final state may contain it. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.
        output_states: Number ``n`` of states to return instead of the final one: the states after each of the last
            ``n`` tokens of every row, from 1 to 16, and at most ``T``. The second result is then ``[N, n, D, W]``, the
            final state last. `output_final_state` is not needed, `cu_seqlens` is not allowed. Default: the final
            state alone, if `output_final_state`.

    Returns:
        ``(y, final_state)``: `y` is ``[B, T, D]`` in the dtype of `x`, or of autocast where it is on; `final_state` is
            ``[N, D, W]`` in float32 (float64 for float64 inputs), a new tensor, or None unless `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, or `activation` is unknown.
        TypeError: If an argument has the wrong type or dtype.
    """
    inputs = op.Inputs(x, weight, bias, initial_state, cu_seqlens, silu=activation is not None)
    check(op, inputs, output_final_state=output_final_state)
    if not require.is_one_of(activation, "silu", "swish", None):
        raise ValueError(f"activation must be 'silu', 'swish' or None, got {require.shown(activation)}")
    if output_states is not None:
        intermediate_states.check(output_states, x, cu_seqlens)
    ranks = sharing()
    if ranks is None:
        y, final_state = op.forward(*inputs)
    else:
        before = None if initial_state is None else initial_state.mT
        start, after = last_tokens(ranks, _as_computed(x), before, weight.shape[1], cu_seqlens=cu_seqlens)
        y, _ = op.forward(*inputs._replace(initial_state=start.mT))
        final_state = after.mT.clone(memory_format=torch.contiguous_format)
    if output_states is not None:
        return y, _last_states(x, weight.shape[1], initial_state, output_states)
    return y, final_state if output_final_state else None


def _as_computed(x: Tensor) -> Tensor:
    """`x` in the dtype of states, after the rounding of autocast."""
    dtype = autocast_dtype(x.device)
    return upcast(x if dtype is None or x.dtype == torch.float64 else x.to(dtype))


def _last_states(x: Tensor, W: int, initial_state: Tensor | None, n: int) -> Tensor:
    """``[N, n, D, W]``: the states after each of the last ``n`` tokens, in the dtype of states."""
    x = _as_computed(x)
    before = x.new_zeros(x.shape[0], W, x.shape[2]) if initial_state is None else initial_state.to(x.dtype).mT
    return intermediate_states.windows(torch.cat([before, x], 1), W, n)
