"""The signature of the denominator: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    q: Annotated[Tensor, "B T H K", AUTOCAST]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    x: Annotated[Tensor, "B T HV V", AUTOCAST]  # the numerator, HV a multiple of H
    g: Annotated[Tensor, "B T HV", GATE]  # natural-log decay
    beta: Annotated[Tensor, "B T HV"]  # the strength of writes
    floor: Annotated[Tensor, "B T HV"]  # the lower bound of the denominator
    initial_state: Annotated[Tensor | None, "N HV K"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
    eps: float = 0.0


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV V", Dtype("x")]
    final_state: Annotated[Tensor, "N HV K"]


SIGNATURE = Signature(Inputs, Outputs)
