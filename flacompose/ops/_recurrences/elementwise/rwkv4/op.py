"""The registered ops of RWKV-4: `inputs` lists their arguments, `eager` computes them in PyTorch.

It is no call of the elementwise scan: numerator and denominator share their weights, whose maximum is
computed along the way. One kernel reads keys and values and writes the output, without intermediate tensors.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._parallel.ranks import Ranks, gathered, of_all, sharing
from flacompose.ops._recurrences.elementwise.rwkv4 import eager
from flacompose.ops._recurrences.elementwise.rwkv4.inputs import SIGNATURE
from flacompose.ops._recurrences.elementwise.rwkv4.inputs import Inputs as Inputs  # for the public functions
from flacompose.ops._recurrences.forms import define_ops
from flacompose.ops._tensors.dtype import state_dtype
from flacompose.ops._tensors.packed import bounds, sequence_count
from flacompose.ops._tensors.sizes import always_true

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _flops(v: Any, *_: Any, **__: Any) -> int:
    """For each element: a product and a sum in both sums, and in both parts of the output, and their quotient."""
    return 9 * prod(v)


_ops = define_ops(SIGNATURE, eager, forms=("chunk", "recurrent"), flops=_flops)
recurrent, steps = _ops["recurrent"], _ops["steps"]


def chunk(*args: Any) -> Results:
    """``(o [B, T, D], final_a [N, D], final_b [N, D], final_m [N, D])``, also sequence parallel."""
    ranks = sharing()
    results: Results = _ops["chunk"](*args) if ranks is None else _across(ranks, Inputs(*args))
    return results


def _across(ranks: Ranks, inputs: Inputs) -> Results:
    """Sequence parallel: every rank joins all transitions, and computes its tokens from there."""
    v, k, w, u, cu_seqlens = *inputs[:4], inputs.cu_seqlens
    initial: Any = inputs[4:7]
    (B, T, D), N, dtype = v.shape, sequence_count(v, cu_seqlens), state_dtype(v.dtype)
    empty = always_true(T == 0)
    if empty:
        # A token in no sequence lets this rank take part in all gathers. It is an empty sum, not a constant,
        # since a compiler would merge gathers of constants.
        v, k = (x.sum((0, 1))[None, None] for x in (v, k))
        cu_seqlens = torch.zeros(N + 1, dtype=torch.int32, device=v.device)
    _, a, b, m = _ops["chunk"](v, k, w, u, None, None, None, cu_seqlens)
    count = torch.full_like(m, T)
    if cu_seqlens is not None:
        count = bounds(cu_seqlens, T).diff().to(dtype)[:, None].expand_as(m)
    sums = of_all(ranks, torch.stack([a, b]))
    others = gathered(ranks, torch.stack([m.detach(), count]))
    first_a, first_b, first_m = (torch.zeros_like(m) if x is None else x.to(dtype) for x in initial)
    # `LOWEST` by its value: Dynamo would take a constant of another module for an input.
    states = [eager.State(first_a, first_b, torch.where(first_b == 0, -1e38, first_m))]
    for (a, b), (m, tokens) in zip(sums, others):
        states.append(eager.join(states[-1], eager.State(a, b, m), w.to(dtype), tokens))
    # Selected from the states of all ranks, so that the first rank's graph has the gather too: all ranks run
    # its backward.
    start = (torch.stack(x)[ranks.rank] for x in zip(*states, strict=True))
    o, *_ = _ops["chunk"](v, k, w, u, *start, cu_seqlens)
    a, b, m = states[-1]
    m = torch.where(others[:, 1].sum(0) > 0, m, states[0].m)
    return o[:, :0].expand(B, -1, D) if empty else o, a, b, m
