"""The registered ops of the delta rule: a chunked form and a recurrent one, of the same function, with one backward.

    S' = diag(exp(g_t + gk_t)) S_{t-1}      S_t = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale * S_t^T q_t

`g` is a decay per token and head, `gk` one per channel of the keys besides. `v`, `beta`, the gates and states may have
a multiple of the heads of `q` and `k`.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms
from flacompose.ops.families.delta_rule import eager
from flacompose.ops.families.delta_rule.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, v = inputs.q, inputs.v
    N, (HV, V), K = sequence_count(q, inputs.cu_seqlens), v.shape[2:], q.shape[3]
    return v.new_empty(v.shape), v.new_empty(N, HV, K, V, dtype=state_dtype(q.dtype))


def _flops(q, k, v, *_, **__) -> int:
    """Two reads and one write of the state a token."""
    B, T, HV, V = v
    return 6 * B * T * HV * q[-1] * V


chunk, recurrent, steps = define_forms(
    "delta_rule",
    eager,
    Inputs,
    arguments="Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? gk, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale",
    gradients="Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg, Tensor dgk, Tensor d_initial_state",
    axes={
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T HV V",
        "beta": "B T HV",
        "g": "B T HV",
        "gk": "B T HV K",
        "o": "B T HV V",
        "initial_state": "N HV K V",
        "final_state": "N HV K V",
    },
    autocast={"q": None, "k": None, "v": None},
    fake=_fake,
    flops=_flops,
)
