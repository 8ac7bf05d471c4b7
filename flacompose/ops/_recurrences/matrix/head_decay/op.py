"""The registered ops of head decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from flacompose.ops._recurrences.forms import Forms, define_forms, matrix_state_flops
from flacompose.ops._recurrences.matrix.head_decay import eager
from flacompose.ops._recurrences.matrix.head_decay.inputs import SIGNATURE
from flacompose.ops._recurrences.matrix.head_decay.inputs import Inputs as Inputs  # for the public functions


def _of_state(inputs: Inputs) -> Inputs:
    """The inputs with all decay in `g`."""
    g = inputs.g
    if inputs.g_gamma is not None:  # a gate of every token
        g = inputs.g_gamma.expand(*inputs.v.shape[:3]) if g is None else g + inputs.g_gamma
    return inputs._replace(g=g, g_gamma=None)


_forms: Forms[Inputs] = define_forms(
    SIGNATURE, eager, gates=("g",), flops=matrix_state_flops, of_state=_of_state
)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
stretch, d_start = _forms.stretch, _forms.d_start
