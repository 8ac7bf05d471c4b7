"""HGRN, https://arxiv.org/abs/2311.04823: the hierarchically gated recurrent network's elementwise recurrence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flacompose.ops import _check
from flacompose.ops._states import recurrent_form
from flacompose.ops.families.scan import op


def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
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
        ``(o, final_state)``: `o` is ``[B, T, D]`` in the dtype of `x`, or under autocast in its dtype; `final_state` is
            ``[N, D]`` in float32 (float64 for float64 inputs), a new tensor, or None unless `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong.
        TypeError: If an argument has the wrong type or dtype.
    """
    return _run(op.chunk, x, g, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[chunk_hgrn][flacompose.ops.chunk_hgrn], token by token: the form for decoding.

    The same function of the same arguments, derivatives included, for one token at a time or a few.

    Args:
        output_states: How many states to return in place of the final one, as
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla] does: ``[N, n, D]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, x, output_final_state, cu_seqlens, output_states)
    return _run(form, x, g, initial_state, wanted, cu_seqlens)


def _run(
    form: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    _check.axes("x", x, "B, T, D")
    _check.like(x, "g", g, x.shape, q_name="x")
    _check.not_empty("x", x)
    N = _check.sequences(x, cu_seqlens, q_name="x")
    _check.optional(x, "initial_state", initial_state, (N, x.shape[2]), q_name="x")
    o, final_state = form(op.Inputs(x, g, initial_state, cu_seqlens))
    return o, final_state if output_final_state else None
