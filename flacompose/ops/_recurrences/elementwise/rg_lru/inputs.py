"""The signature of the RG-LRU: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, CONSTANT, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    x: Annotated[Tensor, "B T D", AUTOCAST]
    r: Annotated[Tensor, "B T D"]  # the recurrence gate before its sigmoid, in any float dtype
    i: Annotated[Tensor, "B T D"]  # the input gate before its sigmoid, in any float dtype
    a_param: Annotated[Tensor, "D"]  # the rates before their softplus, in any float dtype
    initial_state: Annotated[Tensor | None, "N D"] = None
    reset: Annotated[Tensor | None, "B T H", CONSTANT] = None  # bool, for each of H groups of channels
    cu_seqlens: Tensor | None = None  # [N + 1]


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T D", Dtype("x")]
    final_state: Annotated[Tensor, "N D"]


SIGNATURE = Signature(Inputs, Outputs)
