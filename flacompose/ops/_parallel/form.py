"""The sequence-parallel form: each rank has a span of the tokens, and all transitions are gathered.

Forwards, every rank joins the transitions of all spans to the state before its own, and computes its tokens
from there. Backwards, the gradient of the state after each span follows in the same way from the outputs of
later spans; then the backward of the form runs on this rank's tokens alone. No token leaves its rank.

It is an `autograd.Function` of registered operators and PyTorch's own collectives. All of these are nodes in
a graph of `torch.compile`, where the compiler may move the collectives; inside an operator it could not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flacompose._torch import OpOverload
from flacompose.ops._operators.signature import Signature
from flacompose.ops._parallel.ranks import Ranks, gathered, refuse_second_derivatives, sharing
from flacompose.ops._parallel.transitions import Map, join
from flacompose.ops._tensors.dtype import autocast_dtype
from flacompose.ops._tensors.packed import sequence_count
from flacompose.ops._tensors.sizes import always_true

RANKS = len(Ranks._fields)


def across_ranks(
    signature: Signature[Any],
    form: OpOverload,
    backward: OpOverload,
    transition: Callable[[Any], tuple[Map, Tensor]],
    initial_gradient: Callable[[Any, Tensor], Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`form`, computed sequence parallel where ranks share the tokens."""

    class Across(torch.autograd.Function):
        """The arguments are those of `Ranks`, then the inputs."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
            ranks, args = Ranks(*args[:RANKS]), args[RANKS:]
            inputs = signature.inputs(*args)
            own, end = transition(inputs._replace(initial_state=None))
            found = _of_every_rank(ranks, *own.tensors, end)
            maps = [own.of(tensors) for *tensors, _ in found]
            initial = None if inputs.initial_state is None else inputs.initial_state.to(end.dtype)
            starts, final_state = join(maps, [end for *_, end in found], initial)
            o, _ = form(*inputs._replace(initial_state=starts[ranks.rank]))

            tensors = [x for x in args if isinstance(x, Tensor)]
            # Copies: a slice of the gathered tensor would keep all of it in memory.
            of_maps = [x.clone() for each in maps for x in each.tensors]
            ctx.save_for_backward(*tensors, starts[ranks.rank], *of_maps)
            ctx.others = [None if isinstance(x, Tensor) else x for x in args]
            ctx.is_tensor = [isinstance(x, Tensor) for x in args]
            ctx.ranks, ctx.map_of, ctx.tensors_of_a_map = tuple(ranks), own.of, len(own.tensors)
            ctx.set_materialize_grads(False)
            return o, final_state

        @staticmethod
        def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> Any:
            refuse_second_derivatives()
            # Read once, as activation checkpointing requires.
            saved, n = ctx.saved_tensors, ctx.tensors_of_a_map
            args, i = [], 0
            for x, is_tensor in zip(ctx.others, ctx.is_tensor, strict=True):
                args.append(saved[i] if is_tensor else x)
                i += is_tensor
            start, of_maps = saved[i], saved[i + 1 :]
            inputs, ranks = signature.inputs(*args), Ranks(*ctx.ranks)
            maps = [ctx.map_of(of_maps[i * n : i * n + n]) for i in range(ranks.size)]
            do = signature.zeros(inputs) if do is None else do
            d_final = torch.zeros_like(start) if d_final is None else d_final

            inputs_from_start = inputs._replace(initial_state=start)
            found = _of_every_rank(ranks, initial_gradient(inputs_from_start, do), d_final)
            # Every rank returns the final state, so its gradient is the sum over the ranks.
            d_final = torch.stack([x for _, x in found]).sum(0)
            d_ends, d_initial = join(maps, [x for x, _ in found], d_final, reverse=True)

            needed = dict(zip(signature.inputs._fields, ctx.needs_input_grad[RANKS:], strict=True))
            mask = [needed[x] and x != "initial_state" for x in signature.differentiable]
            results = backward(*inputs_from_start, do, d_ends[ranks.rank], mask)
            gradients = dict(zip(signature.differentiable, results, strict=True))
            if inputs.initial_state is not None:  # the first rank's part of its gradient is all of it
                part = d_initial if ranks.rank == 0 else torch.zeros_like(d_initial)
                gradients["initial_state"] = part.to(inputs.initial_state.dtype)
            returned = (gradients[x] if needed[x] else None for x in signature.inputs._fields)
            return *[None] * RANKS, *returned

    def shared_form(*args: Any) -> tuple[Tensor, Tensor]:
        ranks = sharing()
        if ranks is None:
            return form(*args)
        inputs = signature.inputs(*_distinct(_cast(signature, signature.inputs(*args))))
        B, T = inputs[0].shape[:2]
        if not always_true(T == 0):
            return Across.apply(*ranks, *inputs)
        o, final_state = Across.apply(*ranks, *_with_a_token(signature, inputs))
        return o[:, :0].expand(B, -1, *o.shape[2:]), final_state

    return shared_form


def _with_a_token(signature: Signature[Any], inputs: Any) -> Any:
    """`inputs` without tokens plus one token in no sequence, so that the rank takes part in all gathers.

    The token is an empty sum, not a constant: a compiler would merge gathers of constants, and the ranks with
    tokens would have more gathers.
    """
    N = sequence_count(inputs[0], inputs.cu_seqlens)
    tokens = {}
    for name in inputs._fields:
        x = getattr(inputs, name)
        if x is not None and "T" in signature.axes.get(name, "").split():
            tokens[name] = x.sum((0, 1))[None, None].to(x.dtype)
    bounds = torch.zeros(N + 1, dtype=torch.int32, device=inputs[0].device)
    return inputs._replace(**tokens, cu_seqlens=bounds)


def _distinct(inputs: Iterable[Any]) -> list[Any]:
    """`inputs`, with a view for each tensor that is given twice, because Dynamo refuses these."""
    found: list[Any] = []
    for x in inputs:
        twice = isinstance(x, Tensor) and any(x is y for y in found)
        found.append(x.view_as(x) if twice else x)
    return found


def _cast(signature: Signature[Any], inputs: Any) -> Any:
    """`inputs`, cast like the operator's by autocast, so that gradients have the given dtypes."""
    dtype = autocast_dtype(inputs[0].device)
    if dtype is None:
        return inputs
    found = {}
    for name, unless in signature.autocast.items():
        x = getattr(inputs, name)
        if x is not None and x.dtype is not torch.float64 and (unless is None or not getattr(inputs, unless)):
            found[name] = x.to(dtype)
    return inputs._replace(**found)


def _of_every_rank(ranks: Ranks, *tensors: Tensor) -> list[list[Tensor]]:
    """The `tensors` of each rank, ``[N, H, ...]`` of one dtype, in one gather.

    The axis of heads is kept, since DTensors may be sharded along it.
    """
    parts = [x.reshape(*x.shape[:2], -1) for x in tensors]
    sizes = [x.shape[2] for x in parts]
    rows = gathered(ranks, torch.cat(parts, 2))
    return [
        [part.reshape(x.shape) for part, x in zip(row.split(sizes, 2), tensors, strict=True)] for row in rows
    ]
