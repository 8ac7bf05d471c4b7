"""The registered ops of scalar decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms, matrix_state_flops
from flacompose.ops.families.scalar_decay import eager
from flacompose.ops.families.scalar_decay.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, v = inputs.q, inputs.v
    N, (HV, V), K = sequence_count(q, inputs.cu_seqlens), v.shape[2:], q.shape[3]
    return v.new_empty(v.shape), v.new_empty(N, HV, K, V, dtype=state_dtype(q.dtype))


chunk, recurrent, steps = define_forms(
    "scalar_decay",
    eager,
    Inputs,
    arguments="Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? g_gamma, "
    "Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, float scale",
    gradients="Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dg_gamma, Tensor dbeta, "
    "Tensor d_initial_state",
    axes={
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T HV V",
        "g": "B T HV",
        "g_gamma": "HV",
        "beta": "B T HV",
        "o": "B T HV V",
        "initial_state": "N HV K V",
        "final_state": "N HV K V",
    },
    autocast={"q": None, "k": None, "v": None},
    fake=_fake,
    flops=matrix_state_flops,
)
