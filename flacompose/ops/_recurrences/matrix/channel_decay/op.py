"""The registered ops of channel decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from flacompose.ops._recurrences.forms import Forms, define_forms, matrix_state_flops
from flacompose.ops._recurrences.matrix.channel_decay import eager
from flacompose.ops._recurrences.matrix.channel_decay.inputs import SIGNATURE
from flacompose.ops._recurrences.matrix.channel_decay.inputs import (
    Inputs as Inputs,  # for the public functions
)


def _of_state(inputs: Inputs) -> Inputs:
    """The inputs without `u` and `softmax`, which only concern reads of the state."""
    return inputs._replace(u=None, softmax=False)


_forms: Forms[Inputs] = define_forms(
    SIGNATURE, eager, gates=("gk", "gv"), flops=matrix_state_flops, of_state=_of_state
)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
stretch, d_start = _forms.stretch, _forms.d_start
