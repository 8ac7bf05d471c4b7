"""What a layer carries from one call to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flacompose.layers import _check
from flacompose.ops._define import autocast_dtype
from flacompose.ops._dtype import state_dtype


class RecurrentState(NamedTuple):
    """The state of one layer after the last token of each of ``N`` sequences: a pytree of tensors.

    Attributes:
        recurrent: ``[N, H, K, V]``, in HGRN ``[N, D]``, float32 (float64 in a float64 layer); in layers of slots the
            tuple ``(Hk, Hv)``, ``[N, H, K, M]`` and ``[N, H, M, V]``.
        conv: One ``[N, D, W]`` per short convolution of the layer, in the order (q, k, v), in HGRN (i, f), in HGRN2
            (q, f, i), in Mamba2 only one: the last ``W`` inputs of each sequence, the newest in column ``W - 1``, in
            the dtype of the layer's projections. Empty without them.
        normalizer: The sum of all keys, ``[N, H, K]``, or the logsumexp of all logits, ``[N, H, M]`` or ``[N, H, K]``,
            in the dtype of `recurrent`. ``()`` in a layer that does not normalise by it.
        position: How many tokens each sequence has had, ``[N]``, int64. ``()`` in a layer without positions.
        shift: The last token of each sequence, ``[N, hidden_size]``, in the dtype of the layer's projections. ``()``
            in a layer without a token shift.
    """

    recurrent: Any  # a tensor, or a tuple of them, as `StateShapes` says
    conv: tuple[Tensor, ...] = ()
    # Not None, which would be a leaf, and no tensor.
    normalizer: Any = ()
    position: Tensor | tuple[()] = ()
    shift: Tensor | tuple[()] = ()

    def detach(self) -> RecurrentState:
        """The same values cut off from their history: the boundary of truncated backpropagation through time."""
        return pytree.tree_map(Tensor.detach, self)


# torch.export.load reads example inputs with weights_only.
torch.serialization.add_safe_globals([RecurrentState])
# torch.export.save refuses a named tuple it has no name for, and torch has no public way to give it one.
pytree._register_namedtuple(RecurrentState, serialized_type_name="flacompose.layers.RecurrentState")


class StateShapes(NamedTuple):
    """The shapes of a layer's state, each after its ``N``."""

    recurrent: tuple[tuple[int, ...], ...]  # of one, the state is a tensor; of more, a tuple of them
    conv: tuple[tuple[int, int], ...] = ()
    normalizer: tuple[int, int] | None = None
    position: bool = False
    shift: int | None = None
    log_normalizer: bool = False  # it is a logarithm: that of nothing is -inf

    def zeros(self, N: int, weight: Tensor) -> RecurrentState:
        """The state before the first token, for projections by `weight`."""
        device, dtype = weight.device, weight.dtype
        summed, projected = state_dtype(dtype), autocast_dtype(device) or dtype

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(N, *shape, device=device, dtype=dtype)

        normalizer: Tensor | tuple[()] = ()
        if self.normalizer is not None:
            normalizer = zeros(*self.normalizer, dtype=summed)
            normalizer = normalizer.log() if self.log_normalizer else normalizer
        recurrent = tuple(zeros(*shape, dtype=summed) for shape in self.recurrent)
        return RecurrentState(
            recurrent if len(recurrent) > 1 else recurrent[0],
            tuple(zeros(*shape, dtype=projected) for shape in self.conv),
            normalizer,
            zeros(dtype=torch.int64) if self.position else (),
            () if self.shift is None else zeros(self.shift, dtype=projected),
        )

    def check(self, state: RecurrentState, N: int, x: Tensor) -> None:
        """Check that `state` has these shapes, `N` rows, and the device of `x`."""
        if not isinstance(state, RecurrentState):
            raise TypeError(
                f"state must be a RecurrentState, got {type(state).__name__} "
                "(a mask is the keyword attention_mask)"
            )
        if len(self.recurrent) > 1:
            _check_tensors(x, "state.recurrent", state.recurrent, self.recurrent, N)
        else:
            _check.state_of(x, "state.recurrent", state.recurrent, (N, *self.recurrent[0]))
        _check_tensors(x, "state.conv", state.conv, self.conv, N)
        if self.normalizer is None:
            _absent("state.normalizer", state.normalizer)
        else:
            _check.state_of(x, "state.normalizer", state.normalizer, (N, *self.normalizer))
        if not self.position:
            _absent("state.position", state.position)
        else:
            _check.integral_state_of(x, "state.position", state.position, (N,))
        if self.shift is None:
            _absent("state.shift", state.shift)
        else:
            _check.state_of(x, "state.shift", state.shift, (N, self.shift))


def _check_tensors(x: Tensor, name: str, values: Any, shapes: tuple[tuple[int, ...], ...], N: int) -> None:
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of tensors, got {type(values).__name__}")
    if len(values) != len(shapes):
        raise ValueError(f"{name} must hold {len(shapes)} tensors, got {len(values)}")
    for i, (value, shape) in enumerate(zip(values, shapes, strict=True)):
        _check.state_of(x, f"{name}[{i}]", value, (N, *shape))


def _absent(name: str, value: Tensor | tuple[()]) -> None:
    if isinstance(value, Tensor) or value != ():
        raise ValueError(f"{name} must be () in this layer, got {type(value).__name__}")
