"""The registered ops of the elementwise scan: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod

from torch import Tensor

from flacompose.ops.families._op import define_forms
from flacompose.ops.families.scan import eager
from flacompose.ops.families.scan.inputs import SIGNATURE, Inputs


def _flops(x, *_, **__) -> int:
    """A multiplication and an addition for each element."""
    return 2 * prod(x)


_chunk, _recurrent, _steps = define_forms("scan", SIGNATURE, eager, flops=_flops)


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, in chunks of tokens: for training and for prompts."""
    return _chunk(*inputs)


def recurrent(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, token by token: for decoding."""
    return _recurrent(*inputs)


def steps(inputs: Inputs, count: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """`recurrent` with `count` states, ``[N, count, ...]``, those after the last tokens that are `stride` apart."""
    return _steps(*inputs, count, stride)
