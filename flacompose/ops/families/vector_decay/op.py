"""The registered ops of vector decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms, matrix_state_flops
from flacompose.ops.families.vector_decay import eager
from flacompose.ops.families.vector_decay.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, v, dtype = inputs.q, inputs.v, state_dtype(inputs.q.dtype)
    N, (H, K), V = sequence_count(q, inputs.cu_seqlens), q.shape[2:], v.shape[3]
    o = v.new_empty(v.shape, dtype=dtype if inputs.full_precision else v.dtype)
    return o, q.new_empty(N, H, K, V, dtype=dtype)


chunk, recurrent, steps = define_forms(
    "vector_decay",
    eager,
    Inputs,
    arguments="Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor? u, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, bool softmax, bool full_precision",
    gradients="Tensor dq, Tensor dk, Tensor dv, Tensor dgk, Tensor dgv, Tensor du, Tensor d_initial_state",
    axes={
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T H V",
        "gk": "B T H K",
        "gv": "B T H V",
        "u": "H K",
        "o": "B T H V",
        "initial_state": "N H K V",
        "final_state": "N H K V",
    },
    autocast={"q": "softmax", "k": None, "v": None},
    fake=_fake,
    flops=matrix_state_flops,
)
