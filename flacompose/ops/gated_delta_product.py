"""Gated DeltaProduct, https://arxiv.org/abs/2502.10297."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._operators.bounds import verified
from flacompose.ops._operators.checked import check_values, checking
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._recurrences.matrix.eager import normalized
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import scaled_bounds, without_tail


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""Several steps of the delta rule for each token, computed in chunks.

    $$S_{t,0} = e^{g_t}\, S_{t-1,n} \qquad
    S_{t,i} = S_{t,i-1} + \beta_{t,i}\, k_{t,i} (v_{t,i} - S_{t,i-1}^\top k_{t,i})^\top \qquad
    o_t = \text{scale} \cdot S_{t,n}^\top q_t$$

    A product of ``n`` Householder transitions can be a rotation, which a single one cannot. From "DeltaProduct:
    Improving State-Tracking in Linear RNNs via Householder Products" (<https://arxiv.org/abs/2502.10297>). It is
    [chunk_gated_delta_rule][flacompose.ops.chunk_gated_delta_rule] of ``n`` steps per token. The first step decays the
    state, and the query reads after the last.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T * n, H, K]``, with the ``n`` keys of a token side by side, in the dtype of `q`; usually of norm
            1.
        v: Values, ``[B, T * n, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value
            head ``h`` uses head ``h // (HV / H)`` of queries and keys.
        g: Decay per token, ``[B, T, HV]``, as natural logarithms from 0 to -inf; any float dtype. None: no decay.
        beta: Share of the stored value that is replaced, ``[B, T * n, HV]``, usually from 0 to 1 or to 2; any float
            dtype.
        num_householder: Number of steps ``n`` of a token.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether queries and keys are first divided by their norms,
            ``sqrt(sum of squares + 1e-6)``.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, in tokens (not in steps), ``[N + 1]`` from 0
            upwards, int32 or int64; ``B`` is then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros.
            Default: ``N = B`` sequences of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `num_householder` is below 1, or
            `scale` is not finite.
        TypeError: If an argument has the wrong type or dtype.
    """
    return _product(
        op.chunk, q, k, v, g, beta, num_householder, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens,
    )  # fmt: skip


def fused_recurrent_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_gated_delta_product][flacompose.ops.chunk_gated_delta_product], step by step: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states, num_householder)
    return _product(
        form, q, k, v, g, beta, num_householder, scale, initial_state, wanted,
        use_qk_l2norm_in_kernel, cu_seqlens,
    )  # fmt: skip


def _product(
    form: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    n: int,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, and call one form of the delta rule with the steps as its tokens."""
    require.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, output_final_state=output_final_state)
    require.count("num_householder", n)
    require.axes("q", q, ("B", "T", "H", "K"))
    require.not_empty("q", q)
    B, T, H, K = q.shape
    require.like(q, "k", k, (B, T * n, H, K))
    require.same_dtype(q, "k", k)
    scale = require.scale(scale, q)
    # The operator takes one query per step, so the keys also stand for the queries in this check.
    check(
        op,
        op.Inputs(k, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens),
        required=("beta",),
        values=False,
    )
    require.optional(q, "g", g, (B, T, v.shape[2]))
    if checking():
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
        check_values(given, cu_seqlens, gates=("g",))
    cu_seqlens = verified(cu_seqlens, T, in_graphs=False)
    if use_qk_l2norm_in_kernel:
        (q,) = without_tail(cu_seqlens, q)
        (k,) = without_tail(scaled_bounds(cu_seqlens, n), k)
        q, k = normalized(q), normalized(k)
    # Only the first step of a token has a gate, and only the last has a query.
    q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
    if g is not None:
        # A gate whose exponential is 0 has a gradient of exactly 0. The kernels would give it rounding errors of
        # the far larger gradients of steps without decay.
        g = torch.where(upcast(g).exp() == 0, g.detach(), g)
        g = F.pad(g.unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2)
    inputs = op.Inputs(
        q, k, v, g, beta=beta, initial_state=initial_state, cu_seqlens=scaled_bounds(cu_seqlens, n), scale=scale,
        delta_rule=True,
    )  # fmt: skip
    o, final_state = run(form, inputs, output_final_state)
    return o.unflatten(1, (T, n))[:, :, -1].contiguous(), final_state
