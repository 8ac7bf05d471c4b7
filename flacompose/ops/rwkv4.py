"""The attention of RWKV-4, https://arxiv.org/abs/2305.13048, section 3.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flacompose._errors import TypeError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.elementwise.rwkv4 import op

State = tuple[Tensor, Tensor, Tensor]


def chunk_rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | Any]:
    r"""The attention of RWKV-4 (WKV), computed in chunks: the form for training and for prompts.

    $$o_t = \frac{a_{t-1} + e^{u + k_t} \odot v_t}{b_{t-1} + e^{u + k_t}} \qquad
    a_t = e^w \odot a_{t-1} + e^{k_t} \odot v_t \qquad b_t = e^w \odot b_{t-1} + e^{k_t}$$

    From "RWKV: Reinventing RNNs for the Transformer Era" (<https://arxiv.org/abs/2305.13048>), equations 16 to 18. The
    state holds $a_t e^{-m_t}$, $b_t e^{-m_t}$ and $m_t = \max(w + m_{t-1}, k_t)$, so that keys of any size are exact.

    Args:
        w: Decay of each channel, ``[D]``, as natural logarithms from 0 to -inf; any float dtype. In RWKV-4 it is
            ``-exp(time_decay)``.
        u: Bonus of the current token, ``[D]``, in any float dtype.
        k: Keys, the logarithms of weights, ``[B, T, D]``, finite, in any float dtype. Keys below -1e38 count as -1e38.
        v: Values, ``[B, T, D]``, in float32, bfloat16, float16 or float64.
        initial_state: State before the first token, the tuple ``(a, b, m)``, ``[N, D]`` each, in any float dtype.
            Default: zeros, and ``m`` of -1e38. Where ``b`` is 0, nothing has been written, and ``m`` is ignored.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, D]`` in the dtype of `v`, or of autocast where it is on; `final_state` is
            ``(a, b, m)``, new tensors in float32 (float64 for float64 inputs), or None unless `output_final_state`.
            ``m`` scales ``a`` and ``b``. It gets no gradient, except from its copy that a sequence without tokens
            returns.

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
) -> tuple[Tensor, State | Any]:
    """[chunk_rwkv4][flacompose.ops.chunk_rwkv4], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: a tuple of three ``[N, n, D]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, v, output_final_state, cu_seqlens, output_states)
    return _run(form, w, u, k, v, initial_state, wanted, cu_seqlens)


def _run(
    form: Callable[..., tuple[Tensor, ...]],
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: State | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, State | None]:
    a = b = m = None
    if initial_state is not None:
        if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 3:
            raise TypeError(f"initial_state must be a tuple (a, b, m), got {require.kind(initial_state)}")
        a, b, m = initial_state
        for i, x in enumerate(initial_state):
            require.tensor(f"initial_state[{i}]", x)
    inputs = op.Inputs(v, k, w, u, a, b, m, cu_seqlens)
    names = {f"initial_{x}": f"initial_state[{i}]" for i, x in enumerate("abm")}
    check(op, inputs, names, output_final_state=output_final_state, logits=("k", "initial_m"))
    o, *state = form(*inputs)
    return o, (state[0], state[1], state[2]) if output_final_state else None
