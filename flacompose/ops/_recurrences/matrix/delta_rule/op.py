"""The registered ops of the delta rule: a chunked form and a recurrent one, of the same function, with one backward.

    S' = diag(exp(g_t + gk_t)) S_{t-1}      S_t = S' + beta_t k_t (v_t - S*^T a_t)^T      o_t = scale * S_t^T q_t

`g` is a decay per token and head, `gk` a further decay per channel of the keys. `a` is `k` if it is absent.
``S*`` is the state that `a` reads: S', or ``S_{t-1}`` if `read_before`. `v`, `beta`, the gates and states may
have a multiple of the heads of `q` and `k`.
"""

from __future__ import annotations

from flacompose.ops._operators.signature import Signature
from flacompose.ops._recurrences.forms import Forms, define_form, define_forms
from flacompose.ops._recurrences.matrix.delta_rule import eager
from flacompose.ops._recurrences.matrix.delta_rule.inputs import SIGNATURE, Outputs
from flacompose.ops._recurrences.matrix.delta_rule.inputs import Inputs as Inputs  # for the public functions


def _flops(q, k, v, *_, **__) -> int:
    """Two reads and one write of the state per token."""
    B, T, HV, V = v
    return 6 * B * T * HV * q[-1] * V


_forms: Forms[Inputs] = define_forms(SIGNATURE, eager, gates=(), flops=_flops)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
# `recurrent`, for a caller that writes the final state over the initial one: see `define_ops`.
update = define_form(__package__, "update", Signature(Inputs, Outputs, ("normalize",)), eager.update, _flops)
stretch, d_start = _forms.stretch, _forms.d_start
