"""The registered ops of scalar decay: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops.families._op import define_forms, matrix_state_flops
from flacompose.ops.families.scalar_decay import eager
from flacompose.ops.families.scalar_decay.inputs import SIGNATURE, Inputs

_chunk, _recurrent, _steps = define_forms("scalar_decay", SIGNATURE, eager, flops=matrix_state_flops)


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, in chunks of tokens: for training and for prompts."""
    return _chunk(*inputs)


def recurrent(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, token by token: for decoding."""
    return _recurrent(*inputs)


def steps(inputs: Inputs, count: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """`recurrent` with `count` states, ``[N, count, ...]``, those after the last tokens that are `stride` apart."""
    return _steps(*inputs, count, stride)
