"""Derivatives of an operator in both modes and to any order, ``vmap`` over it, and autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose._torch import (
    AUTOCAST_KEYS,
    AutoDispatchBelowAutograd,
    ExcludeDispatchKeyGuard,
    FunctionalTensor,
    OpOverload,
    any_requires_grad,
    are_functorch_transforms_active,
    custom_function_call,
    forward_mode_is_on,
    set_fwd_grad_enabled,
    unpack_dual,
)
from flacompose.ops._operators.schema import names_of, primal_of, tensor_positions, unwanted_results
from flacompose.ops._operators.sharding import register_shardings
from flacompose.ops._tensors.dtype import AUTOCAST_DEVICES, autocast_on

FUNCTORCH_KEY = "FuncTorchDynamicLayerFrontMode"

vjp: Callable[..., Any] = torch.func.vjp


def derivative_kernels(
    op: OpOverload,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    backward_op: OpOverload | None,
    vmap_rule: Callable[..., Any],
    autocast: Mapping[str, str | None],
) -> dict[str, Callable[..., Any]]:
    """The functions of an operator for the Autograd, functorch and autocast dispatch keys.

    The first two run one ``autograd.Function``, to which every transform of ``torch.func`` applies PyTorch's
    rules for such functions. An operator of ``register_autograd`` has no function at the functorch key:
    transforms of it raise errors, or return zero tangents.
    """
    arguments = names_of(op._schema.arguments)
    tensors = tensor_positions(op)
    pick = itemgetter(*tensors) if len(tensors) > 1 else lambda args: (args[tensors[0]],)
    cast = tuple(
        (arguments.index(x), None if exempt is None else arguments.index(exempt))
        for x, exempt in autocast.items()
    )
    if backward_op is not None:
        gradients = [arguments.index(primal_of(x, arguments)) for x in names_of(backward_op._schema.returns)]

    def at(args: list[Any], positions: list[int]) -> Callable[..., Any]:
        """``eager`` as a function of the arguments at ``positions``."""
        return lambda *values: eager(*_with_values(args, positions, values))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with AutoDispatchBelowAutograd():
                return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            saved = pick(inputs)
            ctx.save_for_backward(*saved)
            # Levels of forward mode that a compiled graph enters are invisible while it is traced.
            traced = isinstance(inputs[0], FunctionalTensor)
            if traced or forward_mode_is_on() or are_functorch_transforms_active():
                ctx.save_for_forward(*saved)
            ctx.constants = _with_values(inputs, tensors, repeat(None))
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            args = _with_values(ctx.constants, tensors, ctx.saved_tensors)
            nothing: list[Tensor | None] = [None] * len(args)
            if all(g is None for g in grads):
                return tuple(nothing)
            # For DTensors all gradients are computed: PyTorch caches the placements of a call's results, and
            # would use them for a later call with another mask, since a list of bools is not in the cache's
            # key.
            distributed = hasattr(args[0], "device_mesh")
            if backward_op is not None:
                mask = [args[i] is not None and (distributed or ctx.needs_input_grad[i]) for i in gradients]
                positions, found = gradients, _without_gradient(backward_op, [*args, *grads, mask])
            else:
                floats = [i for i in tensors if args[i] is not None and args[i].is_floating_point()]
                positions = [i for i in floats if distributed or ctx.needs_input_grad[i]]
                with ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                    outputs, pullback = _vjp(at(args, positions), *(args[i] for i in positions))
                    found = pullback(
                        [torch.zeros_like(o) if g is None else g for o, g in zip(outputs, grads)]
                    )
            wanted = [g if ctx.needs_input_grad[i] else None for i, g in zip(positions, found)]
            return tuple(_with_values(nothing, positions, wanted))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            args = _with_values(ctx.constants, tensors, ctx.saved_tensors)
            # Forward mode is off here, and the saved tensors are dual: a tangent of an outer jvp would be lost.
            args = [unpack_dual(x, level=0)[0] if isinstance(x, Tensor) else x for x in args]
            positions = [i for i in tensors if tangents[i] is not None]
            primals = [args[i] for i in positions]
            with set_fwd_grad_enabled(True):
                cotangents = tuple(torch.zeros_like(o) for o in fake(*args))
                # The pullback is linear in the cotangents; its transpose is the pushforward.
                _, push = _vjp(lambda *w: _vjp(at(args, positions), *primals)[1](w), *cotangents)
                return push([tangents[i] for i in positions])

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return vmap_rule(info.batch_size, in_dims, args)

    Function.__name__ = Function.__qualname__ = op._opname
    # Function.apply binds the signature at each call, which only functorch needs. Elsewhere the C++ apply is enough.
    apply = super(torch.autograd.Function, Function).apply
    is_grad_enabled = torch.is_grad_enabled

    def autograd_kernel(*args: Any) -> Any:
        if type(args[0]) is not Tensor:
            # Importing torch.distributed.tensor takes half as long as importing torch, so not at definition.
            if "torch.distributed.tensor" in sys.modules:
                register_shardings()
            return apply(*args)
        if (is_grad_enabled() and any_requires_grad(*args)) or forward_mode_is_on():
            return apply(*args)
        with AutoDispatchBelowAutograd():
            return op(*args)

    def cast_for(device: str, args: Any) -> list[Any]:
        dtype = torch.get_autocast_dtype(device)
        args = list(args)
        for i, exempt in cast:
            x = args[i]
            if x is not None and x.dtype is not torch.float64 and (exempt is None or not args[exempt]):
                args[i] = x.to(dtype)
        return args

    def functorch_kernel(*args: Any) -> Any:
        device = args[0].device
        if autocast_on(device):
            with ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                return custom_function_call(Function, *cast_for(device.type, args))
        return custom_function_call(Function, *args)

    def autocast_kernel(device: str, *args: Any) -> Any:
        with ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
            return op(*cast_for(device, args))

    casting = {f"Autocast{device.upper()}": partial(autocast_kernel, device) for device in AUTOCAST_DEVICES}
    return {"Autograd": autograd_kernel, FUNCTORCH_KEY: functorch_kernel, **casting}


def _with_values(args: Sequence[Any], positions: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """``args`` with these ``values`` at these ``positions``."""
    result = list(args)
    for i, value in zip(positions, values):
        result[i] = value
    return result


def _vjp(function: Callable[..., Any], *primals: Tensor) -> tuple[Any, Callable[[Sequence[Tensor]], Any]]:
    """`torch.func.vjp`, also if no output depends on a primal.

    PyTorch then creates zeros like that primal, which fails after a transform around this one has ended. So
    the primals are outputs as well.
    """
    outputs, pullback = vjp(lambda *values: (*function(*values), *values), *primals)
    zeros = [torch.zeros_like(x) for x in primals]
    return outputs[: len(outputs) - len(primals)], lambda cotangents: pullback((*cotangents, *zeros))


def _without_gradient(op: OpOverload, args: Sequence[Any]) -> Any:
    """Call `op`, without its Autograd kernel if that would only pass the call on."""
    forward_mode = forward_mode_is_on() or are_functorch_transforms_active()
    if torch.is_grad_enabled() or type(args[0]) is not Tensor or forward_mode:
        return op(*args)
    with AutoDispatchBelowAutograd():
        return op(*args)


def vmap_rule_of(op: OpOverload, heads: Mapping[str, int | None]) -> Callable[..., Any]:
    """The rule that folds the dimension of ``vmap`` into the heads: ``[..., H, ...]`` becomes ``[..., M*H, ...]``."""
    arguments, returns = names_of(op._schema.arguments), names_of(op._schema.returns)

    def rule(size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Any:
        folded = list(args)
        for i, (name, x, in_dim) in enumerate(zip(arguments, args, in_dims)):
            dim = heads.get(primal_of(name, heads))
            if dim is None and isinstance(in_dim, int):  # for a list of bools, in_dim is a list
                raise ValueError(
                    f"{name} must not be mapped by vmap over flacompose::{op._opname}, got a batch of it"
                )
            if dim is not None and x is not None:
                x = x.expand(size, *x.shape).movedim(0, dim) if in_dim is None else x.movedim(in_dim, dim)
                folded[i] = x.flatten(dim, dim + 1)
        absent = {name for name, x in zip(arguments, args) if x is None}
        unwanted = unwanted_results(op, args)
        outputs, out_dims = [], []
        results = op(*folded)
        for name, y in zip(returns, [results] if len(returns) == 1 else results):
            empty = name in unwanted or primal_of(name, arguments) in absent
            dim = None if empty else heads[primal_of(name, heads)]
            outputs.append(y if dim is None else y.unflatten(dim, (size, y.shape[dim] // size)))
            out_dims.append(dim)
        return (outputs[0], out_dims[0]) if len(returns) == 1 else (tuple(outputs), tuple(out_dims))

    return rule
