"""The signature of the short convolution: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import AUTOCAST, Dtype, Signature

# The kernels unroll the columns, which takes registers and time to compile. PyTorch computes wider convolutions.
MAX_WIDTH = 8


class Inputs(NamedTuple):
    """The arguments of the op, in the order of the schema."""

    x: Annotated[Tensor, "B T D", AUTOCAST]
    weight: Annotated[Tensor, "D W"]
    bias: Annotated[Tensor | None, "D"] = None
    initial_state: Annotated[Tensor | None, "N D W"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    silu: bool = False  # whether silu is applied to the sums


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T D", Dtype("x")]
    final_state: Annotated[Tensor, "N D W"]


SIGNATURE = Signature(Inputs, Outputs)
