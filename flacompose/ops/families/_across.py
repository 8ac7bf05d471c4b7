"""A form across ranks: each has a stretch of the tokens, and they gather what their stretches do to a state.

Forwards, every rank joins the maps of all stretches to the state before its own, and computes its tokens from there.
Backwards, the gradient of the state after each stretch is joined in the same way from those that come from the outputs
of the stretches after it; then the backward of the form is that of this rank's tokens alone. No token leaves its rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flacompose._torch import OpOverload
from flacompose.ops._dtype import autocast_dtype
from flacompose.ops._ranks import Ranks, gathered, sharing
from flacompose.ops._sizes import always_true
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._signature import Signature
from flacompose.ops.families._stretches import Map, join


def across_ranks(
    signature: Signature[Any],
    form: OpOverload,
    backward: OpOverload,
    stretch: Callable[[Any], tuple[Map, Tensor]],
    d_start: Callable[[Any, Tensor], Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`form`, which is computed across ranks where they share the tokens."""
    of_tokens = [x for x in signature.differentiable if "T" in signature.axes[x].split()]

    class Across(torch.autograd.Function):
        """The arguments are those of `Ranks`, then the inputs."""

        @staticmethod
        def forward(ctx: Any, group: str, index: int, count: int, *args: Any) -> tuple[Tensor, Tensor]:
            inputs = signature.inputs(*args)
            own, end = stretch(inputs._replace(initial_state=None))
            found = _of_every_rank(Ranks(group, index, count), *own.tensors, end)
            maps = [own.of(tensors) for *tensors, _ in found]
            starts, final_state = join(maps, [ends for *_, ends in found], inputs.initial_state)
            o, _ = form(*inputs._replace(initial_state=starts[index]))
            tensors = [x for x in args if isinstance(x, Tensor)]
            ctx.save_for_backward(starts[index], *tensors, *(x for one in maps for x in one.tensors))
            ctx.ranks, ctx.others = (
                (group, index, count),
                [None if isinstance(x, Tensor) else x for x in args],
            )
            ctx.present, ctx.of, ctx.size = [isinstance(x, Tensor) for x in args], own.of, len(own.tensors)
            ctx.set_materialize_grads(False)
            return o, final_state

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> Any:
            start, *saved = ctx.saved_tensors
            args = [saved.pop(0) if present else x for x, present in zip(ctx.others, ctx.present)]
            maps = [ctx.of(saved[i : i + ctx.size]) for i in range(0, len(saved), ctx.size)]
            inputs, ranks = signature.inputs(*args), Ranks(*ctx.ranks)
            do = signature.zeros(inputs) if do is None else do
            d_final = torch.zeros_like(start) if d_final is None else d_final
            found = _of_every_rank(ranks, d_start(inputs, do), d_final)
            # Every rank has the final state, so its gradient is the sum of what the ranks have for it.
            d_final = torch.stack([x for _, x in found]).sum(0)
            d_ends, d_initial = join(maps, [x for x, _ in found], d_final, reverse=True)
            needed = dict(zip(signature.inputs._fields, ctx.needs_input_grad[3:]))
            mask = [needed[x] for x in signature.differentiable]
            gradients = backward(*inputs._replace(initial_state=start), do, d_ends[ranks.index], mask)
            made: dict[str, Tensor | None] = dict(zip(signature.differentiable, gradients))
            if inputs.initial_state is not None:  # the first rank's part of its gradient is all of it
                d_initial = d_initial if ranks.index == 0 else torch.zeros_like(d_initial)
                made["initial_state"] = d_initial.to(inputs.initial_state.dtype)
            return None, None, None, *(made[x] if needed[x] else None for x in signature.inputs._fields)

    def shared_form(*args: Any) -> tuple[Tensor, Tensor]:
        ranks = sharing()
        if ranks is None:
            return form(*args)
        inputs = _cast(signature, signature.inputs(*args))
        first = inputs[0]
        if not always_true(first.shape[1] == 0):
            return Across.apply(*ranks, *inputs)
        # A rank without tokens takes part with one token that is in no sequence.
        N = sequence_count(first, inputs.cu_seqlens)
        given = {x: getattr(inputs, x) for x in of_tokens}
        tokens = {x: None if y is None else _one_token(y) for x, y in given.items()}
        bounds = torch.zeros(N + 1, dtype=torch.int32, device=first.device)
        o, final_state = Across.apply(*ranks, *inputs._replace(**tokens, cu_seqlens=bounds))
        return o[:, :0].expand(first.shape[0], -1, *o.shape[2:]), final_state

    return shared_form


def _one_token(x: Tensor) -> Tensor:
    """``[1, 1, ...]`` of no tokens, so that the rank takes part in the backward as well."""
    return torch.cat([x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])])[None]


def _cast(signature: Signature[Any], inputs: Any) -> Any:
    """`inputs` as autocast casts those of the operator, so that their gradients have the dtype of what was given."""
    dtype = autocast_dtype(inputs[0].device)
    if dtype is None:
        return inputs
    found = {}
    for name, exempt in signature.autocast.items():
        x = getattr(inputs, name)
        if x is not None and x.dtype is not torch.float64 and (exempt is None or not getattr(inputs, exempt)):
            found[name] = x.to(dtype)
    return inputs._replace(**found)


def _of_every_rank(ranks: Ranks, *tensors: Tensor) -> list[list[Tensor]]:
    """The `tensors` of each rank, all of one dtype, in one gather."""
    sizes = [x.numel() for x in tensors]
    rows = gathered(ranks, torch.cat([x.flatten() for x in tensors]))
    return [[part.view(x.shape) for part, x in zip(row.split(sizes), tensors)] for row in rows]
