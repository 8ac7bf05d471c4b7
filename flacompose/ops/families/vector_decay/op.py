"""The registered ops of vector decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flacompose.ops.families._op import define_forms, matrix_state_flops, start_gradient
from flacompose.ops.families._stretches import Decay
from flacompose.ops.families.vector_decay import eager
from flacompose.ops.families.vector_decay.inputs import SIGNATURE, Ends, Inputs

_chunk, _recurrent, _ends, _steps = define_forms(
    "vector_decay", SIGNATURE, eager, ends=Ends, flops=matrix_state_flops
)


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, in chunks of tokens: for training and for prompts."""
    return _chunk(*inputs)


def recurrent(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, token by token: for decoding."""
    return _recurrent(*inputs)


def steps(inputs: Inputs, count: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """`recurrent` with `count` states, ``[N, count, ...]``, those after the last tokens that are `stride` apart."""
    return _steps(*inputs, count, stride)


def stretch(inputs: Inputs) -> tuple[Decay, Tensor]:
    """What the tokens of each sequence do to a state: the decays of its axes, and the state they reach from zero."""
    # Queries and the bonus do nothing to the state.
    others = inputs._replace(q=inputs.k.detach(), u=None, initial_state=None, softmax=False)
    end, sum_gk, sum_gv = _ends(*others)
    logs = (inputs.gk, sum_gk.unsqueeze(-1)), (inputs.gv, sum_gv.unsqueeze(-2))
    return Decay(tuple(log for g, log in logs if g is not None)), end


# Takes `Inputs` and the gradients of the outputs, and gives that of the state before each sequence: see `_stretches`.
d_start = partial(start_gradient, "vector_decay", SIGNATURE)
