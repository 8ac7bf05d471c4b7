"""The signature of diagonal plus low rank: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    q: Annotated[Tensor, "B T H K", AUTOCAST]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    v: Annotated[Tensor, "B T H V", AUTOCAST]
    a: Annotated[Tensor, "B T H K", AUTOCAST]  # reads the state; b writes the result
    b: Annotated[Tensor, "B T H K", AUTOCAST]
    gk: Annotated[Tensor | None, "B T H K", GATE] = None  # a decay per token, head and channel of the keys
    initial_state: Annotated[Tensor | None, "N H K V"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
    read_before: bool = True  # whether `a` reads the state before its decay, or after it


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T H V", Dtype("v")]
    final_state: Annotated[Tensor, "N H K V"]


SIGNATURE = Signature(Inputs, Outputs)
