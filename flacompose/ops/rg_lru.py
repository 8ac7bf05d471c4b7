"""The real-gated linear recurrent unit of Griffin, https://arxiv.org/abs/2402.19427, section 2.4."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, inf

from flacompose.ops import _check
from flacompose.ops._call import check, run
from flacompose.ops._dtype import autocast_dtype, upcast
from flacompose.ops._gates import bounded
from flacompose.ops._states import recurrent_form
from flacompose.ops._varlen import without_tail
from flacompose.ops.families.scan import op


def chunk_rg_lru(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    a_param: Tensor,
    reset: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""The real-gated linear recurrent unit (RG-LRU), computed in chunks: the form for training and for prompts.

    $$a_t = \exp\bigl(-8 \operatorname{softplus}(a\_param) \odot \sigma(r_t)\bigr) \qquad
    h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot \sigma(i_t) \odot x_t \qquad o_t = h_t$$

    where $\sigma$ is the sigmoid. From "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models" (<https://arxiv.org/abs/2402.19427>), equations 1 to 4. Where ``reset`` is True, $a_t$ is 0 and the
    square root is 1, as in the code of Griffin and of RecurrentGemma at tokens of position 0. A sequence does not begin
    with a reset unless `reset` says so: it goes on from its initial state, also from zeros.

    Args:
        x: Inputs, ``[B, T, D]``, in float32, bfloat16, float16 or float64.
        r: Recurrence gates before their sigmoid, ``[B, T, D]``, in any float dtype.
        i: Input gates before their sigmoid, ``[B, T, D]``, in any float dtype.
        a_param: What the rates of decay are the softplus of, ``[D]``, finite, in any float dtype.
        reset: Where the state is multiplied by 0 and the input enters at full strength, ``[B, T]``, bool. A state that
            is not finite stays so. Default: nowhere.
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
    return run(op.chunk, _gated(x, r, i, a_param, reset, initial_state, cu_seqlens), output_final_state)


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
) -> tuple[Tensor, Tensor | None]:
    """[chunk_rg_lru][flacompose.ops.chunk_rg_lru], token by token: the form for decoding.

    The same function of the same arguments, derivatives included, for one token at a time or a few.

    Args:
        output_states: How many states to return in place of the final one, as
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla] does: ``[N, n, D]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, x, output_final_state, cu_seqlens, output_states)
    return run(form, _gated(x, r, i, a_param, reset, initial_state, cu_seqlens), wanted)


def _gated(
    x: Tensor,
    r: Tensor,
    i: Tensor,
    a_param: Tensor,
    reset: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> op.Inputs:
    """Check the arguments, and make the inputs and the log decays of the elementwise scan of them."""
    check(op, op.Inputs(x, r, initial_state, cu_seqlens), {"g": "r"})
    _check.like(x, "i", i, x.shape, "x")
    _check.like(x, "a_param", a_param, x.shape[2:], "x")
    if reset is not None:
        _check.tensor("reset", reset)
        if reset.dtype != torch.bool:
            raise TypeError(f"reset must be bool, got {str(reset.dtype).removeprefix('torch.')}")
        _check.shape_and_device(x, "reset", reset, x.shape[:2], "x")
    x, r, i = without_tail(cu_seqlens, x, r, i)
    g = bounded(-8 * F.softplus(upcast(a_param, x)) * upcast(r, x).sigmoid())
    # The square root's derivative at 0 is infinite. That of the whole, by r or by a_param, tends to 0 where the decay
    # tends to 1, so that a root of 0 is given no gradient.
    square = -torch.expm1(2 * g)  # 1 - a^2, exact where a is nearly 1
    kept = square > 0
    strength = torch.where(kept, torch.where(kept, square, 1).sqrt(), 0)
    if reset is not None:
        g, strength = (torch.where(reset.unsqueeze(2), y, z) for y, z in ((-inf, g), (1.0, strength)))
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
    entering = (strength * upcast(i, x).sigmoid() * x).to(x.dtype)
    return op.Inputs(entering, g, initial_state, cu_seqlens)
