"""The signature of the delta rule: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    q: Annotated[Tensor, "B T H K", AUTOCAST]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    v: Annotated[Tensor, "B T HV V", AUTOCAST]  # HV a multiple of H
    beta: Annotated[Tensor, "B T HV"]  # how much of a value is replaced
    g: Annotated[Tensor | None, "B T HV", GATE] = None  # a decay per token and head
    gk: Annotated[Tensor | None, "B T HV K", GATE] = None  # a decay per token, head and channel of the keys
    a: Annotated[Tensor | None, "B T H K", AUTOCAST] = None  # reads the value that is replaced; `k` if absent
    initial_state: Annotated[Tensor | None, "N HV K V"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
    read_before: bool = False  # whether `a` reads the state before it decays; not with gk


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV V", Dtype("v")]
    final_state: Annotated[Tensor, "N HV K V"]


SIGNATURE = Signature(Inputs, Outputs)
NORM_EPS = 1e-6  # added to the squared norms by which queries and keys are divided
