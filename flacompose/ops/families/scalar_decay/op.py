"""The registered ops of scalar decay: a chunked form and a recurrent one, of the same function, with one backward.

    S_t = exp(g_t + g_gamma) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

`g` is a decay per token and head, `g_gamma` one per head, the same for every token. `v`, the gates and states may have
a multiple of the heads of `q` and `k`.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms
from flacompose.ops.families.scalar_decay import eager
from flacompose.ops.families.scalar_decay.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v, g, g_gamma, initial_state, cu_seqlens, scale = inputs
    N, (HV, V), K = sequence_count(q, cu_seqlens), v.shape[2:], q.shape[3]
    return v.new_empty(v.shape), v.new_empty(N, HV, K, V, dtype=state_dtype(q.dtype))


def _flops(q, k, v, *_, **__) -> int:
    """One write and one read of the state a token."""
    B, T, HV, V = v
    return 4 * B * T * HV * q[-1] * V


chunk, recurrent = define_forms(
    "scalar_decay",
    eager,
    Inputs,
    arguments="Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? g_gamma, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale",
    gradients="Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dg_gamma, Tensor d_initial_state",
    axes={
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T HV V",
        "g": "B T HV",
        "g_gamma": "HV",
        "o": "B T HV V",
        "initial_state": "N HV K V",
        "final_state": "N HV K V",
    },
    autocast={"q": None, "k": None, "v": None},
    fake=_fake,
    flops=_flops,
)
