"""The registered ops of the elementwise scan: a chunked form and a recurrent one, of the same function.

h_t = exp(g_t) * h_{t-1} + x_t        o_t = h_t
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops.families._op import define_forms, rows
from flacompose.ops.families.scan import eager


def _fake(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    final_state = x.new_empty(rows(x, cu_seqlens), x.shape[2], dtype=state_dtype(x.dtype))
    return x.new_empty(x.shape), final_state


def _flops(x, *_, **__) -> int:
    """A multiplication and an addition for each element."""
    return 2 * prod(x)


chunk, recurrent = define_forms(
    "scan",
    eager,
    "Tensor x, Tensor g, Tensor? initial_state, Tensor? cu_seqlens",
    ("x", "g"),
    _fake,
    {"x": None},
    _flops,
)
