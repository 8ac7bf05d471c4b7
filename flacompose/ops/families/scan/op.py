"""The registered ops of the elementwise scan: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from functools import partial
from math import prod

from torch import Tensor

from flacompose.ops.families._op import define_forms, start_gradient
from flacompose.ops.families._stretches import Decay
from flacompose.ops.families.scan import eager
from flacompose.ops.families.scan.inputs import SIGNATURE, Ends, Inputs


def _flops(x, *_, **__) -> int:
    """A multiplication and an addition for each element."""
    return 2 * prod(x)


_chunk, _recurrent, _ends, _steps = define_forms("scan", SIGNATURE, eager, ends=Ends, flops=_flops)


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
    """What the tokens of each sequence do to a state: the decays, and the state they reach from zero."""
    end, sum_g = _ends(*inputs._replace(initial_state=None))
    return Decay((sum_g,)), end


# Takes `Inputs` and the gradients of the outputs, and gives that of the state before each sequence: see `_stretches`.
d_start = partial(start_gradient, "scan", SIGNATURE)
