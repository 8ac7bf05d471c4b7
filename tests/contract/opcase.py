"""What the tests have to know about a recurrence, most of which follows from the signature of its operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from helpers.operators import axes as axes_of
from helpers.operators import operator, part, reference
from torch import Tensor

Axes = tuple[str, ...]
State = Tensor | tuple[Tensor, ...]
Function = Callable[..., tuple[Tensor, State | None]]
Reference = Callable[..., tuple[Tensor, State]]
Draw = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class OpCase:
    """One recurrence in one form.

    `function` takes the inputs by name, with `initial_state`, `output_final_state`, `cu_seqlens` and, if `scaled`,
    `scale`. `reference` takes one batch of whole sequences by the names in `operands`, `initial_state` and, if
    `scaled`, the scale as a number, and returns ``(o, final_state)``.
    """

    name: str
    function: Function
    other: Function | None  # the same function in the other form
    reference: Reference
    recurrence: str
    form: str  # of the operator: "chunk" or "recurrent", or "forward" where there is one form
    operands: Mapping[str, str]  # by argument, the name that the registered op has for it
    gates: Mapping[str, Axes]  # the axes of the log decays, by argument
    # The axes of all other inputs but the state. The first is compared with the others.
    inputs: Mapping[str, Axes]
    states: Mapping[str, Axes]  # one tensor or a tuple of several, by the names that errors have for them
    output: str  # the input that has the axes of the output
    output_axes: Axes
    draws: Mapping[str, Draw]  # what is done to the normal numbers of an input, or to log decays
    any_dtype: Axes  # inputs that need not have the dtype of the first
    not_cast: Axes  # inputs of tokens that autocast leaves as they are
    scaled: bool
    flops: int  # per token and element of the state
    # A reference in which a gradient is only the first of two large terms that cancel in the true gradient. Errors of
    # that gradient are measured against it.
    uncancelled: Reference | None = None
    empty: Mapping[str, float] = field(default_factory=dict)  # states before any token that are not zeros
    groups: int = 1  # how many HV, or HQ, share one of H
    nodes: int = 1  # calls of the registered op
    before: Axes = ()  # operators of other recurrences that a call begins with
    prepared: bool = False  # whether arguments of the op are products of inputs
    softplus: bool = (
        False  # whether they are made with softplus, whose decomposition in graphs rounds otherwise
    )
    # PyTorch's operations that a graph of the call has besides the registered op, with and without a state. None: many.
    other_ops: Axes | None = ()
    inductor: bool = False  # stands for its operator in tests that compile C++

    @property
    def forward(self) -> str:
        """The registered op that a call is made of."""
        return f"{operator(self.recurrence)}_{self.form}"

    @property
    def backward(self) -> str:
        """The registered op of the gradient."""
        return f"{operator(self.recurrence)}_backward"

    @property
    def ops(self) -> list[str]:
        """The registered ops of a call, in order."""
        return [*self.before, *[self.forward] * self.nodes]

    @property
    def backward_ops(self) -> list[str]:
        """Those of its gradient."""
        return [self.backward] * self.nodes + [
            f"{x.rpartition('_')[0]}_backward" for x in reversed(self.before)
        ]

    @property
    def first(self) -> str:
        """The input that the others are compared with."""
        return next(iter(self.inputs))

    @property
    def renamed(self) -> list[tuple[str, str]]:
        """The arguments for which the registered op has another name, and that name."""
        return [(x, y) for x, y in self.operands.items() if x != y]

    @property
    def optional(self) -> list[str]:
        """The inputs that may be absent."""
        parameters = inspect.signature(self.function).parameters
        every = {**self.inputs, **self.gates}
        return [name for name in every if name in parameters and parameters[name].default is None]

    @property
    def state(self) -> Axes:
        """The axes of the state as `call` has it: one tensor, the parts of a tuple being joined."""
        axes = next(iter(self.states.values()))
        return axes if len(self.states) == 1 else (*axes[:2], "joined")

    @property
    def axes(self) -> dict[str, Axes]:
        return {**self.inputs, **self.gates, "initial_state": self.state}

    def call(
        self, initial_state: Tensor | None = None, output_final_state: bool = False, **inputs
    ) -> tuple[Tensor, Tensor | None]:
        """The function, its state as one tensor."""
        given = None if initial_state is None else self.split(initial_state, inputs)
        o, state = self.function(**inputs, initial_state=given, output_final_state=output_final_state)
        return o, None if state is None else self.join(state)

    def reference_with_one_state(
        self, initial_state: Tensor | None = None, *, uncancelled: bool = False, **inputs
    ) -> tuple[Tensor, Tensor]:
        """The reference, its state as one tensor."""
        given = None if initial_state is None else self.split(initial_state, inputs)
        reference = self.uncancelled if uncancelled else self.reference
        assert reference is not None
        operands = {self.operands.get(name, name): x for name, x in inputs.items()}
        o, state = reference(**operands, initial_state=given)
        return o, self.join(state)

    def join(self, state: State) -> Tensor:
        """A tuple of states ``[N, H, ...]`` as one tensor ``[N, H, joined]``."""
        if isinstance(state, Tensor):
            return state
        return torch.cat([x.reshape(*x.shape[:2], -1) for x in state], -1)

    def split(self, state: Tensor, inputs: Mapping[str, Tensor]) -> State:
        """The opposite of `join`; the sizes are those of the inputs."""
        if len(self.states) == 1:
            return state
        sizes: dict[str, int] = {}
        for name, axes in {**self.inputs, **self.gates}.items():
            sizes.update(zip(axes, inputs[name].shape))
        shapes = [[sizes[axis] for axis in axes[2:]] for axes in self.states.values()]
        parts = state.split([prod(shape) for shape in shapes], -1)
        return tuple(x.reshape(*x.shape[:-1], *shape) for x, shape in zip(parts, shapes))

    def at(self, window: slice, tensors: Mapping[str, Tensor], *axes: str) -> dict[str, Tensor]:
        """The window of each tensor along those of these axes that it has."""
        return {
            name: x[tuple(window if axis in axes else slice(None) for axis in self.axes[name])]
            for name, x in tensors.items()
        }


def unit_vectors(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def without_overwriting(reference: Reference) -> Reference:
    """`reference`, whose initial state gets the gradient that it has where no key replaces what the state holds.

    What a key replaces is subtracted from what was there, in chunks and token by token.
    """

    def uncancelled(initial_state: Tensor | None = None, **inputs) -> tuple[Tensor, Tensor]:
        if initial_state is None:
            return reference(**inputs)
        results = reference(**inputs, initial_state=initial_state.detach())
        fixed = {name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        kept = reference(**{**fixed, "k": 0 * fixed["k"]}, initial_state=initial_state)
        o, S = (x + y - y.detach() for x, y in zip(results, kept))
        return o, S

    return uncancelled


# The arguments of operators that are log decays.
GATES = ("g", "gk", "gv", "g_gamma")
# What is done to normal numbers, by the operators' arguments: keys that replace values have norm 1.
DRAWS: Mapping[str, Mapping[str, Draw]] = {
    "delta_rule": {"k": unit_vectors, "a": unit_vectors, "beta": lambda x: 2 * x.sigmoid()},
    "low_rank": {"a": unit_vectors, "b": lambda x: unit_vectors(x) / 8},
    "selective_scan": {"dt": lambda x: F.softplus(x - 1), "A": lambda x: -x.exp()},
}
# Per token and element of the state, 4 in the other recurrences.
FLOPS = {"delta_rule": 6, "low_rank": 8, "scan": 2, "rg_lru": 7, "short_conv": 2, "selective_scan": 7}


def entry(
    name: str,
    function: Function,
    other: Function | None,
    recurrence: str,
    arguments: str,
    *,
    axes: Mapping[str, str] = {},
    gates: Axes = (),
    states: Mapping[str, str] = {},
    output_axes: str = "",
    draws: Mapping[str, Draw] = {},
    **fields: Any,
) -> OpCase:
    """The recurrence with this `function`, whose form its name says; `other` is the function of the other form, if any.

    The `arguments` are those of the function: `g=gk` is its `g`, which the operator has as `gk`. What is not
    given follows from the signature of the operator. So `axes` are given of arguments that the operator lacks, or has
    with other axes, and `gates` are those that do not have the name of one.
    """
    signature, drawn, known_axes = (
        part(recurrence, "inputs").SIGNATURE,
        DRAWS.get(recurrence, {}),
        axes_of(recurrence),
    )
    operands = {x.split("=")[0]: x.split("=")[-1] for x in arguments.split()}
    known = {x: tuple((axes.get(x) or known_axes[y]).split()) for x, y in operands.items()}
    decays = [x for x, y in operands.items() if y in GATES or x in gates]
    inputs = {x: y for x, y in known.items() if x not in decays}
    any_dtype = tuple(x for x in inputs if operands[x] not in signature.autocast)
    # The first argument of the operator with the axes of its output.
    output = next(x for x in known_axes if known_axes[x] == known_axes["o"])
    states = states or {"initial_state": known_axes["initial_state"]}
    followed: dict[str, Any] = {
        "reference": reference(recurrence),
        "form": "recurrent" if "recurrent" in name else "chunk" if "chunk" in name else "forward",
        "output": next((x for x, y in operands.items() if y == output), None),
        "any_dtype": any_dtype,
        "not_cast": any_dtype,
        "scaled": "scale" in signature.inputs._fields,
        "flops": FLOPS.get(recurrence, 4),
    }
    fields = followed | fields
    if recurrence == "delta_rule":
        fields.setdefault("uncancelled", without_overwriting(fields["reference"]))
    return OpCase(
        name,
        function,
        other,
        recurrence=recurrence,
        operands=operands,
        gates={x: known[x] for x in decays},
        inputs=inputs,
        states={x: tuple(y.split()) for x, y in states.items()},
        output_axes=tuple((output_axes or known_axes["o"]).split()),
        draws={x: drawn[y] for x, y in operands.items() if y in drawn} | draws,
        **fields,
    )
