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
    """Make a function, or in place a module, compute tokens that the ranks of `mesh` share.

    Each rank passes a piece ``[B, T, ...]`` of the tokens, in the order of the ranks. Pieces may differ in length and
    be empty. All ranks pass the same tensors without tokens: ``cu_seqlens``, the bounds in the complete packed row, the
    states before the first token of each sequence, and parameters. Each rank gets the outputs of its own tokens, and
    the states after the last token of each sequence, which are the same on all ranks.

    The loss is the sum of the losses of the ranks, and all ranks must call ``backward``. Tensors that all ranks share
    get this rank's part of the gradient: sum over the ranks, as in data parallelism.

    The ranks exchange the transitions of their tokens, which are as large as a few states, and the tokens that a short
    convolution or a token shift reads. Softmax attention in a `RecurrentLM` gathers keys and values, for which all
    pieces need the same length and no pads. All other computations are those of one rank: compiled, under autocast, and
    in a module that is sharded along other dimensions of a mesh.

    Args:
        target: A function of [flacompose.ops](../ops/gla.md) that takes ``cu_seqlens``, but no recurrent form; or a
            module with layers of flacompose, such as a `RecurrentLM`; or a model of transformers that is [enabled or
            accelerated](transformers.md).
        mesh: A mesh of one dimension, such as ``mesh["cp"]`` of a larger one.

    Returns:
        A function with the arguments of `target`, or the module `target` itself.

    Raises:
        TypeError: If `target` is not supported, or `mesh` is no `DeviceMesh`.
        ValueError: If `mesh` has more dimensions, or a module contains no such layer, or a layer that cannot share
            tokens. Calls raise it if tensors are on another kind of device than `mesh`, or an argument is wrong.
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
            return function(*args, **options)  # whose error names the wrong argument
        first = next((name for name in names if getattr(given.get(name), "ndim", 0) > 2), names[0])
        x, bounds = given.get(first), given.get("cu_seqlens")  # the first argument with tokens, [B, T, ...]
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
