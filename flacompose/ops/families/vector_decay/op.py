"""The registered ops of vector decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops.families._op import Forms, define_forms, matrix_state_flops
from flacompose.ops.families._stretches import Map
from flacompose.ops.families.vector_decay import eager
from flacompose.ops.families.vector_decay.inputs import SIGNATURE
from flacompose.ops.families.vector_decay.inputs import Inputs as Inputs  # for the public functions

_forms: Forms[Inputs] = define_forms(
    "vector_decay", SIGNATURE, eager, gates=("gk", "gv"), flops=matrix_state_flops
)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
d_start = _forms.d_start


def stretch(inputs: Inputs) -> tuple[Map, Tensor]:
    """What the tokens of each sequence do to a state: the decays of its axes, and the state they reach from zero."""
    return _forms.stretch(inputs._replace(u=None, softmax=False))  # which do nothing to it
