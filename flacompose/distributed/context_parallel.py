"""Context parallelism: the tokens of every sequence shared out among the ranks, in order."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flacompose import ops
from flacompose.layers.recurrent import StatefulLayer
from flacompose.layers.short_conv import ShortConvolution
from flacompose.models import RecurrentLM
from flacompose.ops._arguments import require
from flacompose.ops._parallel.ranks import Ranks, bounds_of_rank, check_device, shared

Target = TypeVar("Target", bound=Callable[..., Any])

FUNCTIONS = tuple(
    function
    for name, function in vars(ops).items()
    if callable(function)
    and "cu_seqlens" in inspect.signature(function).parameters
    and "recurrent" not in name.split("_")[:2]
)
LAYERS = (StatefulLayer, ShortConvolution, RecurrentLM)
STATES = ("initial_state", "initial_states", "Input_States")


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
    short convolution or a token shift reads. Softmax attention between the recurrent layers of a `RecurrentLM` gathers
    its keys and values, which takes pieces of one length and no pads. Everything else that the function or module
    does, it does in each rank as before: compiled, under autocast, and in a module that is sharded along other
    dimensions of a mesh.

    Args:
        target: One of the functions of [flacompose.ops](../ops/gla.md) that take ``cu_seqlens``, but for those that
            compute token by token; or a module with layers of flacompose, a `RecurrentLM` for example, or a model of
            transformers whose recurrent layers [enable or accelerate](transformers.md) has put on these functions.
        mesh: A mesh of one dimension, such as ``mesh["cp"]`` of a larger one.

    Returns:
        A function with the arguments of `target`, or `target` itself, the module, whose layers now share the tokens.

    Raises:
        TypeError: If `target` is none of these, or `mesh` no `DeviceMesh`.
        ValueError: If `mesh` has more dimensions, or a module contains no such layer, or one that cannot share tokens.
            From a call, if tensors are on another kind of device than `mesh`, or an argument is wrong in another way.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['cp'] of a larger one, got {mesh.ndim}")
    ranks = Ranks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), mesh.device_type)
    if isinstance(target, nn.Module):
        _share(target, ranks)
        return target
    if target not in FUNCTIONS:
        names = ", ".join(function.__name__ for function in FUNCTIONS)
        got = getattr(target, "__name__", type(target).__name__)
        got = f"{got}, wrapped by something else" if hasattr(target, "__wrapped__") else got
        raise TypeError(f"target must be a module, or one of {names}, got {got}")
    return _function_across(target, ranks)


def _share(module: nn.Module, ranks: Ranks) -> None:
    layers = [part for part in module.modules() if isinstance(part, LAYERS)]
    of_transformers = False
    if "transformers" in sys.modules:
        from flacompose.integrations import _context

        of_transformers = _context.share(module, ranks)
    if not layers and not of_transformers:
        raise ValueError(f"target must contain a recurrent layer, got {type(module).__name__}")
    for layer in layers:
        layer.ranks = ranks


def _function_across(function: Target, ranks: Ranks) -> Target:
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def across(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        if len(given) < len(args) + len(options):
            return function(*args, **options)  # which says what is wrong
        first = next((name for name in names if getattr(given.get(name), "ndim", 0) > 2), names[0])
        x, bounds = given.get(first), given.get("cu_seqlens")  # the first of the tokens, [B, T, ...]
        with shared(ranks):
            for name, y in given.items():
                check_device(ranks, name, y)
            if bounds is not None and isinstance(x, Tensor):
                N = require.sequences(x, bounds, first)
                for name in STATES:
                    for state in _tensors(given.get(name)):
                        if state.shape[:1] != (N,):
                            raise ValueError(
                                f"{name} must have {N} states, one a sequence, got shape {tuple(state.shape)}"
                            )
                given["cu_seqlens"] = bounds_of_rank(ranks, bounds, x.shape[1])
            return function(**given)

    return across  # type: ignore[return-value]


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple | list):
        for part in state:
            yield from _tensors(part)
