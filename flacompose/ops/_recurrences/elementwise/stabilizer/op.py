"""The registered op of the running maximum: `inputs` lists its arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._parallel.ranks import Ranks, gathered, sharing
from flacompose.ops._parallel.token_shift import token_shift
from flacompose.ops._recurrences.elementwise.stabilizer import eager
from flacompose.ops._recurrences.elementwise.stabilizer.inputs import SIGNATURE
from flacompose.ops._recurrences.elementwise.stabilizer.inputs import (
    Inputs as Inputs,  # for the public functions
)
from flacompose.ops._recurrences.forms import define_ops
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import sequence_count, summed, without_tail
from flacompose.ops._tensors.sizes import always_true


def _flops(x: Any, *_: Any, **__: Any) -> int:
    """An addition and a comparison for each element."""
    return 2 * prod(x)


_forward = define_ops(SIGNATURE, eager, forms=("forward",), flops=_flops)["forward"]


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``(gates [B, T, D], m [B, T, D], final_state [N, D])``, also sequence parallel."""
    ranks = sharing()
    return _forward(*args) if ranks is None else _across(ranks, Inputs(*args))


def _across(ranks: Ranks, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence parallel: a rank maps the maximum ``m`` before it to ``max(total + m, end)``."""
    x, g, initial_state, cu_seqlens = inputs
    known = Inputs(upcast(x.detach()), g.detach(), None, cu_seqlens)
    if initial_state is None:
        initial_state = known.x.new_zeros(sequence_count(x, cu_seqlens), x.shape[2])
    initial_state = initial_state.to(known.x.dtype)
    # `LOWEST` by its value: Dynamo would take a constant of the module for an input, and compile twice.
    lowest = torch.full_like(initial_state, -1e38)
    empty = always_true(x.shape[1] == 0)
    end = lowest if empty else _forward(*known._replace(initial_state=lowest))[2]
    total = summed(known.g, cu_seqlens).to(end.dtype)
    start = initial_state.detach()
    for total_, end_ in gathered(ranks, torch.stack([total, end]))[: ranks.rank]:
        start = torch.maximum(total_ + start, end_)
    m = known.x if empty else _forward(*known._replace(initial_state=start))[1]
    # Computed from exactly the numbers of the rank before, whose rounding may differ from that of `start`.
    before, final_state = token_shift(m, initial_state, cu_seqlens=cu_seqlens)
    gates = (g.double() + (before.detach().double() - m.double())).to(m.dtype)
    gates, m = without_tail(cu_seqlens, gates, m)
    return gates, m, final_state
