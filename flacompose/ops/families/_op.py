"""The registered ops of a family: its forms, which compute the same function, and their one backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flacompose._torch import OpOverload
from flacompose.ops._chip import is_here, runs_kernels
from flacompose.ops._define import define_op
from flacompose.ops._sizes import always_true
from flacompose.ops.families._ends import DecayEnds, MatrixEnds
from flacompose.ops.families._signature import BackwardCall, Signature
from flacompose.ops.families._steps import Steps

if TYPE_CHECKING:
    from flacompose.ops.families._replay import Replay

CUDA = torch.version.cuda is not None and find_spec("triton") is not None
ONE_KERNEL = ("recurrent", "steps", "token")  # these are compiled at their launch, the others ahead of it


def define_forms(
    family: str,
    signature: Signature[Any],
    eager: ModuleType,
    *,
    forms: tuple[str, ...] = ("chunk", "recurrent"),
    ends: type[Any] | None = None,
    flops: Callable[..., int],
) -> tuple[OpOverload, ...]:
    """Register ``<family>_<form>`` for each of `forms`, and ``<family>_backward``; return the operators of the forms.

    With `ends` the family also gets ``<family>_ends`` and ``<family>_ends_backward``, and the former comes next. It
    takes the arguments of the forms and returns the state that each sequence reaches from zero, whatever the initial
    state is, and what it does to any other: the sums of its gates, or the matrix that it multiplies keys by.

    A family with a form "recurrent" also gets ``<family>_steps`` and ``<family>_steps_backward``, and that operator
    comes last. It is the recurrent form of sequences in rows, and returns ``(o, states [N, count, ...])``, the states
    after the last token and after those that lie `stride` tokens apart before it. Both numbers come after the inputs.
    `stride` is above 1 for recurrences in which several tokens of the op stand for one token.

    Args:
        family: the name of the family, and of its folder. Its module `cuda` has a function for each of the forms, which
            takes the named tuple of the inputs, a function `backward` like that of `eager`, and, if there is a form
            "recurrent", a function `steps`.
        signature: what the forms take and return.
        eager: the family's `forward`, which takes the named tuple of the inputs, and its `backward`, which takes a
            `BackwardCall` and returns the gradients that it wants, by the names of the inputs.
        ends: what `<family>_ends` returns, a named tuple of `end` and of a ``sum_x`` for each gate `x`, or of `end` and
            `matrix`. The module `cuda` has a function `ends` for it.
        forms: the form "chunk" compiles its kernels ahead, "recurrent" and "token" are one kernel.
        flops: of a form, as `define_op` takes it; the backward has twice as many.
    """
    load = {form: partial(on_cuda, family, form, signature) for form in (*forms, "backward")}
    backward = define_op(
        f"{family}_backward",
        f"({signature.arguments}, {signature.arriving}, bool[] output_mask) -> ({signature.gradients})",
        eager=signature.flat_backward(eager.backward),
        triton=load["backward"],
        fake=_compiling(signature.fake_backward, load["backward"]),
        axes=signature.axes,
        flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
    )
    ops = [
        define_op(
            f"{family}_{form}",
            f"({signature.arguments}) -> ({signature.results})",
            eager=signature.flat(eager.forward),
            triton=load[form],
            one_launch=None if form == "chunk" else _has_one_token,
            fake=signature.fake if form in ONE_KERNEL else _compiling(signature.fake, load[form]),
            backward=backward,
            axes=signature.axes,
            autocast=signature.autocast,
            flops=flops,
        )
        for form in forms
    ]
    if ends is not None:
        ops.append(_define_ends(family, signature, eager, backward, ends, flops))
    if "recurrent" in forms:
        ops.append(_define_steps(family, signature, eager, flops))
    return tuple(ops)


def _define_ends(
    family: str,
    of_forms: Signature[Any],
    eager: ModuleType,
    backward_of_forms: OpOverload,
    outputs: type[Any],
    flops: Callable[..., int],
) -> OpOverload:
    """Register ``<family>_ends`` and its backward, which on every device calls that of the forms."""
    signature = Signature(of_forms.inputs, outputs)
    kind = MatrixEnds if "matrix" in outputs._fields else DecayEnds
    ends = kind(signature, eager, backward_of_forms)
    load = partial(on_cuda, family, "ends", signature)
    return define_op(
        f"{family}_ends",
        f"({signature.arguments}) -> ({signature.results})",
        eager=signature.flat(ends.forward),
        triton=load,
        fake=_compiling(signature.fake, load),
        backward=define_op(
            f"{family}_ends_backward",
            f"({signature.arguments}, {signature.arriving}, bool[] output_mask) -> ({signature.gradients})",
            eager=signature.flat_backward(ends.backward),
            fake=signature.fake_backward,
            axes=signature.axes,
            flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
        ),
        axes=signature.axes,
        autocast=signature.autocast,
        flops=flops,
    )


def _define_steps(
    family: str, signature: Signature[Any], eager: ModuleType, flops: Callable[..., int]
) -> OpOverload:
    """Register ``<family>_steps`` and its backward, which on every device is PyTorch: nothing trains with it at length.

    The backward is an operator nevertheless, so that a graph of any length has one node for it.
    """
    arguments = f"{signature.arguments}, int count, int stride"
    axes = {**signature.axes, "states": signature.axes["final_state"].replace("N", "N n", 1)}
    n = len(signature.inputs._fields)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        *inputs, count, _ = args
        o, state = signature.fake(*inputs)
        return o, state.new_empty(state.shape[0], count, *state.shape[1:])

    def call_of(args: tuple[Any, ...]) -> BackwardCall[Any]:
        return signature.backward_call(*args[:n], *args[n + 2 :])

    def steps_backward(*args: Any) -> tuple[Tensor, ...]:
        return signature.gradients_of(
            call_of(args), lambda call: Steps(eager, signature, call.inputs, *args[n : n + 2]).backward(call)
        )

    backward = define_op(
        f"{family}_steps_backward",
        f"({arguments}, Tensor? do, Tensor? d_states, bool[] output_mask) -> ({signature.gradients})",
        eager=steps_backward,
        fake=lambda *args: signature.fake_backward(*args[:n], *args[n + 2 :]),
        axes=axes,
        flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
    )
    return define_op(
        f"{family}_steps",
        f"({arguments}) -> (Tensor o, Tensor states)",
        eager=signature.flat(lambda inputs, *numbers: Steps(eager, signature, inputs, *numbers).forward()),
        triton=partial(on_cuda, family, "steps", signature),
        one_launch=_has_one_token,
        fake=fake,
        backward=backward,
        axes=axes,
        autocast=signature.autocast,
        flops=flops,
    )


def start_gradient(family: str, signature: Signature[Any], inputs: Any, do: Tensor) -> Tensor:
    """The gradient of the state before each sequence that comes from its outputs. It does not depend on a state."""
    _, state = signature.fake(*inputs)
    mask = [x == "initial_state" for x in signature.differentiable]
    backward = getattr(torch.ops.flacompose, f"{family}_backward").default
    gradients = backward(*inputs._replace(initial_state=torch.zeros_like(state)), do, None, mask)
    return gradients[mask.index(True)]


def _has_one_token(x: Tensor, *_: Any) -> bool:
    return always_true(x.shape[1] == 1)


def matrix_state_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The FLOPs of one write and one read of the state for each token, from the shapes of the arguments."""
    B, T, HV, V = v
    return 4 * B * T * HV * q[-1] * V


@cache
def on_cuda(family: str, form: str, signature: Signature[Any]) -> Replay:
    """What CUDA runs for a form of a family, or for its backward, imported when it is first needed: it needs Triton."""
    from flacompose.ops.families._compile import compile_ahead
    from flacompose.ops.families._replay import Replay

    function = getattr(import_module(f"flacompose.ops.families.{family}.cuda"), form)
    if form in ONE_KERNEL:
        return Replay(signature.flat(function))
    if form == "backward":
        return Replay(compile_ahead(signature.flat_backward(function)))
    if form == "ends":
        return Replay(compile_ahead(signature.flat(function)))
    backward = on_cuda(family, "backward", signature).implementation
    return Replay(compile_ahead(signature.flat(function), backward))


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
