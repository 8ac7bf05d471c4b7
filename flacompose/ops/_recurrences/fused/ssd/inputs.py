"""The signature of Mamba-2's scan: its arguments and results."""

from __future__ import annotations

from math import inf
from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments, in the order of the schema. Arguments without `AUTOCAST` may have any float dtype."""

    x: Annotated[Tensor, "B T HV V", AUTOCAST]
    dt: Annotated[Tensor, "B T HV"]
    A: Annotated[Tensor, "HV"]
    B: Annotated[Tensor, "B T H K", AUTOCAST]
    C: Annotated[Tensor, "B T H K", AUTOCAST]
    D: Annotated[Tensor | None, "HV E"] = None  # E is 1 or V
    z: Annotated[Tensor | None, "B T HV V"] = None  # the gate before its silu
    dt_bias: Annotated[Tensor | None, "HV"] = None
    initial_state: Annotated[Tensor | None, "N HV K V"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    softplus: bool = False
    least: float = 0.0  # time steps are at least this
    most: float = inf


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV V", Dtype("x")]
    final_state: Annotated[Tensor, "N HV K V"]


SIGNATURE = Signature(Inputs, Outputs)
