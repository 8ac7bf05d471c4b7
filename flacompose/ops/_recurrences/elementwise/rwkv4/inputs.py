"""The signature of RWKV-4: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, GATE, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    v: Annotated[Tensor, "B T D", AUTOCAST]
    k: Annotated[Tensor, "B T D"]  # the logarithm of the strength of a write
    w: Annotated[Tensor, "D", GATE]  # natural-log decay of a channel
    u: Annotated[Tensor, "D"]  # bonus of the present token
    # The state before the first token: all three tensors or none
    initial_a: Annotated[Tensor | None, "N D"] = None
    initial_b: Annotated[Tensor | None, "N D"] = None
    initial_m: Annotated[Tensor | None, "N D"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T D", Dtype("v")]
    final_a: Annotated[Tensor, "N D"]
    final_b: Annotated[Tensor, "N D"]
    final_m: Annotated[Tensor, "N D"]


SIGNATURE = Signature(Inputs, Outputs)
LOWEST = -1e38  # replaces a maximum of -inf, so that no difference of two is NaN
