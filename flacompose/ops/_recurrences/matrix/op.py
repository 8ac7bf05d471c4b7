"""The registered operators of the linear recurrence with a matrix state.

    S' = exp(g_t + g_gamma) diag(exp gk_t) S_{t-1} diag(exp gv_t)
    S_t = S' + b_t (a_t^T S*) + k_t w_t^T        o_t = scale * S_t^T q_t

where ``w_t`` is ``beta_t v_t``, or with `delta_rule` ``beta_t (v_t - S*^T a_t)``. ``S*`` is the state that `a`
reads, S' or, with `read_before`, ``S_{t-1}``. With the bonus `u` of the current token, the query reads
``S_{t-1} + diag(u) k_t w_t^T``. `inputs` lists the arguments, and says which scheme computes which of them.
"""

from __future__ import annotations

from typing import Any

from flacompose.ops._operators.signature import Signature
from flacompose.ops._recurrences.forms import Forms, define_form, define_forms
from flacompose.ops._recurrences.matrix import eager
from flacompose.ops._recurrences.matrix.inputs import SIGNATURE, Outputs
from flacompose.ops._recurrences.matrix.inputs import Inputs as Inputs  # for the public functions

_NAME = "matrix_recurrence"


def _flops(q: Any, k: Any, v: Any, *others: Any, **by_name: Any) -> int:
    """The FLOPs of one write and one read of the state for each token, and of erasing before the write."""
    B, T, HV, V = v
    fields = Inputs._fields
    inputs = Inputs(q, k, v, *others[: len(fields) - 3], **{x: y for x, y in by_name.items() if x in fields})
    products = 2 + (1 if inputs.delta_rule else 0 if inputs.b is None else 2)
    return 2 * products * B * T * HV * q[-1] * V


def _of_state(inputs: Inputs) -> Inputs:
    """The inputs with all decay of heads in `g`, and without the arguments that only concern reads of the state."""
    g = inputs.g
    if inputs.g_gamma is not None:  # a gate of every token
        g = inputs.g_gamma.expand(*inputs.v.shape[:3]) if g is None else g + inputs.g_gamma
    return inputs._replace(g=g, g_gamma=None, u=None, softmax=False, full_precision=False)


_forms: Forms[Inputs] = define_forms(
    SIGNATURE,
    eager,
    name=_NAME,
    gates=("g", "gk", "gv"),
    erases=lambda inputs: inputs.delta_rule or inputs.b is not None,
    flops=_flops,
    of_state=_of_state,
)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
transition, d_initial = _forms.transition, _forms.d_initial
# `recurrent`, for a caller that writes the final state over the initial one: see `define_ops`.
update = define_form(
    __package__, "update", Signature(Inputs, Outputs, ("normalize",)), eager.update, _flops, name=_NAME
)
