"""The signature of the cumulative angle of Mamba-3: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import Signature


class Inputs(NamedTuple):
    """The arguments, in the order of the schema; HV is a multiple of H."""

    x: Annotated[Tensor, "B T H A"]
    dt: Annotated[Tensor, "B T HV"]
    initial_state: Annotated[Tensor | None, "N HV A"] = None  # in radians, zeros if absent
    cu_seqlens: Tensor | None = None  # [N + 1]


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV A"]  # in half turns, from -1 to 1
    final_state: Annotated[Tensor, "N HV A"]  # in radians


SIGNATURE = Signature(Inputs, Outputs)
