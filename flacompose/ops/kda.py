"""Kimi Delta Attention (KDA), https://arxiv.org/abs/2510.26692."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op
from flacompose.ops.gated_delta_rule import with_gates


def chunk_kda(
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
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The delta rule with a decay per channel of the key, in chunks: the form for training and for prompts.

    $$S'_t = \operatorname{diag}(e^{g_t})\, S_{t-1} \qquad
    S_t = S'_t + \beta_t\, k_t (v_t - {S'_t}^\top k_t)^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    From "Kimi Linear: An Expressive, Efficient Attention Architecture" (<https://arxiv.org/abs/2510.26692>). The
    growth of states is described at [chunk_delta_rule][flacompose.ops.chunk_delta_rule].

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`; usually of norm 1.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        g: Decay of the key axis, ``[B, T, HV, K]``, per token, as natural logarithms from 0 to -inf; any float dtype.
            With `use_gate_in_kernel`, the input of the formula of the decay.
        beta: Share of the stored value that is replaced, ``[B, T, HV]``, usually from 0 to 1 or to 2; any float dtype.
            With `use_beta_sigmoid_in_kernel`, its logits.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether queries and keys are first divided by their norms,
            ``sqrt(sum of squares + 1e-6)``.
        use_gate_in_kernel: Whether the decay is ``-exp(A_log) * softplus(g + dt_bias)`` or, with `lower_bound`,
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        A_log: ``HV`` numbers in any shape, in any float dtype; given with `use_gate_in_kernel` alone. With
            `lower_bound` it may be absent, and its exponential is then 1.
        dt_bias: ``[HV, K]``, or as many numbers in another shape, in any float dtype; given with `use_gate_in_kernel`
            alone. Default: 0.
        use_beta_sigmoid_in_kernel: Whether `beta` holds logits and passes a sigmoid.
        allow_neg_eigval: Whether the sigmoid of `beta` is doubled.
        lower_bound: The lowest decay, below 0 and finite; given with `use_gate_in_kernel` alone. Default: none.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` is not finite, `lower_bound`
            is not finite or not below 0, or an option comes without the option that it needs.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, gk=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        delta_rule=True,
    )  # fmt: skip
    logits = () if use_gate_in_kernel is False else ("gk",)
    check(
        op, inputs, {"gk": "g"}, required=("beta", "gk"), logits=logits, output_final_state=output_final_state
    )
    inputs = with_gates(
        inputs, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound,
    )  # fmt: skip
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_kda(
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
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_kda][flacompose.ops.chunk_kda], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, gk=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        delta_rule=True,
    )  # fmt: skip
    logits = () if use_gate_in_kernel is False else ("gk",)
    check(op, inputs, {"gk": "g"}, required=("beta", "gk"), logits=logits)
    inputs = with_gates(
        inputs, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound,
    )  # fmt: skip
    return run(form, inputs, wanted)
