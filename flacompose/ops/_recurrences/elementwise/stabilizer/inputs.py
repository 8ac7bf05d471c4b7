"""The signature of the running maximum: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import GATE, Signature


class Inputs(NamedTuple):
    """The arguments, in the order of the schema."""

    x: Annotated[Tensor, "B T D"]  # the logarithm of the strength of a write
    g: Annotated[Tensor, "B T D", GATE]  # natural-log decay
    initial_state: Annotated[Tensor | None, "N D"] = None  # the maximum before the first token, 0 if absent
    cu_seqlens: Tensor | None = None  # [N + 1]


class Outputs(NamedTuple):
    """The results, all in the dtype of states."""

    gates: Annotated[Tensor, "B T D"]  # g_t + m_{t-1} - m_t
    m: Annotated[Tensor, "B T D"]
    final_state: Annotated[Tensor, "N D"]


SIGNATURE = Signature(Inputs, Outputs)
LOWEST = -1e38  # replaces a maximum of -inf, so that no difference of two is NaN
