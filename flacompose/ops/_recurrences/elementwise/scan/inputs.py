"""The signature of the elementwise scan: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    x: Annotated[Tensor, "B T D", AUTOCAST]
    g: Annotated[Tensor, "B T D", GATE]
    initial_state: Annotated[Tensor | None, "N D"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T D", Dtype("x")]
    final_state: Annotated[Tensor, "N D"]


SIGNATURE = Signature(Inputs, Outputs)
