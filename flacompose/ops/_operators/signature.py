"""The signature of a recurrence's operators, stated once in two named tuples, and everything derived from it.

    class Inputs(NamedTuple):
        q: Annotated[Tensor, "B T H K", AUTOCAST]
        k: Annotated[Tensor, "B T H K", AUTOCAST]
        v: Annotated[Tensor, "B T H V", AUTOCAST]
        g: Annotated[Tensor | None, "B T H"] = None
        initial_state: Annotated[Tensor | None, "N H K V"] = None
        cu_seqlens: Tensor | None = None
        scale: float = 1.0

    class Outputs(NamedTuple):
        o: Annotated[Tensor, "B T H V", Dtype("v")]
        final_state: Annotated[Tensor, "N H K V"]

A tensor with axes has a gradient, unless `CONSTANT` marks it; a tensor without axes has none. `AUTOCAST`
marks an argument that autocast casts, `GATE` the logarithm of a decay. A result has the dtype of the argument
that `Dtype` names; a state has no such mark, and is float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from flacompose.ops._tensors.dtype import state_dtype
from flacompose.ops._tensors.packed import sequence_count

AnyInputs = TypeVar("AnyInputs", bound=Any)
Results = tuple[Tensor, ...]
Gradients = dict[str, Tensor]


class Autocast(NamedTuple):
    """Marks an argument that autocast casts, unless the argument of the name `unless`, a bool, is true."""

    unless: str | None = None


class Constant(NamedTuple):
    """Marks an argument with axes and without a gradient, such as bools; the public function checks it."""


class Gate(NamedTuple):
    """Marks an argument that is the natural logarithm of a decay, from 0 to -inf."""


class Dtype(NamedTuple):
    """Marks a result with the dtype of the argument `of`, or with that of states where the bool `unless` is true."""

    of: str
    unless: str | None = None


AUTOCAST, CONSTANT, GATE = Autocast(), Constant(), Gate()
SCHEMA_TYPES: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", bool: "bool"}


class _Field(NamedTuple):
    name: str
    type: str  # in the notation of schemas
    axes: str | None
    autocast: Autocast | None
    constant: Constant | None
    gate: Gate | None
    rule: Dtype | None


def _fields(named_tuple: type[Any]) -> list[_Field]:
    fields = []
    for name, hint in get_type_hints(named_tuple, include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        of_kind: list[Any] = [
            next((x for x in marks if isinstance(x, mark)), None)
            for mark in (str, Autocast, Constant, Gate, Dtype)
        ]
        if kind not in SCHEMA_TYPES:
            raise TypeError(f"{named_tuple.__qualname__}.{name}: no schema has {kind}")
        fields.append(_Field(name, SCHEMA_TYPES[kind], *of_kind))
    return fields


# The requirements for a tensor of a call: its name; whether it may be absent; its axes; the axes that no earlier
# argument has; and whether autocast casts it. If it does, the dtype without autocast must be that of the first
# argument. It is a plain tuple, since Dynamo of PyTorch 2.11 cannot unpack a constant named tuple.
Argument = tuple[str, bool, tuple[str, ...], tuple[str, ...], bool]


def _tensors(fields: Iterable[_Field], shared_heads: bool) -> tuple[Argument, ...]:
    """The arguments that have axes, without constants. Unless heads are shared, ``HV`` is ``H``."""
    found: list[Argument] = []
    seen = {"N"}
    for x in fields:
        if x.axes is not None and x.constant is None:
            axes = tuple((x.axes if shared_heads else x.axes.replace("HV", "H")).split())
            new = tuple(axis for axis in axes if axis not in seen)
            found.append((x.name, x.type == "Tensor?", axes, new, x.autocast is not None))
            seen.update(axes)
    return tuple(found)


def gradient_name(x: str) -> str:
    """``dx``, or ``d_x`` if that is easier to read."""
    return f"d_{x}" if "_" in x else f"d{x}"


def _schema(kind: str, names: Iterable[str]) -> str:
    return ", ".join(f"{kind} {name}" for name in names)


class Signature(Generic[AnyInputs]):
    """The arguments and results of a recurrence: their schema, axes, casts and gradients, for `define_op`.

    Args:
        inputs: the named tuple of the arguments.
        outputs: the named tuple of the results; the first one has an axis of tokens.
        numbers: integers that come after the inputs. Results may have axes of these names.
    """

    def __init__(self, inputs: type[AnyInputs], outputs: type[Any], numbers: tuple[str, ...] = ()) -> None:
        arguments, results = _fields(inputs), _fields(outputs)
        self.inputs, self.outputs, self.numbers = inputs, outputs, numbers
        self.tensors = {shared: _tensors(arguments, shared) for shared in (True, False)}
        self._results = results
        self.axes = {x.name: x.axes for x in (*arguments, *results) if x.axes is not None}
        self.gates = [x.name for x in arguments if x.gate is not None]
        self.autocast = {x.name: x.autocast.unless for x in arguments if x.autocast is not None}
        self.differentiable = [x.name for x in arguments if x.axes is not None and x.constant is None]
        self.arguments = ", ".join([f"{x.type} {x.name}" for x in arguments] + [f"int {x}" for x in numbers])
        self.results = _schema("Tensor", outputs._fields)
        self.arriving = _schema("Tensor?", map(gradient_name, outputs._fields))
        self.gradients = _schema("Tensor", map(gradient_name, self.differentiable))
        # `compile_ahead` requires that a call begins with the tensors that have gradients.
        first = [x.name for x in takewhile(lambda x: x.type.startswith("Tensor"), arguments)]
        expected = self.differentiable + [x.name for x in arguments if x.constant is not None]
        expected += ["cu_seqlens"] * ("cu_seqlens" in inputs._fields)
        assert first == expected, f"inputs begin with their tensors, cu_seqlens last: {expected}, not {first}"
        # `primal_of` would mistake a gradient with the name of an argument for that argument.
        assert not {*map(gradient_name, self.differentiable)} & {*inputs._fields}

    def with_results(self, *numbers: str, **results: Any) -> Signature[AnyInputs]:
        """The signature of an operator with these `numbers` as further arguments and these `results`.

        A result is given as its axes or as its annotation.
        """
        fields = [(x, Annotated[Tensor, y] if isinstance(y, str) else y) for x, y in results.items()]
        outputs: Any = NamedTuple("Results", fields)  # type: ignore[misc]
        return Signature(self.inputs, outputs, numbers)

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of the inputs and the arguments after them, as a function of the operator's arguments.

        Its results are contiguous, like those of `fake`: Inductor relies on the strides of the trace.
        """
        n = len(self.inputs._fields)
        return lambda *args: tuple(map(_contiguous, function(self.inputs(*args[:n]), *args[n:])))

    def flat_backward(
        self, function: Callable[[BackwardCall[AnyInputs]], Gradients]
    ) -> Callable[..., Results]:
        """`function` of a `BackwardCall`, as a function of the operator's arguments and with its results.

        These are gradients, contiguous like the results of `flat`, and empty tensors for unwanted ones.
        """

        def backward(*args: Any) -> Results:
            call = self.backward_call(*args)
            made, absent = function(call), args[0]
            return tuple(
                _contiguous(made[x]) if x in call.wanted else absent.new_empty(0) for x in self.differentiable
            )

        return backward

    def backward_call(self, *args: Any) -> BackwardCall[AnyInputs]:
        """The call of a backward operator, from its arguments."""
        n, mask = len(self.inputs._fields), args[-1]
        inputs, arriving = self.inputs(*args[:n]), self.outputs(*args[n:-1])
        wanted = (x for x, want in zip(self.differentiable, mask, strict=True) if want)
        return BackwardCall(
            self, inputs, arriving, frozenset(x for x in wanted if getattr(inputs, x) is not None)
        )

    def fake(self, *args: Any) -> Results:
        """The results of a forward operator, without values."""
        n = len(self.inputs._fields)
        outputs = self._outputs(self.inputs(*args[:n]), *args[n:])
        return tuple(like.new_empty(shape, dtype=dtype) for like, shape, dtype in outputs)

    def fake_backward(self, *args: Any) -> Results:
        empty = self.flat_backward(lambda call: {x: _empty(getattr(call.inputs, x)) for x in call.wanted})
        return empty(*args)

    def zeros(self, inputs: AnyInputs) -> Tensor:
        """The first result, all zeros."""
        like, shape, dtype = self._outputs(inputs)[0]
        return like.new_zeros(shape, dtype=dtype)

    def _outputs(self, inputs: AnyInputs, *numbers: int) -> list[tuple[Tensor, Any, torch.dtype]]:
        """For each result a tensor of its kind, its shape and its dtype."""
        first = inputs[0]
        sizes: dict[str, Any] = dict(zip(self.numbers, numbers))
        for name in self.differentiable:
            x = getattr(inputs, name)
            if x is not None:
                sizes = dict(zip(self.axes[name].split(), x.shape, strict=True)) | sizes
        sizes["N"] = sequence_count(first, getattr(inputs, "cu_seqlens", None))
        found = []
        for field in self._results:
            axes, rule = field.axes, field.rule
            assert axes is not None
            like, dtype = first, state_dtype(first.dtype)
            if rule is not None:
                like = getattr(inputs, rule.of)
                dtype = dtype if rule.unless is not None and getattr(inputs, rule.unless) else like.dtype
            same = rule is not None and self.axes[rule.of] == axes
            found.append((like, like.shape if same else [sizes[axis] for axis in axes.split()], dtype))
        return found


def _contiguous(x: Tensor) -> Tensor:
    """`x`, contiguous; unchanged in a trace, which would guard on symbolic sizes."""
    return x.contiguous() if type(x) is Tensor else x


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@dataclass(frozen=True)
class BackwardCall(Generic[AnyInputs]):
    """One call of a recurrence's backward.

    `inputs` are those of the forward. `arriving` holds the gradients of the results, by the results' names;
    None stands for zeros. `wanted` are the names of the inputs, none of them absent, whose gradients are
    wanted.
    """

    signature: Signature[AnyInputs]
    inputs: AnyInputs
    arriving: Any
    wanted: frozenset[str]

    def wants(self, *names: str) -> bool:
        """Whether the gradient of one of these inputs is wanted."""
        return not self.wanted.isdisjoint(names)

    def wanted_input(self, name: str) -> Tensor | None:
        """The input of this name, if its gradient is wanted."""
        return getattr(self.inputs, name) if name in self.wanted else None

    @property
    def do(self) -> Tensor:
        """The gradient of the first result; zeros if none arrives."""
        do: Tensor | None = self.arriving[0]
        return self.signature.zeros(self.inputs) if do is None else do

    def select(self, **gradients: Tensor | Callable[[], Tensor] | None) -> Gradients:
        """The wanted ones of the `gradients`, by the names of their inputs and in the dtypes of these.

        A gradient may be a function that computes it, which is called only if the gradient is wanted.
        """
        found = {}
        for name, gradient in gradients.items():
            if name not in self.wanted:
                continue
            x = gradient() if callable(gradient) else gradient
            assert x is not None, f"no gradient of {name}"
            found[name] = x.to(getattr(self.inputs, name).dtype)
        return found
