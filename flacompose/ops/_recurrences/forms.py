"""The registered operators of a recurrence: its forms, their backward, and its transitions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from flacompose._torch import OpOverload
from flacompose.ops._launch.chip import is_here, runs_kernels
from flacompose.ops._operators.define import define_op
from flacompose.ops._operators.signature import AnyInputs, Signature
from flacompose.ops._parallel.form import across_ranks
from flacompose.ops._parallel.span_ends import DecayEnds, MatrixEnds
from flacompose.ops._parallel.transitions import Decay, Map, Matrix
from flacompose.ops._recurrences.states_of_tokens import Steps
from flacompose.ops._tensors.sizes import always_true

if TYPE_CHECKING:
    from flacompose.ops._launch.replay import Replay

CUDA = torch.version.cuda is not None and find_spec("triton") is not None
# These forms are compiled at their launch, the others ahead of it.
ONE_KERNEL = ("recurrent", "update", "steps", "token")
TRANSITIONS = ("ends", "matrix_ends")


@dataclass(frozen=True)
class Forms(Generic[AnyInputs]):
    """The forms of a recurrence, which compute the same function, and its transitions.

    They return ``(o, final_state)``. `chunk` computes in chunks of tokens, for training and for prompts, also
    sequence parallel; `recurrent` computes token by token, for decoding. `steps` is `recurrent` with `count`
    states, ``[N, count, ...]``: those after the last tokens that are `stride` apart. `stride` is the number
    of the operator's tokens that stand for one token. `transition` returns the transition of each sequence, and
    `d_initial` the gradient of its initial state that comes from its outputs.
    """

    chunk: Callable[..., tuple[Tensor, Tensor]]
    recurrent: OpOverload
    steps: OpOverload
    transition: Callable[[AnyInputs], tuple[Map, Tensor]]
    d_initial: Callable[[AnyInputs, Tensor], Tensor]


def define_forms(
    signature: Signature[AnyInputs],
    eager: ModuleType,
    *,
    gates: tuple[str, ...],
    flops: Callable[..., int],
    name: str | None = None,
    erases: Callable[[AnyInputs], bool] | None = None,
    of_state: Callable[[AnyInputs], AnyInputs] = lambda inputs: inputs,
) -> Forms[AnyInputs]:
    """Register the forms "chunk" and "recurrent", and return the functions of a recurrence's `op`.

    Args:
        signature, eager, gates, flops, name: as in `define_ops`.
        erases: whether a transition multiplies the keys of the state by a matrix, instead of decaying each number.
            Default: none does.
        of_state: returns inputs with the same transition, in which only the `gates` decay the state.
    """
    ops = define_ops(
        signature,
        eager,
        forms=("chunk", "recurrent"),
        gates=gates,
        flops=flops,
        name=name,
        erases=erases is not None,
    )
    axes = signature.axes["final_state"].split()
    absent = [
        [i for i, axis in enumerate(axes) if i > 0 and axis not in signature.axes[gate].split()]
        for gate in gates
    ]

    def transition(inputs: AnyInputs) -> tuple[Map, Tensor]:
        """The transition of each sequence: the map, and the state that it reaches from zero."""
        inputs = of_state(inputs)
        if "q" in inputs._fields:  # queries do nothing to the state
            inputs = inputs._replace(q=inputs.k.detach())
        inputs = inputs._replace(initial_state=None)
        if erases is not None and erases(inputs):
            end, matrix = ops["matrix_ends"](*inputs)
            return Matrix(matrix), end
        end, *maps = ops["ends"](*inputs)
        logs = []
        for gate, log, places in zip(gates, maps, absent, strict=True):
            if getattr(inputs, gate) is not None:
                for i in places:
                    log = log.unsqueeze(i)
                logs.append(log)
        return Decay(tuple(logs)), end

    d_initial = initial_gradient(signature, ops["backward"])
    chunk = across_ranks(signature, ops["chunk"], ops["backward"], transition, d_initial)
    return Forms(chunk, ops["recurrent"], ops["steps"], transition, d_initial)


def define_ops(
    signature: Signature[Any],
    eager: ModuleType,
    *,
    forms: tuple[str, ...],
    gates: tuple[str, ...] | None = None,
    flops: Callable[..., int],
    name: str | None = None,
    erases: bool = False,
) -> dict[str, OpOverload]:
    """Register ``<name>_<form>`` for each form, and ``<name>_backward``; return them by the form.

    With a form "recurrent" there is ``<name>_steps`` too. It is that form for sequences in rows, and
    returns states after several of the last tokens. Its derivatives are the derivatives of one call per state. With
    `gates` there is ``<name>_ends``, which returns the transition of each sequence, whatever the initial
    state is: the state reached from zero, and the sums of the gates. With `erases`, ``<name>_matrix_ends`` returns
    the matrix that multiplies the keys of the state instead. Both have a backward of their own.

    A form "update" is for one token of a caller that overwrites the initial state with the final one. It
    computes the same as the other forms; in the graph that Inductor gets, its kernel overwrites the state it
    reads, if that rounds nothing, which saves a copy. If the caller keeps the initial state, Inductor copies
    it.

    Args:
        signature: the arguments and results of the forms.
        eager: the module with the recurrence's `forward`, which takes the named tuple of the inputs, and its
            `backward`, which takes a `BackwardCall` and returns the wanted gradients by the names of the inputs.
            Without a `backward`, and then without `gates`, there is no such operator, and derivatives are those of
            `forward`. Its folder has the name of the recurrence. The module `cuda` there has a function for each of
            the forms, and for "steps" and "ends" if they exist, and a function `backward` like this one.
        forms: the form "chunk" compiles its kernels ahead; "recurrent", "update" and "token" are one kernel.
        gates: the names of the inputs that decay a state by their sums over the tokens.
        flops: as in `define_op`, for a form; the backward has twice as many.
        name: the first part of the operators' names. Default: the name of the folder.
        erases: whether a transition may multiply the keys of the state by a matrix.
    """
    folder = eager.__name__.rpartition(".")[0]
    form_of, backward_of = (partial(x, folder, name=name) for x in (define_form, _define_backward))
    if not hasattr(eager, "backward"):
        return {form: form_of(form, signature, eager.forward, flops) for form in forms}
    backward = backward_of("backward", signature, eager, flops)
    ops = {form: form_of(form, signature, eager.forward, flops, backward) for form in forms}
    if "recurrent" in forms:
        steps = Steps(signature, ops["recurrent"])
        ops["steps"] = form_of("steps", steps.signature, steps.forward, flops)
    if gates is not None:
        kinds: dict[str, type[DecayEnds]] = {"ends": DecayEnds}
        if erases:
            kinds["matrix_ends"] = MatrixEnds
        for form, kind in kinds.items():
            ends = kind(signature, eager, backward, gates)
            of_ends = backward_of(f"{form}_backward", ends.signature, ends, flops)
            ops[form] = form_of(form, ends.signature, ends.forward, flops, of_ends)
    return ops | {"backward": backward}


def initial_gradient(
    signature: Signature[AnyInputs], backward: OpOverload
) -> Callable[[AnyInputs, Tensor], Tensor]:
    """The function `d_initial` of a recurrence, from the operator of its backward."""
    mask = [x == "initial_state" for x in signature.differentiable]

    def d_initial(inputs: AnyInputs, do: Tensor) -> Tensor:
        """The gradient of the state before each sequence that comes from its outputs.

        An absent state is taken as zero. The result depends on the state only in the denominator, which
        divides by the read of the state.
        """
        if inputs.initial_state is None:
            _, state = signature.fake(*inputs)
            inputs = inputs._replace(initial_state=torch.zeros_like(state))
        gradients = backward(*inputs, do, None, mask)
        return gradients[mask.index(True)]

    return d_initial


def define_form(
    folder: str,
    form: str,
    signature: Signature[Any],
    eager: Callable[..., tuple[Tensor, ...]],
    flops: Callable[..., int],
    backward: OpOverload | None = None,
    *,
    name: str | None = None,
) -> OpOverload:
    load = partial(on_cuda, folder, form, signature)
    return define_op(
        f"{name or folder.rpartition('.')[2]}_{form}",
        f"({signature.arguments}) -> ({signature.results})",
        eager=signature.flat(eager),
        triton=load,
        one_launch=None if form in ("chunk", *TRANSITIONS) else _has_one_token,
        fake=signature.fake if form in ONE_KERNEL else _compiling(signature.fake, load),
        backward=backward,
        axes=signature.axes,
        autocast=signature.autocast,
        flops=flops,
    )


def _define_backward(
    folder: str,
    form: str,
    signature: Signature[Any],
    eager: Any,
    flops: Callable[..., int],
    *,
    name: str | None = None,
) -> OpOverload:
    """Register a backward: of the forms, with kernels, or of transitions, in PyTorch everywhere.

    It is an operator nevertheless, so that a graph has one node for it, whatever the length.
    """
    load = partial(on_cuda, folder, form, signature) if form == "backward" else None
    fake = signature.fake_backward
    return define_op(
        f"{name or folder.rpartition('.')[2]}_{form}",
        f"({signature.arguments}, {signature.arriving}, bool[] output_mask) -> ({signature.gradients})",
        eager=signature.flat_backward(eager.backward),
        triton=load,
        fake=fake if load is None else _compiling(fake, load),
        axes=signature.axes,
        flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
    )


def _has_one_token(x: Tensor, *_: Any) -> bool:
    return always_true(x.shape[1] == 1)


def matrix_state_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The FLOPs of one write and one read of the state for each token, from the shapes of the arguments."""
    B, T, HV, V = v
    return 4 * B * T * HV * q[-1] * V


@cache
def on_cuda(folder: str, form: str, signature: Signature[Any]) -> Replay:
    """The CUDA implementation of a form or backward, imported at its first use, because it needs Triton."""
    from flacompose.ops._launch.replay import Replay
    from flacompose.ops._launch.warm_up import compile_ahead

    function = getattr(import_module(f"{folder}.cuda"), form)
    if form in ONE_KERNEL:
        return Replay(signature.flat(function))
    differentiable = len(signature.differentiable)
    if form == "backward":
        return Replay(compile_ahead(signature.flat_backward(function), differentiable))
    backward = None if form in TRANSITIONS else on_cuda(folder, "backward", signature).implementation
    return Replay(compile_ahead(signature.flat(function), differentiable, backward))


def _compiling(fake: Callable[..., Any], load: Callable[[], Replay]) -> Callable[..., Any]:
    """`fake`, which also starts the compilation of the kernels for a GPU while a graph is traced."""

    def compiling_fake(*args: Any) -> Any:
        x = args[0]
        launches = CUDA and x.is_cuda and x.dtype is not torch.float64 and is_here(x.device)
        if launches and runs_kernels(x.device.index) and not torch.compiler.is_exporting():
            # An error here occurs again, and is raised, when the operator is called.
            with torch.cuda.device(x.device), suppress(Exception):
                load().implementation.begin(args)
        return fake(*args)

    return compiling_fake
