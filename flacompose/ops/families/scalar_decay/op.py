"""The registered ops of scalar decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flacompose.ops.families._op import define_forms, matrix_state_flops, start_gradient
from flacompose.ops.families._stretches import Decay
from flacompose.ops.families.scalar_decay import eager
from flacompose.ops.families.scalar_decay.inputs import SIGNATURE, Ends, Inputs

_chunk, _recurrent, _ends, _steps = define_forms(
    "scalar_decay", SIGNATURE, eager, ends=Ends, flops=matrix_state_flops
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
    """What the tokens of each sequence do to a state: the decays of heads, and the state they reach from zero."""
    g = inputs.g
    if inputs.g_gamma is not None:  # added to every token's
        g = inputs.g_gamma.expand(*inputs.v.shape[:3]) if g is None else g + inputs.g_gamma
    # Queries do nothing to the state.
    end, sum_g = _ends(*inputs._replace(q=inputs.k.detach(), g=g, g_gamma=None, initial_state=None))
    return Decay((sum_g[..., None, None],)), end


# Takes `Inputs` and the gradients of the outputs, and gives that of the state before each sequence: see `_stretches`.
d_start = partial(start_gradient, "scalar_decay", SIGNATURE)
