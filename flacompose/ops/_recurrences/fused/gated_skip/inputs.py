"""The signature of the gated skip: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import Dtype, Signature


class Inputs(NamedTuple):
    """The arguments, in the order of the schema; at least one of D, w and z is given."""

    y: Annotated[Tensor, "B T H P"]  # the output of a scan
    x: Annotated[Tensor, "B T H P"]  # the input of the scan
    D: Annotated[Tensor | None, "H E"] = None  # E is 1 or P
    w: Annotated[Tensor | None, "B T H"] = None  # a term of each token, added to D
    z: Annotated[Tensor | None, "B T H P"] = None  # the gate before its silu
    cu_seqlens: Tensor | None = None  # [N + 1]


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T H P", Dtype("x")]


SIGNATURE = Signature(Inputs, Outputs)
