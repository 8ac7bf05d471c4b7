"""The registered ops of the elementwise scan: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod

from flacompose.ops._recurrences.elementwise.scan import eager
from flacompose.ops._recurrences.elementwise.scan.inputs import SIGNATURE
from flacompose.ops._recurrences.elementwise.scan.inputs import Inputs as Inputs  # for the public functions
from flacompose.ops._recurrences.forms import Forms, define_forms


def _flops(x, *_, **__) -> int:
    """A multiplication and an addition for each element."""
    return 2 * prod(x)


_forms: Forms[Inputs] = define_forms(SIGNATURE, eager, gates=("g",), flops=_flops)
chunk, recurrent, steps = _forms.chunk, _forms.recurrent, _forms.steps
transition, d_initial = _forms.transition, _forms.d_initial
