"""Placements of distributed tensors (DTensors) with which an operator needs no communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from flacompose._torch import OpOverload
from flacompose.ops._operators.schema import names_of, primal_of, tensor_positions, unwanted_results

unregistered: list[tuple[OpOverload, Callable[..., Any]]] = []
"""The operators that DTensor does not know yet, and their `shardings_of`."""


def shardings_of(
    op: OpOverload, heads: Mapping[str, int | None], batch: Mapping[str, int | None]
) -> Callable[..., Any]:
    """Placements that need no communication: all replicated, sharded by heads, sharded by batch."""
    arguments, returns = names_of(op._schema.arguments), names_of(op._schema.returns)
    tensors = {arguments[i] for i in tensor_positions(op)}

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        present = {name for name, x in zip(arguments, args) if name in tensors and x is not None}
        absent = (tensors - present) | unwanted_results(op, args)

        def placement(name: str, dims: Mapping[str, int | None]) -> Any:
            primal = primal_of(name, dims)
            if name in absent or primal in absent or primal not in dims:
                return Replicate()
            dim = dims[primal]
            if dim is not None:
                return Shard(dim)
            return Replicate() if name == primal else Partial()

        choices: list[Mapping[str, int | None]] = [{}]
        primals = [(x, primal_of(name, heads)) for name, x in zip(arguments, args) if name in present]
        split = [(x, primal, heads[primal]) for x, primal in primals if primal in heads]
        # A tensor with a single head that all others share is replicated, and its gradient is a sum over
        # ranks.
        single_head = {primal for x, primal, dim in split if dim is not None and x.shape[dim] == 1}
        own = [(x, dim) for x, primal, dim in split if primal not in single_head]
        if own and _same_shards(own):
            choices.append({**heads, **dict.fromkeys(single_head)})
        if all(primal_of(name, batch) in batch for name in present):
            choices.append(batch)
        return [
            (
                [placement(x, dims) for x in returns],
                [placement(x, dims) if x in present else None for x in arguments],
            )
            for dims in choices
        ]

    return rule


def _same_shards(split: Sequence[tuple[Any, int | None]]) -> bool:
    """Whether each rank gets matching shards of all tensors: grouped heads must be sharded evenly."""
    sizes = {spec.shape[dim] for spec, dim in split}
    if len(sizes) == 1:
        return True
    mesh = split[0][0].mesh.shape
    shard_counts = [prod(axes) for n in range(1, len(mesh) + 1) for axes in combinations(mesh, n)]
    # PyTorch never cuts a dimension into more shards than it has elements.
    return all(size % count == 0 for count in shard_counts if count <= min(sizes) for size in sizes)


def register_shardings() -> None:
    """Register all operators that DTensor does not know yet: the derivative of one may call others."""
    from torch.distributed.tensor import experimental

    while unregistered:
        op, shardings = unregistered.pop()
        experimental.register_sharding(op)(shardings)
