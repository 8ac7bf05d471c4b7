"""The registered ops of vector decay: a chunked form and a recurrent one, of the same function, with one backward.

    S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T        o_t = scale * S_t^T q_t

With `u`, the bonus of the current token, the state is read before the decay and the write, and the token's own pair
joins with that weight: ``o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T q_t``. With `softmax`, `q` holds logits, and the
state is read with their softmax; they may be wider than the other inputs. With `full_precision`, the output has the
dtype of states, whatever that of the inputs.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms
from flacompose.ops.families.vector_decay import eager
from flacompose.ops.families.vector_decay.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v, gk, gv, u, initial_state, cu_seqlens, scale, softmax, full_precision = inputs
    N, (H, K), V, dtype = sequence_count(q, cu_seqlens), q.shape[2:], v.shape[3], state_dtype(q.dtype)
    o = v.new_empty(v.shape, dtype=dtype if full_precision else v.dtype)
    return o, q.new_empty(N, H, K, V, dtype=dtype)


def _flops(q, k, v, *_, **__) -> int:
    """One write and one read of the state a token."""
    B, T, H, V = v
    return 4 * B * T * H * q[-1] * V


chunk, recurrent = define_forms(
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
    flops=_flops,
)
