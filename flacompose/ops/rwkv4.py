"""The attention of RWKV-4, https://arxiv.org/abs/2305.13048, section 3.1."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from flacompose.ops import _check
from flacompose.ops._call import check
from flacompose.ops._dtype import autocast_dtype, state_dtype
from flacompose.ops._states import last, recurrent_form
from flacompose.ops._token_shift import token_shift
from flacompose.ops._varlen import without_tail
from flacompose.ops.families.running_max import op as running_max
from flacompose.ops.families.scan import op

State = tuple[Tensor, Tensor, Tensor]


def chunk_rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    r"""The attention of RWKV-4 (WKV), computed in chunks: the form for training and for prompts.

    $$o_t = \frac{a_{t-1} + e^{u + k_t} \odot v_t}{b_{t-1} + e^{u + k_t}} \qquad
    a_t = e^w \odot a_{t-1} + e^{k_t} \odot v_t \qquad b_t = e^w \odot b_{t-1} + e^{k_t}$$

    From "RWKV: Reinventing RNNs for the Transformer Era" (<https://arxiv.org/abs/2305.13048>), equations 16 to 18. The
    state is kept as $a_t e^{-m_t}$, $b_t e^{-m_t}$ and $m_t = \max(w + m_{t-1}, k_t)$, so that keys of any size are
    exact.

    Args:
        w: Decay of each channel, ``[D]``, as natural logarithms from 0 to -inf; any float dtype. In RWKV-4 it is
            ``-exp(time_decay)``.
        u: Bonus of the present token, ``[D]``, in any float dtype.
        k: Keys, the logarithms of weights, ``[B, T, D]``, finite, in any float dtype.
        v: Values, ``[B, T, D]``, in float32, bfloat16, float16 or float64.
        initial_state: State before the first token, the tuple ``(a, b, m)``, ``[N, D]`` each, in any float dtype.
            Default: zeros, and ``m`` of -1e38.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, D]`` in the dtype of `v`, or under autocast in its dtype; `final_state` is
            ``(a, b, m)``, new tensors in float32 (float64 for float64 inputs), or None unless `output_final_state`.
            ``m`` scales the other two, and gets no gradient, except from the copy of it that a sequence without
            tokens returns.

    Raises:
        ValueError: If a shape or a device is wrong.
        TypeError: If an argument has the wrong type or dtype.
    """
    return _run(op.chunk, w, u, k, v, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, State | None]:
    """[chunk_rwkv4][flacompose.ops.chunk_rwkv4], token by token: the form for decoding.

    The same function of the same arguments, derivatives included, for one token at a time or a few.

    Args:
        output_states: How many states to return in place of the final one, as
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla] does: a tuple of three ``[N, n, D]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, v, output_final_state, cu_seqlens, output_states)
    return _run(form, w, u, k, v, initial_state, wanted, cu_seqlens, output_states)


def _run(
    form: Callable[..., tuple[Tensor, Tensor]],
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: State | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    output_states: int | None = None,
) -> tuple[Tensor, State | None]:
    """Check the arguments, find the maxima, and scan numerator and denominator together."""
    check(op, op.Inputs(v, k, None, cu_seqlens), {"x": "v", "g": "k"})
    N, D = _check.sequences(v, cu_seqlens), v.shape[2]
    _check.like(v, "w", w, (D,), "v")
    _check.like(v, "u", u, (D,), "v")
    if initial_state is not None:
        if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 3:
            raise TypeError(f"initial_state must be a tuple (a, b, m), got {_check.kind(initial_state)}")
        for i, x in enumerate(initial_state):
            _check.like(v, f"initial_state[{i}]", x, (N, D), "v")
    # It stands for -inf, as in the running maximum. Dynamo would take a constant of the module for an input, and
    # compile twice.
    lowest = -1e38
    cast = autocast_dtype(v.device)
    dtype = v.dtype if cast is None or v.dtype == torch.float64 else cast
    with nullcontext() if cast is None else torch.autocast(v.device.type, enabled=False):
        k, v = without_tail(cu_seqlens, k, v.to(dtype))
        w, u, k, v = (x.to(state_dtype(dtype)) for x in (w, u, k, v))
        if initial_state is None:
            start = v.new_zeros(N, 2 * D)
            m_0 = v.new_full((N, D), lowest)
        else:
            a, b, m_0 = (x.to(v.dtype) for x in initial_state)
            start = torch.cat([a, b], -1)
        gates, m, m_end = running_max.forward(
            *running_max.Inputs(k.detach(), w.expand_as(k), m_0, cu_seqlens)
        )
        weight = (k - m).exp()
        written, gates = torch.cat([weight * v, weight], -1), torch.cat([gates, gates], -1)
        states, end = form(*op.Inputs(written, gates, start, cu_seqlens))
        a, b = token_shift(states, start, cu_seqlens=cu_seqlens)[0].chunk(2, -1)
        # Where nothing has been written, its maximum says nothing.
        m_before, _ = token_shift(m, m_0, cu_seqlens=cu_seqlens)
        before, now = torch.where(b > 0, m_before.detach(), lowest), u + k
        top = torch.maximum(before, now).detach()
        past, present = (before - top).exp(), (now - top).exp()
        o = (past * a + present * v) / (past * b + present)
        (o,) = without_tail(cu_seqlens, o.to(dtype))
    if not output_final_state:
        return o, None
    a, b = (x.clone() for x in end.chunk(2, -1))  # states are no views
    return o, (a, b, m_end if output_states is None else last(m, output_states))
