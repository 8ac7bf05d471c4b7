"""The signature of one token of mLSTM: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of the op, in the order of the schema; T is 1, and HV a multiple of H."""

    q: Annotated[Tensor, "B T H K", AUTOCAST]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    v: Annotated[Tensor, "B T HV V", AUTOCAST]
    i: Annotated[Tensor, "B T HV"]  # input gate before its exponential
    f: Annotated[Tensor, "B T HV"]  # forget gate before its sigmoid
    # The state before the token, zeros if absent
    initial_C: Annotated[Tensor | None, "N HV K V"] = None
    initial_n: Annotated[Tensor | None, "N HV K"] = None
    initial_m: Annotated[Tensor | None, "N HV"] = None
    scale: float = 1.0
    eps: float = 0.0


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV V", Dtype("v")]
    final_C: Annotated[Tensor, "N HV K V"]
    final_n: Annotated[Tensor, "N HV K"]
    final_m: Annotated[Tensor, "N HV"]


SIGNATURE = Signature(Inputs, Outputs)
# The lower bound of `m`, as in `ops/mlstm.py`. If all input gates are below it, their exponentials are 0.
LOWEST = -1e4
