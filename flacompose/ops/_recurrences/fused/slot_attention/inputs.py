"""The signature of one token of slot attention: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of the op, in the order of the schema."""

    q: Annotated[Tensor, "B T H G K", AUTOCAST]  # G queries share the state of a head; T is 1
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    v: Annotated[Tensor, "B T H V", AUTOCAST]
    s: Annotated[Tensor, "B T H M", AUTOCAST]  # the weight of the write to each slot
    g: Annotated[Tensor, "B T H M", GATE]  # natural-log decay of the slots
    initial_k: Annotated[Tensor | None, "N H K M"] = None
    initial_v: Annotated[Tensor | None, "N H M V"] = None
    scale: float = 1.0


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T H G V", Dtype("v")]
    final_k: Annotated[Tensor, "N H K M"]
    final_v: Annotated[Tensor, "N H M V"]


SIGNATURE = Signature(Inputs, Outputs)
