"""Context parallelism: the tokens of every sequence shared out among the ranks, in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flacompose import ops
from flacompose.layers.recurrent import StatefulLayer
from flacompose.models.softmax_attention import SoftmaxAttention
from flacompose.ops import _check
from flacompose.ops._ranks import Ranks, bounds_of_rank, shared

Target = TypeVar("Target", bound=Callable[..., Any])

FUNCTIONS = tuple(
    function
    for name, function in vars(ops).items()
    if callable(function)
    and "cu_seqlens" in inspect.signature(function).parameters
    and "recurrent" not in name
)


def context_parallel(target: Target, mesh: DeviceMesh) -> Target:
    """`target`, of which every rank of `mesh` is given a part of the tokens: a function, or a module, in place.

    Each rank passes its own piece of the tokens, ``[B, T, ...]``: that of the first rank is the beginning of the
    sequences, and the others follow in the order of the ranks. Pieces may differ in length and be empty. What every
    rank passes alike is whatever has no tokens: ``cu_seqlens``, the bounds in the whole packed row; the states before
    the first token of each sequence; parameters. Each rank gets the outputs of its own tokens, and the states after
    the last token of each sequence, which are the same on all.

    The loss is the sum of the losses of the ranks, all of which have to call ``backward``. What every rank has alike
    gets this rank's part of its gradient, so that a sum over the ranks, as for data parallelism, gives the whole.

    The ranks gather what their tokens do to a state, which is as large as a few states, and no tokens but those that a
    short convolution or a token shift reads. Everything else that the function or module does, it does in each rank
    as before: compiled, under autocast, and in a module that is sharded along other dimensions of a mesh.

    Args:
        target: One of the functions of [flacompose.ops](../ops/gla.md) that take ``cu_seqlens``, but for those that
            compute token by token; or a module with layers of flacompose, a `RecurrentLM` for example.
        mesh: A mesh of one dimension, such as ``mesh["cp"]`` of a larger one.

    Returns:
        A function with the arguments of `target`, or `target` itself, the module, whose layers now share the tokens.

    Raises:
        TypeError: If `target` is none of these, or `mesh` no `DeviceMesh`.
        ValueError: If `mesh` has more dimensions, or a module contains no layer, or softmax attention. From a call, if
            tensors are on another kind of device than `mesh`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['cp'] of a larger one, got {mesh.ndim}")
    ranks = Ranks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())
    if isinstance(target, nn.Module):
        _share(target, ranks)
        return target
    if target not in FUNCTIONS:
        names = ", ".join(function.__name__ for function in FUNCTIONS)
        got = getattr(target, "__name__", type(target).__name__)
        raise TypeError(f"target must be a module, or one of {names}, got {got}")
    return _across(target, ranks, mesh.device_type)


def _share(module: nn.Module, ranks: Ranks) -> None:
    layers = {path: part for path, part in module.named_modules() if isinstance(part, StatefulLayer)}
    if not layers:
        raise ValueError(f"target must contain a layer of flacompose, got {type(module).__name__}")
    for path, layer in layers.items():
        if isinstance(layer, SoftmaxAttention):
            raise ValueError(f"target must contain no softmax attention, got some at {path or 'its root'!r}")
    for layer in layers.values():
        layer.ranks = ranks


def _across(function: Target, ranks: Ranks, device_type: str) -> Target:
    names = list(inspect.signature(function).parameters)
    place = names.index("cu_seqlens")

    @wraps(function)
    def across(*args: Any, **options: Any) -> Any:
        x = args[0] if args else options.get(names[0])
        if isinstance(x, Tensor) and x.device.type != device_type:
            raise ValueError(f"{names[0]} must be on the device of the mesh, {device_type}, got {x.device}")
        bounds = args[place] if len(args) > place else options.get("cu_seqlens")
        if bounds is not None:
            _check.packed(names[0], x, bounds)
            bounds = bounds_of_rank(ranks, bounds, x.shape[1])
            if len(args) > place:
                args = (*args[:place], bounds, *args[place + 1 :])
            else:
                options["cu_seqlens"] = bounds
        with shared(ranks):
            return function(*args, **options)

    return across  # type: ignore[return-value]
