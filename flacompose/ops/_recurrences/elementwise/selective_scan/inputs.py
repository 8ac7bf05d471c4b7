"""The signature of the selective scan: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of the op, in the order of the schema."""

    x: Annotated[Tensor, "B T D", AUTOCAST]
    dt: Annotated[Tensor, "B T D"]  # any float dtype, like all arguments without `AUTOCAST`
    A: Annotated[Tensor, "D S"]
    B: Annotated[Tensor, "B T H S", AUTOCAST]  # each of the H groups of channels has its own
    C: Annotated[Tensor, "B T H S", AUTOCAST]
    D: Annotated[Tensor | None, "D"] = None  # the weight of the skip
    z: Annotated[Tensor | None, "B T D"] = None  # the gate before its silu
    dt_bias: Annotated[Tensor | None, "D"] = None
    initial_state: Annotated[Tensor | None, "N D S"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    softplus: bool = False


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T D", Dtype("x")]
    final_state: Annotated[Tensor, "N D S"]


SIGNATURE = Signature(Inputs, Outputs)
