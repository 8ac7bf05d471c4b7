"""The registered ops of diagonal plus low rank: a chunked form and a recurrent one, with one backward.

    S' = diag(exp gk_t) S_{t-1}      S_t = S' + b_t (a_t^T S*) + k_t v_t^T      o_t = scale * S_t^T q_t

``S*`` is the state that `a` reads: ``S_{t-1}``, or S' unless `read_before`.
"""

from __future__ import annotations

from flacompose.ops._recurrences.forms import Forms, define_forms
from flacompose.ops._recurrences.matrix.low_rank import eager
from flacompose.ops._recurrences.matrix.low_rank.inputs import SIGNATURE
from flacompose.ops._recurrences.matrix.low_rank.inputs import Inputs as Inputs  # for the public functions


def _flops(q, k, v, *_, **__) -> int:
    """Two reads and two writes of the state per token."""
    B, T, H, V = v
    return 8 * B * T * H * q[-1] * V


_forms: Forms[Inputs] = define_forms(SIGNATURE, eager, gates=(), flops=_flops)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
stretch, d_start = _forms.stretch, _forms.d_start
