"""Comba, a delta rule with a separate reading key, https://arxiv.org/abs/2506.02475."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._recurrences.matrix.eager import normalized
from flacompose.ops._tensors.packed import without_tail


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    erase: str = "before",
) -> tuple[Tensor, Tensor | Any]:
    r"""Comba, computed in chunks: the form for training and for prompts.

    $$S'_t = e^{g_t} S_{t-1} \qquad S_t = S'_t + \beta_t\, k_t (v_t - {S^*_t}^\top p_t)^\top \qquad
    o_t = \text{scale} \cdot S_t^\top q_t$$

    It is the gated delta rule in which ``p``, not the key, reads the replaced value. ``S*`` is the state before its
    decay, ``S_{t-1}``, or with ``erase="after"`` the state after its decay, ``S'``. The default is the transition
    ``exp(g) - beta k p^T`` of "Comba: Improving Bilinear RNNs with Closed-loop Control"
    (<https://arxiv.org/abs/2506.02475>). The kernels of flash-linear-attention compute it, so models were trained with
    it. The PyTorch reference there, ``naive_recurrent_comba``, reads after the decay.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`; usually of norm 1.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        p: Vectors that read the replaced value, ``[B, T, H, K]``, in the dtype of `q`; usually the key times a number.
        g: Decay, ``[B, T, HV]``, per token, as natural logarithms from 0 to -inf; any float dtype.
        beta: Share of the stored value that is replaced, ``[B, T, HV]``, usually from 0 to 1; any float dtype.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether queries, keys and ``p`` are first divided by their norms,
            ``sqrt(sum of squares + 1e-6)``.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.
        erase: Whether ``p`` reads the state "before" its decay or "after" it. Default: "before".

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` is not finite, or `erase` is
            unknown.
        TypeError: If an argument has the wrong type or dtype.
    """
    before = reads_before(erase)
    scale = require.scale(scale, q)
    given = op.Inputs(
        q, k, v, g, beta=beta, a=p, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        delta_rule=True, read_before=before,
    )  # fmt: skip
    require.flags(output_final_state=output_final_state)
    return run(op.chunk, _inputs(given, use_qk_l2norm_in_kernel), output_final_state)


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    erase: str = "before",
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_comba][flacompose.ops.chunk_comba], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    before = reads_before(erase)
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    given = op.Inputs(
        q, k, v, g, beta=beta, a=p, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        delta_rule=True, read_before=before,
    )  # fmt: skip
    return run(form, _inputs(given, use_qk_l2norm_in_kernel), wanted)


def _inputs(given: op.Inputs, use_qk_l2norm_in_kernel: bool) -> op.Inputs:
    """Check the arguments, whose `p` is the `a` of the delta rule, and normalise them."""
    check(op, given, {"a": "p"}, required=("beta", "g", "a"))
    assert given.a is not None
    q, k, p = given.q, given.k, given.a
    require.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if use_qk_l2norm_in_kernel:
        q, k, p = map(normalized, without_tail(given.cu_seqlens, q, k, p))
    return given._replace(q=q, k=k, a=p)


def reads_before(erase: Any) -> bool:
    """Check `erase`; return whether it is "before"."""
    if not require.is_one_of(erase, "after", "before"):
        raise ValueError(f'erase must be "after" or "before", got {require.shown(erase)}')
    return bool(erase == "before")
