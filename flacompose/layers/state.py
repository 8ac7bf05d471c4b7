"""The state that layers pass from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose._torch import catching, pytree, report_from_trace
from flacompose.layers import _check
from flacompose.layers.layout import distributed_like
from flacompose.ops._tensors.dtype import state_dtype


class RecurrentState(NamedTuple):
    """The state of one layer after the last token of each of ``N`` sequences: a pytree of tensors.

    Attributes:
        recurrent: ``[N, H, K, V]``, in HGRN and Griffin ``[N, D]``, in Mamba ``[N, D, S]``, float32 (float64 in a
            float64 layer). In layers of slots it is the tuple ``(Hk, Hv)``, ``[N, H, K, M]`` and ``[N, H, M, V]``; in
            mLSTM ``(C, n, m)``, ``[N, H, K, V]``, ``[N, H, K]`` and ``[N, H]``; in Mamba3 a tuple of angles, state,
            last keys and last values.
        conv: A tuple of one ``[N, D, W]`` per short convolution of the layer, in the order (q, k, v), in HGRN (i, f),
            in HGRN2 (q, f, i). Each holds the last ``W`` inputs of each sequence, the newest in column ``W - 1``, in
            the dtype of the layer's projections. Empty without convolutions.
        normalizer: The sum of all keys, ``[N, H, K]``, or the logsumexp of all logits, ``[N, H, M]`` or ``[N, H, K]``,
            in the dtype of `recurrent`. ``()`` in a layer without a normalizer.
        position: Number of tokens of each sequence so far, ``[N]``, int64. ``()`` in a layer without positions.
        shift: The last token of each sequence, ``[N, hidden_size]``, in the dtype of the layer's projections. ``()``
            in a layer without a token shift.
        cache: The keys and the values of softmax attention, ``[N, L, H, D]`` each, in the dtype of the layer's
            projections. The first `position` of the ``L`` places of a sequence hold its tokens; other places are
            arbitrary. ``()`` after packed sequences, and in all other layers.
    """

    recurrent: Any  # a tensor or a tuple of tensors, by `StateShapes`; () without a recurrence
    conv: tuple[Tensor, ...] = ()
    # An absent part is (), since None would be a leaf of the pytree that is no tensor.
    normalizer: Any = ()
    position: Any = ()
    shift: Any = ()
    cache: tuple[Tensor, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> RecurrentState:
        """Apply `function` to every tensor of the state. The first axis of each tensor has the ``N`` sequences."""
        return pytree.tree_map(function, self)

    def detach(self) -> RecurrentState:
        """The same values without their history, for truncated backpropagation through time."""
        return self.map(Tensor.detach)

    def clone(self) -> RecurrentState:
        """A copy. Gradients flow through it."""
        return self.map(torch.clone)

    def select(self, indices: Tensor | list[int]) -> RecurrentState:
        """A copy of the states of some sequences, in the order of `indices`, as for a beam search.

        Args:
            indices: Indices of the ``N`` sequences, integers ``[M]``. A sequence may be repeated.

        Raises:
            TypeError: If `indices` are not integers.
            ValueError: If `indices` do not have one dimension, or are on another device.
        """
        if isinstance(indices, (list, tuple)):
            for i, index in enumerate(indices):
                _check.integer(f"indices[{i}]", index)
            indices = torch.tensor(indices, dtype=torch.int64, device=pytree.tree_leaves(self)[0].device)
        _check.integral("indices", indices)
        _check.same_device("indices", indices, pytree.tree_leaves(self)[0])
        if indices.ndim != 1:
            raise ValueError(f"indices must have shape [M], got {tuple(indices.shape)}")
        return self.map(lambda t: t.index_select(0, distributed_like(t, indices.long())))

    def to(
        self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
    ) -> RecurrentState:
        """The state on `device`, in the dtypes that `init_state` gives it in a layer of `dtype`.

        `conv`, `shift` and `cache` become `dtype`; `recurrent` and `normalizer` become float32, or float64 if `dtype`
        is float64; positions stay int64. A part that does not change is not copied. Use `map` to give every part the
        same dtype, for example to store a state in half the memory; layers take any float dtype.

        Args:
            device: Device of the new state, or, as in ``state.to(torch.bfloat16)``, the dtype. Default: no change.
            dtype: float32, bfloat16, float16 or float64. Default: no change.

        Raises:
            TypeError: If `dtype` is not one of the four, or two dtypes are given.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise TypeError(f"device must be a device where dtype is given, got {device}")
            device, dtype = None, device
        if dtype is not None:
            _check.float_dtype(dtype)

        def moved(part: Any, dtype: torch.dtype | None) -> Any:
            return pytree.tree_map(lambda t: t.to(device=device, dtype=dtype), part)

        sums = None if dtype is None else state_dtype(dtype)
        dtypes = (sums, dtype, sums, None, dtype, dtype)  # of the parts, in the order of the fields
        return RecurrentState(*(moved(part, given) for part, given in zip(self, dtypes, strict=True)))

    @staticmethod
    def cat(states: Iterable[RecurrentState]) -> RecurrentState:
        """Concatenate the sequences of several states of one layer.

        Raises:
            ValueError: If there is no state, or the states have different parts.
            TypeError: If an entry is no `RecurrentState`.
        """
        states = tuple(states)
        if not states:
            raise ValueError("states must hold at least one RecurrentState, got none")
        structure = pytree.tree_structure(states[0])
        for i, state in enumerate(states):
            if not isinstance(state, RecurrentState):
                raise TypeError(f"states[{i}] must be a RecurrentState, got {type(state).__name__}")
            if pytree.tree_structure(state) != structure:
                raise ValueError(f"states[{i}] must have the same parts as states[0]: they are of one layer")
        return pytree.tree_map(lambda *tensors: torch.cat(tensors), *states)


class RecurrentStates(NamedTuple):
    """The states of one layer after each of the last ``n`` tokens of ``N`` sequences.

    A call with ``num_states=n`` returns it. Layers take a single state, which `at` selects.

    Attributes:
        recurrent: As in a [RecurrentState][flacompose.layers.RecurrentState], with an axis of ``n`` states after the
            first axis: ``[N, n, H, K, V]``, in HGRN ``[N, n, D]``. All attributes but `cache` have this axis.
        conv: ``[N, n, D, W]`` each.
        normalizer: ``[N, n, H, K]`` or ``[N, n, H, M]``.
        position: ``[N, n]``.
        shift: ``[N, n, hidden_size]``.
        cache: The keys and values after the last token, ``[N, L, H, D]`` each, for all ``n`` states. A state with a
            smaller `position` does not see later tokens, and the next tokens replace them.
    """

    recurrent: Any
    conv: tuple[Tensor, ...] = ()
    normalizer: Any = ()
    position: Any = ()
    shift: Any = ()
    cache: tuple[Tensor, ...] = ()

    def at(self, index: int | Tensor) -> RecurrentState:
        """The state after one of the tokens: a copy, except for `cache`.

        Args:
            index: Index of one of the ``n`` states, from ``-n`` to ``n - 1``. Or one index for each sequence, integers
                ``[N]`` from 0 to ``n - 1`` on the device of the states, which are not read on the host.

        Raises:
            ValueError: If an int is out of range, or a tensor has another shape or is on another device.
            TypeError: If `index` is neither an int nor a tensor of integers.
            RuntimeError: From PyTorch on a CPU, if a number in a tensor is out of range.
        """
        # All parts but `cache`. PyTorch 2.11 does not compile `_replace` of a tuple that was made in the graph.
        parts = self[:-1]
        N, n = pytree.tree_leaves(parts)[0].shape[:2]
        if isinstance(index, Tensor):
            _check.integral("index", index)
            _check.same_device("index", index, pytree.tree_leaves(parts)[0])
            if not _check.has_shape(index, (N,)):
                raise ValueError(f"index must have shape ({N},), got {tuple(index.shape)}")
            chosen = pytree.tree_map(partial(_chosen, index.long()), parts)
        else:
            _check.integer("index", index, " or a tensor of one for each sequence")
            if not -n <= index < n:
                raise ValueError(f"index must be from {-n} to {n - 1}, for {n} states, got {index}")
            chosen = pytree.tree_map(
                lambda t: t[:, index].clone(memory_format=torch.contiguous_format), parts
            )
        return RecurrentState(*(*chosen, self.cache))


def _chosen(index: Tensor, states: Tensor) -> Tensor:
    """``y[b] = states[b, index[b]]``."""
    place = distributed_like(states, index).reshape(-1, *[1] * (states.ndim - 1))
    return states.gather(1, place.expand(-1, 1, *states.shape[2:])).squeeze(1)


for kind in (RecurrentState, RecurrentStates):
    # torch.export.load reads example inputs with weights_only.
    torch.serialization.add_safe_globals([kind])
    # torch.export.save needs a name for a named tuple, and PyTorch has no public way to give it one.
    pytree._register_namedtuple(kind, serialized_type_name=f"flacompose.layers.{kind.__name__}")


def kind_of(x: Any) -> str:
    """The type of `x`, for an error where a `RecurrentState` was expected."""
    several = ", several states, of which at(index) gives one" if isinstance(x, RecurrentStates) else ""
    return f"{type(x).__name__}{several}"


class StateError(Exception):
    """The error of a layer that refuses a state.

    Its `args` are the message and the layer's `StateShapes`, by which a model finds the layer. Dynamo cannot trace
    exceptions with other attributes.
    """

    def __init__(self, message: str, shapes: StateShapes) -> None:
        if torch.compiler.is_dynamo_compiling():
            report_from_trace("StateError", message)

    def __str__(self) -> str:
        return self.args[0]


class StateTypeError(StateError, TypeError):
    """The state or a part of it has the wrong type."""


class StateValueError(StateError, ValueError):
    """A part of the state has a wrong shape or device."""


class StateShapes(NamedTuple):
    """The shapes of a layer's state, without the first axis ``N``. None stands for an absent part."""

    recurrent: tuple[tuple[int, ...], ...]  # a single shape is a tensor, several are a tuple
    conv: tuple[tuple[int, int], ...] = ()
    normalizer: tuple[int, int] | None = None
    position: bool = False  # whether the state has positions
    shift: tuple[int] | None = None
    log_normalizer: bool = False  # whether the normalizer is a logarithm, which starts at -inf
    cache: tuple[int, int] | None = None  # the number of key heads and their size

    def zeros(self, N: int, device: torch.device | str | None, dtype: torch.dtype) -> RecurrentState:
        """The state before the first token, for projections with outputs in `dtype`."""

        def zeros(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Any:
            return () if shape is None else torch.zeros(N, *shape, device=device, dtype=dtype)

        sums = state_dtype(dtype)
        recurrent = tuple(zeros(shape, sums) for shape in self.recurrent)
        normalizer = zeros(self.normalizer, sums)
        return RecurrentState(
            recurrent[0] if len(recurrent) == 1 else recurrent,
            tuple(zeros(shape, dtype) for shape in self.conv),
            normalizer.log() if self.log_normalizer else normalizer,
            zeros(() if self.position else None, torch.int64),
            zeros(self.shift, dtype),
            () if self.cache is None else (zeros((0, *self.cache), dtype), zeros((0, *self.cache), dtype)),
        )

    def absent(self) -> RecurrentState:
        """The state of a call without a state: None for every part and every convolution."""
        conv: Any = (None,) * len(self.conv)
        return RecurrentState(None, conv, None, None, None, ())

    def check(self, state: RecurrentState, N: int, x: Tensor) -> None:
        """Check the shapes of `state`, with `N` sequences, and the device, as of `x`; else raise a `StateError`."""
        try:
            self._check(state, N, x)
        except TypeError as error:
            raise StateTypeError(error.args[0], self) from None
        except ValueError as error:
            raise StateValueError(error.args[0], self) from None

    def _check(self, state: RecurrentState, N: int, x: Tensor) -> None:
        if not isinstance(state, RecurrentState):
            hint = (
                ""
                if isinstance(state, RecurrentStates)
                else (" (pass the state of the call before, whole; a mask is the keyword attention_mask)")
            )
            raise TypeError(f"state must be a RecurrentState, got {kind_of(state)}{hint}")
        if len(self.recurrent) == 1:
            _check.like(x, "state.recurrent", state.recurrent, (N, *self.recurrent[0]))
        else:
            _check_tensors(x, "state.recurrent", state.recurrent, self.recurrent, N)
        _check_tensors(x, "state.conv", state.conv, self.conv, N)
        if self.cache is not None and isinstance(state.cache, tuple) and not state.cache:
            raise ValueError(
                "state.cache must hold 2 tensors, got 0, as after a call with cu_seqlens, which keeps no keys and "
                "values of softmax attention: to continue sequences, put them in rows, with an attention_mask"
            )
        _check_tensors(x, "state.cache", state.cache, self._cached(state), N)
        kind: Callable[[str, Tensor], None]
        for name, value, shape, kind in (
            ("normalizer", state.normalizer, self.normalizer, _check.floating),
            ("position", state.position, () if self.position else None, _check.integral),
            ("shift", state.shift, self.shift, _check.floating),
        ):
            if shape is not None:
                _check.like(x, f"state.{name}", value, (N, *shape), kind)
            elif isinstance(value, Tensor) or value != ():
                raise ValueError(f"state.{name} must be () in this layer, got {type(value).__name__}")

    def _cached(self, state: RecurrentState) -> tuple[tuple[int, ...], ...]:
        """The shapes of `state.cache`. Keys and values have the same number of places, which is arbitrary."""
        if self.cache is None:
            return ()
        keys = state.cache[0] if isinstance(state.cache, (tuple, list)) and state.cache else None
        places = keys.shape[1] if isinstance(keys, Tensor) and keys.ndim == 4 else 0
        return ((places, *self.cache),) * 2


catching[StateShapes.check.__code__] = "TypeError", "ValueError"


def _check_tensors(x: Tensor, name: str, values: Any, shapes: tuple[tuple[int, ...], ...], N: int) -> None:
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of tensors, got {type(values).__name__}")
    if len(values) != len(shapes):
        raise ValueError(f"{name} must hold {len(shapes)} tensors, got {len(values)}")
    for i, (value, shape) in enumerate(zip(values, shapes, strict=True)):
        _check.like(x, f"{name}[{i}]", value, (N, *shape))
