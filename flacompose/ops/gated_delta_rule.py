"""The gated delta rule, https://arxiv.org/abs/2412.06464."""

from __future__ import annotations

from math import log
from typing import Any

import torch.nn.functional as F
from torch import Tensor, finfo

from flacompose._errors import ValueError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._operators.checked import check_parameters, checking
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.gate_formulas import clamped
from flacompose.ops._tensors.packed import without_tail
from flacompose.ops.delta_rule import with_norms


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The delta rule with one decay per head and token, in chunks: the form for training and for prompts.

    $$S'_t = e^{g_t}\, S_{t-1} \qquad S_t = S'_t + \beta_t\, k_t (v_t - {S'_t}^\top k_t)^\top \qquad
    o_t = \text{scale} \cdot S_t^\top q_t$$

    From "Gated Delta Networks: Improving Mamba2 with Delta Rule" (<https://arxiv.org/abs/2412.06464>). States stay
    bounded under the conditions of [chunk_delta_rule][flacompose.ops.chunk_delta_rule].

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`; usually of norm 1.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        g: Decay per token, ``[B, T, HV]``, as natural logarithms from 0 to -inf; any float dtype. With
            `use_gate_in_kernel`, the input of the formula of the decay.
        beta: Share of the stored value that is replaced, ``[B, T, HV]``, usually from 0 to 1 or to 2; any float dtype.
            With `use_beta_sigmoid_in_kernel`, its logits.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether queries and keys are first divided by their norms,
            ``sqrt(sum of squares + 1e-6)``.
        use_gate_in_kernel: Whether the decay is ``-exp(A_log) * softplus(g + dt_bias)``.
        A_log: ``HV`` numbers in any shape, in any float dtype; given with `use_gate_in_kernel` alone.
        dt_bias: ``HV`` numbers in any shape, in any float dtype; given with `use_gate_in_kernel` alone. Default: 0.
        use_beta_sigmoid_in_kernel: Whether `beta` holds logits and passes a sigmoid.
        allow_neg_eigval: Whether the sigmoid of `beta` is doubled.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` is not finite, or an option
            comes without the option that it needs.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, delta_rule=True,
    )  # fmt: skip
    logits = () if use_gate_in_kernel is False else ("g",)
    check(op, inputs, required=("beta", "g"), logits=logits, output_final_state=output_final_state)
    inputs = with_gates(
        inputs, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )  # fmt: skip
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_gated_delta_rule][flacompose.ops.chunk_gated_delta_rule], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, delta_rule=True,
    )  # fmt: skip
    logits = () if use_gate_in_kernel is False else ("g",)
    check(op, inputs, required=("beta", "g"), logits=logits)
    inputs = with_gates(
        inputs, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )  # fmt: skip
    return run(form, inputs, wanted)


def with_gates(
    inputs: op.Inputs,
    normalize: bool,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    sigmoid: bool,
    neg_eigval: bool,
    lower_bound: float | None = None,
) -> op.Inputs:
    """Check the options, and apply them to checked `inputs` with a gate per head, `g`, or per channel, `gk`."""
    require.flags(
        use_qk_l2norm_in_kernel=normalize,
        use_gate_in_kernel=use_gate,
        use_beta_sigmoid_in_kernel=sigmoid,
        allow_neg_eigval=neg_eigval,
    )
    if neg_eigval and not sigmoid:
        raise ValueError(
            "allow_neg_eigval must not be True without use_beta_sigmoid_in_kernel: it scales sigmoid(beta)"
        )
    q, cu_seqlens = inputs.q, inputs.cu_seqlens
    gate = inputs.g if inputs.gk is None else inputs.gk
    assert gate is not None
    g = decay(q, gate, use_gate, A_log, dt_bias, lower_bound, cu_seqlens)
    if use_gate:
        inputs = inputs._replace(g=g) if inputs.gk is None else inputs._replace(gk=g)
    if normalize:
        inputs = with_norms(inputs)
    if sigmoid:
        assert inputs.beta is not None
        (beta,) = without_tail(cu_seqlens, inputs.beta)
        inputs = inputs._replace(beta=upcast(beta, q).sigmoid() * (2 if neg_eigval else 1))
    return inputs


def decay(
    q: Tensor,
    g: Tensor,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Check the options of the gate ``g [B, T, HV]`` or ``[B, T, HV, K]``, and compute the decay."""
    of_a_token = tuple(g.shape[2:])
    require.parameter(q, "A_log", A_log, of_a_token[:1])
    require.parameter(q, "dt_bias", dt_bias, of_a_token)
    if lower_bound is not None:
        require.finite("lower_bound", lower_bound)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
        if x is not None and not use_gate:
            raise ValueError(
                f"{name} must not be given without use_gate_in_kernel, got {_shown(x)}: g is then the decay itself"
            )
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound must be below 0, got {lower_bound}")
    if checking():
        check_parameters(A_log, dt_bias)
    if not use_gate:
        return g
    if A_log is None and lower_bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel, got None")
    bias = None if dt_bias is None else dt_bias.reshape(of_a_token)
    (g,) = without_tail(cu_seqlens, g)
    return log_decay(upcast(g, q), A_log, bias, lower_bound)


def _shown(x: Tensor | float) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else str(x)


def log_decay(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """``-rate * softplus(x + dt_bias)``, or with `lower_bound`, ``lower_bound * sigmoid(rate * (x + dt_bias))``.

    ``rate`` is ``exp(A_log)``, or 1 if `A_log` is None. ``x [B, T, HV, ...]`` and ``dt_bias [HV, ...]`` are summed,
    and the result has the dtype of `x`. A finite `x` never gives NaN, whatever the rate is.
    """
    bias = None if dt_bias is None else dt_bias.to(x.dtype)
    if A_log is not None:
        A_log = A_log.to(x.dtype).reshape(-1, *[1] * (x.ndim - 3))
    if lower_bound is not None:
        x = x if bias is None else x + bias
        if A_log is not None:
            # The margin of e^8 keeps gradients from overflowing.
            x = A_log.clamp(max=log(finfo(x.dtype).max) - 8).exp() * x
        return lower_bound * x.sigmoid()
    assert A_log is not None  # checked
    # exp(A_log) may overflow and softplus(x) underflow, although their product is an ordinary decay. So the
    # excess of A_log above 40 is added to x: softplus(x + a) is exp(a) * softplus(x) up to rounding if x + a
    # is far below 0; otherwise both decays are so strong that the state decays to zero. The lower bound, at
    # which the rate is 0, is for an A_log of -inf: without it, the excess would be -inf - -inf, NaN.
    low = A_log.clamp(-1000.0, 40.0)
    excess = A_log - low
    x = x + (excess if bias is None else bias + excess)
    return clamped(-low.exp() * F.softplus(x))
