"""The signature of one token of Mamba-3, with one key and one query: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import Dtype, Signature


class Inputs(NamedTuple):
    """The arguments, in the order of the schema; T is 1, and HV a multiple of each H.

    The axes ``E, F`` of a state are keys and values or, with `values_first`, values and keys.
    """

    Q: Annotated[Tensor, "B T H S"]  # S is even
    K: Annotated[Tensor, "B T H S"]
    V: Annotated[Tensor, "B T HV P"]
    ADT: Annotated[Tensor, "B T HV"]
    DT: Annotated[Tensor, "B T HV"]
    Trap: Annotated[Tensor, "B T HV"]
    Q_bias: Annotated[Tensor, "HV S"]
    K_bias: Annotated[Tensor, "HV S"]
    Angles: Annotated[Tensor, "B T H A"]  # of the first A of S / 2 pairs; its H may differ from the H of Q
    # The states before the token
    initial_angle: Annotated[Tensor, "N HV A"]  # in radians
    initial_state: Annotated[Tensor, "N HV E F"]
    initial_k: Annotated[Tensor, "N HV S"]
    initial_v: Annotated[Tensor, "N HV P"]
    D: Annotated[Tensor | None, "HV"] = None
    Z: Annotated[Tensor | None, "B T HV P"] = None  # the gate before its silu
    values_first: bool = False


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV P", Dtype("V")]
    final_angle: Annotated[Tensor, "N HV A"]
    final_state: Annotated[Tensor, "N HV E F"]
    final_k: Annotated[Tensor, "N HV S", Dtype("K")]
    final_v: Annotated[Tensor, "N HV P", Dtype("V")]


SIGNATURE = Signature(Inputs, Outputs)
