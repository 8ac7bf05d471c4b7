"""The signature of channel decay: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Autocast, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    q: Annotated[Tensor, "B T H K", Autocast(unless="softmax")]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    v: Annotated[Tensor, "B T H V", AUTOCAST]
    gk: Annotated[Tensor | None, "B T H K", GATE] = None
    gv: Annotated[Tensor | None, "B T H V", GATE] = None
    u: Annotated[Tensor | None, "H K"] = None  # the bonus of the current token
    initial_state: Annotated[Tensor | None, "N H K V"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
    softmax: bool = False  # q are logits, of any dtype, and the state is read with their softmax
    full_precision: bool = False  # the output has the dtype of states, whatever that of the inputs


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T H V", Dtype("v", unless="full_precision")]
    final_state: Annotated[Tensor, "N H K V"]


SIGNATURE = Signature(Inputs, Outputs)
