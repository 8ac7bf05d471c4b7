"""The signature of head decay: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    q: Annotated[Tensor, "B T H K", AUTOCAST]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    v: Annotated[Tensor, "B T HV V", AUTOCAST]  # HV a multiple of H
    g: Annotated[Tensor | None, "B T HV", GATE] = None  # a decay per token and head
    g_gamma: Annotated[Tensor | None, "HV", GATE] = None  # a decay per head, the same for every token
    beta: Annotated[Tensor | None, "B T HV"] = None  # the strength of writes, 1 if absent
    initial_state: Annotated[Tensor | None, "N HV K V"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV V", Dtype("v")]
    final_state: Annotated[Tensor, "N HV K V"]


SIGNATURE = Signature(Inputs, Outputs)
