"""mLSTM, the recurrence of xLSTM with a matrix memory, https://arxiv.org/abs/2405.04517."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import TypeError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.elementwise.stabilizer import op as stabilizer
from flacompose.ops._recurrences.fused.mlstm import op as token
from flacompose.ops._recurrences.fused.normalizer import op as normalizer
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._tensors.dtype import autocast_dtype, state_dtype, upcast
from flacompose.ops._tensors.gate_formulas import log_sigmoid
from flacompose.ops._tensors.packed import last_of_rows, sequence_count, without_tail
from flacompose.ops._tensors.sizes import always_true

MLSTMState = tuple[Tensor, Tensor, Tensor]
Form = Callable[..., tuple[Tensor, Tensor]]


def chunk_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    scale: float | None = None,
    initial_state: MLSTMState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, MLSTMState | Any]:
    r"""mLSTM, computed in chunks: the form for training and for prompts.

    $$m_t = \max(\log \sigma(f_t) + m_{t-1},\ i_t) \qquad
    F_t = e^{\log \sigma(f_t) + m_{t-1} - m_t} \qquad I_t = e^{i_t - m_t}$$
    $$C_t = F_t\, C_{t-1} + I_t\, k_t v_t^\top \qquad n_t = F_t\, n_{t-1} + I_t\, k_t \qquad
    o_t = \frac{\text{scale} \cdot C_t^\top q_t}
    {\max(|\text{scale} \cdot n_t^\top q_t|,\ e^{-m_t}) + \text{eps}}$$

    From "xLSTM: Extended Long Short-Term Memory" (<https://arxiv.org/abs/2405.04517>), with the `eps` of xLSTM-7B
    (<https://arxiv.org/abs/2503.13427>). Input gates of any size are exact: `m` scales
    `C` and `n` by ``exp(-m)``, which keeps all exponentials at most 1 and does not change the output.

    No gradient flows through `m`. Gradients through `o` are exact nevertheless, except for `eps`, also across calls. A
    loss on `C` or `n` has their gradient at a fixed scale ``exp(-m)``. An initial `m` gets no gradient, except from
    its copy that a sequence without tokens returns.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        i: Input gate before its exponential, ``[B, T, HV]``, any number or -inf; any float dtype.
        f: Forget gate before its sigmoid, ``[B, T, HV]``, any number or -inf, which resets the state; any float dtype.
        scale: Factor of the queries. Default: ``K ** -0.5``.
        initial_state: State before the first token, the tuple ``(C, n, m)``, ``[N, HV, K, V]``, ``[N, HV, K]`` and
            ``[N, HV]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.
        eps: Added to the denominator. Default: 1e-6.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``(C, n, m)``, new tensors in float32 (float64 for float64 inputs), or None unless
            `output_final_state`. `m` is at least -1e4, since below it all exponentials are 0.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` or `eps` is not finite, or
            `eps` is below 0.
        TypeError: If an argument has the wrong type or dtype.
    """
    forms = op.chunk, normalizer.chunk
    return _run(*forms, q, k, v, i, f, scale, initial_state, output_final_state, cu_seqlens, eps)


def fused_recurrent_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    scale: float | None = None,
    initial_state: MLSTMState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
    eps: float | None = None,
) -> tuple[Tensor, MLSTMState | Any]:
    """[chunk_mlstm][flacompose.ops.chunk_mlstm], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: a tuple of ``[N, n, HV, K, V]``,
            ``[N, n, HV, K]`` and ``[N, n, HV]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    divide, _ = recurrent_form(normalizer, q, output_final_state, cu_seqlens, output_states)
    return _run(form, divide, q, k, v, i, f, scale, initial_state, wanted, cu_seqlens, eps, output_states)


def _run(
    form: Form,
    divide: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    scale: float | None,
    initial_state: MLSTMState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    eps: float | None,
    output_states: int | None = None,
) -> tuple[Tensor, MLSTMState | None]:
    scale = require.scale(scale, q)
    # Not a default in the signature: Dynamo would take that for an input of the graph, and compile twice.
    eps = 1e-6 if eps is None else eps
    require.not_negative("eps", eps)
    C = n = m = None
    if initial_state is not None:
        if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 3:
            raise TypeError(f"initial_state must be a tuple (C, n, m), got {require.kind(initial_state)}")
        C, n, m = initial_state
        for j, x in enumerate(initial_state):
            require.tensor(f"initial_state[{j}]", x)
    inputs = op.Inputs(q, k, v, f, beta=i, initial_state=C, cu_seqlens=cu_seqlens, scale=scale)
    names = {"g": "f", "beta": "i", "initial_state": "initial_state[0]"}
    check(
        op, inputs, names, required=("g", "beta"), output_final_state=output_final_state, logits=("g", "beta")
    )
    if n is not None and m is not None:
        N, HV, K = sequence_count(q, cu_seqlens), v.shape[2], q.shape[3]
        require.like(q, "initial_state[1]", n, (N, HV, K))
        require.like(q, "initial_state[2]", m, (N, HV))

    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with nullcontext() if dtype is None else torch.autocast(q.device.type, enabled=False):
        i, f = without_tail(cu_seqlens, i.to(state_dtype(q.dtype)), f.to(state_dtype(q.dtype)))
        # A symbolic length is taken for several tokens, so that a graph gets no guard on it.
        if form is not op.chunk and cu_seqlens is None and always_true(q.shape[1] == 1):
            o, *state = token.token(*token.Inputs(q, k, v, i, f, C, n, m, scale, eps))
            if output_states is not None:
                state = [x.unsqueeze(1) for x in state]
            return o, tuple(state) if output_final_state else None
        # Logarithms are clamped where their exponentials are 0, since the differences of lower ones would be rounding
        # errors. The bound is a literal: Dynamo would take a constant of the module for an input, and compile twice.
        g, m_t, m = stabilizer.forward(i.detach().clamp(min=-1e4), log_sigmoid(f), m, cu_seqlens)
        written, least, out_dtype = (i - m_t).exp(), (-m_t).exp(), v.dtype
        if out_dtype == torch.float16:  # the numerator may exceed its range
            q, k, v = upcast(q), upcast(k), upcast(v)
        numerator, C = form(
            *op.Inputs(q, k, v, g, beta=written, initial_state=C, cu_seqlens=cu_seqlens, scale=scale)
        )
        o, n = divide(q, k, numerator, g, written, least, n, cu_seqlens, scale, eps)
        o = o.to(out_dtype)
    if not output_final_state:
        return o, None
    return o, (C, n, m if output_states is None else last_of_rows(m_t, output_states))
