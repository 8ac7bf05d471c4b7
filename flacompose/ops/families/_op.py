"""The registered ops of a family: its forms, which compute the same function, and their one backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flacompose.ops._chip import is_here, runs_kernels
from flacompose.ops._define import always_true, define_op, primal_of
from flacompose.ops.families._steps import Steps

if TYPE_CHECKING:
    from flacompose.ops.families._replay import Replay

Form = Callable[..., tuple[Tensor, Tensor]]

CUDA = torch.version.cuda is not None and find_spec("triton") is not None


def define_forms(
    family: str,
    eager: ModuleType,
    inputs: type[Any],
    *,
    forms: tuple[str, ...] = ("chunk", "recurrent"),
    arguments: str,
    gradients: str,
    axes: Mapping[str, str],
    autocast: Mapping[str, str | None],
    fake: Callable[[Any], tuple[Tensor, Tensor]],
    flops: Callable[..., int],
) -> tuple[Form, ...]:
    """Register ``<family>_<form>`` for each of `forms` and ``<family>_backward``; return the forms as functions.

    They take the fields of `inputs`, as `with_names` says. A family with a form "recurrent" also gets
    ``<family>_steps`` and ``<family>_steps_backward``, and its function comes last. It is the recurrent form of
    sequences in rows, and returns ``(o, states [N, count, ...])``, the states after the last token and after those that
    lie `stride` tokens apart before it. Both numbers come after the fields of `inputs`. `stride` is above 1 for
    recurrences in which several tokens of the op stand for one token.

    Args:
        family: the name of the family, and of its folder.
        eager: its `forward` and `backward` in PyTorch, which take `inputs`, and the latter the other three arguments.
        inputs: the named tuple of the arguments of every form.
        forms: their names, which are those of the functions in the family's `cuda`, which also has `steps`.
        arguments: of every form, as a schema has them. Those of the backward are these, then ``Tensor? do``, ``Tensor?
            d_final_state`` and ``bool[] output_mask``.
        gradients: what the backward returns, as a schema has it.
        axes, autocast: as `define_op` takes them.
        fake: ``(o, final_state)`` of the forms for `inputs`, without values.
        flops: of a form; the backward has twice as many.
    """
    names = inputs._fields
    differentiable = [
        names.index(primal_of(gradient.split()[-1], names)) for gradient in gradients.split(", ")
    ]

    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        wanted = [args[i] if want else None for i, want in zip(differentiable, args[-1], strict=True)]
        return tuple(args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)

    def forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
        return fake(inputs(*args))

    load = {form: cache(partial(on_cuda, family, form)) for form in (*forms, "backward")}
    backward = define_op(
        f"{family}_backward",
        f"({arguments}, Tensor? do, Tensor? d_final_state, bool[] output_mask) -> ({gradients})",
        eager=lambda *args: eager.backward(inputs(*args[:-3]), *args[-3:]),
        triton=load["backward"],
        fake=_compiling(backward_fake, load["backward"]),
        axes=axes,
        flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
    )
    ops = [
        define_op(
            f"{family}_{form}",
            f"({arguments}) -> (Tensor o, Tensor final_state)",
            eager=lambda *args: eager.forward(inputs(*args)),
            triton=load[form],
            one_launch=None if form == "chunk" else _has_one_token,
            # The recurrent form is one kernel, compiled at its launch.
            fake=forward_fake if form == "recurrent" else _compiling(forward_fake, load[form]),
            backward=backward,
            axes=axes,
            autocast=autocast,
            flops=flops,
        )
        for form in forms
    ]
    functions = [with_names(op, inputs) for op in ops]
    if "recurrent" in forms:
        steps = _define_steps(
            family, eager, inputs, arguments, gradients, axes, autocast, forward_fake, backward_fake, flops
        )
        functions.append(
            lambda *args, count, stride=1, **kwargs: steps(*inputs(*args, **kwargs), count, stride)
        )
    return tuple(functions)


def _define_steps(
    family: str,
    eager: ModuleType,
    inputs: type[Any],
    arguments: str,
    gradients: str,
    axes: Mapping[str, str],
    autocast: Mapping[str, str | None],
    forward_fake: Callable[..., tuple[Tensor, Tensor]],
    backward_fake: Callable[..., tuple[Tensor, ...]],
    flops: Callable[..., int],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register ``<family>_steps`` and its backward, which on every device is PyTorch: nothing trains with it at length.

    The backward is an operator nevertheless, so that a graph of any length has one node for it.
    """
    arguments = f"{arguments}, int count, int stride"
    axes = {**axes, "states": axes["final_state"].replace("N", "N n", 1)}

    def steps(*args: Any) -> Steps:
        return Steps(eager, inputs(*args[:-2]), axes, *args[-2:])

    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        o, state = forward_fake(*args[:-2])
        return o, state.new_empty(state.shape[0], args[-2], *state.shape[1:])

    backward = define_op(
        f"{family}_steps_backward",
        f"({arguments}, Tensor? do, Tensor? d_states, bool[] output_mask) -> ({gradients})",
        eager=lambda *args: steps(*args[:-3]).backward(*args[-3:]),
        fake=backward_fake,
        axes=axes,
        flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
    )
    return define_op(
        f"{family}_steps",
        f"({arguments}) -> (Tensor o, Tensor states)",
        eager=lambda *args: steps(*args).forward(),
        triton=cache(partial(on_cuda, family, "steps")),
        one_launch=_has_one_token,
        fake=fake,
        backward=backward,
        axes=axes,
        autocast=autocast,
        flops=flops,
    )


def _has_one_token(x: Tensor, *_: Any) -> bool:
    return always_true(x.shape[1] == 1)


def matrix_state_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The FLOPs of one write and one read of the state for each token, from the shapes of the arguments."""
    B, T, HV, V = v
    return 4 * B * T * HV * q[-1] * V


def with_names(op: Callable[..., Any], inputs: type[Any]) -> Form:
    """`op` as a function of the fields of `inputs`, by position or by keyword, with its defaults."""
    return lambda *args, **kwargs: op(*inputs(*args, **kwargs))


def on_cuda(family: str, name: str) -> Replay:
    """What CUDA runs of a family, imported when it is first needed: it needs Triton."""
    from flacompose.ops.families._replay import Replay

    return Replay(getattr(import_module(f"flacompose.ops.families.{family}.cuda"), name))


def _compiling(fake: Callable[..., Any], load: Callable[[], Replay]) -> Callable[..., Any]:
    """`fake`, which also starts to compile the kernels for a GPU, while a graph with the operator is traced."""

    def compiling_fake(*args: Any) -> Any:
        x = args[0]
        launches = CUDA and x.is_cuda and x.dtype is not torch.float64 and is_here(x.device)
        if launches and runs_kernels(x.device.index) and not torch.compiler.is_exporting():
            # What fails here fails again, and says so, when it is called.
            with torch.cuda.device(x.device), suppress(Exception):
                load().implementation.begin(args)
        return fake(*args)

    return compiling_fake
