"""The registered ops of scalar decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops.families._op import Forms, define_forms, matrix_state_flops
from flacompose.ops.families._stretches import Map
from flacompose.ops.families.scalar_decay import eager
from flacompose.ops.families.scalar_decay.inputs import SIGNATURE
from flacompose.ops.families.scalar_decay.inputs import Inputs as Inputs  # for the public functions

_forms: Forms[Inputs] = define_forms("scalar_decay", SIGNATURE, eager, gates=("g",), flops=matrix_state_flops)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
d_start = _forms.d_start


def stretch(inputs: Inputs) -> tuple[Map, Tensor]:
    """What the tokens of each sequence do to a state: the decays of heads, and the state they reach from zero."""
    g = inputs.g
    if inputs.g_gamma is not None:  # added to every token's
        g = inputs.g_gamma.expand(*inputs.v.shape[:3]) if g is None else g + inputs.g_gamma
    return _forms.stretch(inputs._replace(g=g, g_gamma=None))
