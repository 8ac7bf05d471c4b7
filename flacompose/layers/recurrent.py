"""The base classes of layers: they take and return a state, and handle the layout of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, overload

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.fused_projections import FusesProjections
from flacompose.layers.layout import Layout, distributed_like, layout
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.state import RecurrentState, RecurrentStates, StateShapes
from flacompose.ops._arguments.large_heads import Op, by_values
from flacompose.ops._parallel.ranks import Ranks, bounds_of_rank, check_device, shared, sharing
from flacompose.ops._tensors.dtype import autocast_dtype
from flacompose.ops._tensors.packed import sequence_count

_SHOWN = (
    "mode", "num_heads", "num_kv_heads", "num_v_heads", "head_dim", "state_size", "n_groups", "input_dim", "decay",
    "num_householder",
)  # fmt: skip


class Factory(TypedDict):
    """The device and dtype of new parameters."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def factory_of(device: torch.device | str | None, dtype: torch.dtype | None) -> Factory:
    """Check `dtype`; return the `Factory`."""
    _check.optional_float_dtype(dtype)
    return Factory(device=device, dtype=dtype)


def linears(inputs: int, outputs: tuple[int, ...], factory: Factory) -> list[nn.Linear]:
    """One projection without bias for each number of `outputs`."""
    return [nn.Linear(inputs, n, bias=False, **factory) for n in outputs]


def low_rank(inputs: int, rank: int, outputs: int, bias: bool, factory: Factory) -> nn.Sequential:
    """A low-rank projection: the product of two projections. The second may have a bias."""
    first, second = nn.Linear(inputs, rank, False, **factory), nn.Linear(rank, outputs, bias, **factory)
    return nn.Sequential(first, second)


class StatefulLayer(FusesProjections):
    """A layer that takes a state and returns a new one."""

    state_shapes: StateShapes
    # The formulas of a layer. It takes the tokens x [B, T, hidden_size], the state before them, whose parts are None if
    # no state was given, and the layout. It returns the output [B, T, hidden_size], the new state, and perhaps further
    # results [B, T, D]. If the layout has `num_states`, the parts of the new state have an axis for them after the
    # first.
    _compute: Callable[..., tuple[Any, ...]]
    # The ranks that share the tokens, which `context_parallel` sets.
    ranks: Ranks | None = None

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        _check.count("hidden_size", hidden_size)
        self.hidden_size = hidden_size

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> RecurrentState:
        """The state before the first token of `batch_size` sequences.

        All parts are zeros, except for the running logsumexp of ABC and LightNet, which is -inf. The recurrent state
        and the normalizer are float32 (float64 in a float64 layer). The states of convolutions and token shifts have
        the dtype of the projections' outputs, so that a compiled layer gets the same dtype in every call.

        Args:
            batch_size: ``N``, the number of rows of a batch or of packed sequences.
            device: Device of the state. Give it if parameters are stored on another device than they are computed on,
                as in a model that is offloaded to the CPU. Default: the device of the layer's parameters.
            dtype: Dtype of the projections' outputs: float32, bfloat16, float16 or float64. Give it under the mixed
                precision of FSDP2 (whose policy needs ``cast_forward_inputs=False``, or it rounds states). Default: the
                dtype of autocast where it is on, else the dtype of the layer's weight matrices.

        Raises:
            ValueError: If `batch_size` is below 0.
            TypeError: If `batch_size` is no int, or `dtype` is not one of the four.
        """
        _check.integer("batch_size", batch_size)
        _check.not_negative("batch_size", batch_size)
        # Quantised weights may be integers, eight-bit floats, or no parameters at all. Vectors, such as the weights of
        # norms, and the layer's own parameters may be float32 beside projections in bfloat16.
        usable = [p for p in self.parameters() if _check.is_float(p.dtype)]
        own = {id(p) for p in self.parameters(recurse=False)}
        matrices = [p for p in usable if p.ndim == 2 and id(p) not in own]
        parameter = next(iter(matrices + usable), torch.empty(0))
        device = parameter.device if device is None else torch.device(device)
        if dtype is None:
            autocast = None if parameter.dtype == torch.float64 else autocast_dtype(device)
            dtype = parameter.dtype if autocast is None else autocast
        _check.float_dtype(dtype)
        return self.state_shapes.zeros(batch_size, device, dtype)

    if TYPE_CHECKING:  # nn.Module says nothing of the types of a call

        @overload
        def __call__(
            self,
            hidden_states: Tensor,
            state: RecurrentState | None = None,
            *,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            num_states: None = None,
        ) -> tuple[Tensor, RecurrentState]: ...

        @overload
        def __call__(
            self,
            hidden_states: Tensor,
            state: RecurrentState | None = None,
            *,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            num_states: int,
        ) -> tuple[Tensor, RecurrentStates]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @explained
    def forward(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_states: int | None = None,
    ) -> tuple[Tensor, RecurrentState | RecurrentStates]:
        """Go through ``T`` tokens from `state`.

        A sequence may be split over several calls that pass the state on. The results are those of a single call.

        Args:
            hidden_states: ``[B, T, hidden_size]``.
            state: A state from `init_state` or an earlier call, for ``N`` sequences: the ``B`` rows or the packed
                sequences. It is not changed. Default: the state of `init_state`.
            attention_mask: ``[B, T]``, bool or integers, 0 for pads and anything else for tokens. Pads may be anywhere
                in a row. A pad changes no state, no token sees it, and its output is zeros. Of a longer mask, for a
                whole history, the last ``T`` columns are used. Default: no pads.
            cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B``
                is then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: one sequence per
                row.
            num_states: Number ``n`` of states to return, after each of the last ``n`` tokens of each row: from 1 to 16,
                and at most ``T``. It is for calls of a few tokens, some of which may be rejected later, as in
                speculative decoding. They are computed token by token, whatever the mode of the layer is. Not with
                `attention_mask` or `cu_seqlens`. Default: the state after the last token alone.

        Returns:
            ``(output, state)``: `output` is ``[B, T, hidden_size]``; `state` is the new state after the last tokens, or
                with `num_states` a [RecurrentStates][flacompose.layers.RecurrentStates].

        Raises:
            ValueError: If a shape is wrong, a tensor is not on the device of `hidden_states`, `attention_mask` comes
                with `cu_seqlens`, or `num_states` is out of range or not allowed.
            TypeError: If `state` is no `RecurrentState`, another argument is no dense tensor, or a dtype is wrong.
            RuntimeError: From PyTorch, if the weights are on another device or, without autocast, have another dtype.
        """
        return self._call(hidden_states, state, attention_mask, cu_seqlens, num_states)

    def _call(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        num_states: int | None,
        *others: Any,
    ) -> tuple[Any, ...]:
        """Check the arguments and compute the layer. `others` are arguments of single layers, such as `lower_bound`."""
        if self.ranks is None:
            tokens = self._layout(hidden_states, state, attention_mask, cu_seqlens, num_states)
            return self._computed(hidden_states, state, tokens, *others)
        with shared(self.ranks):
            check_device(self.ranks, "hidden_states", hidden_states)
            # Raise errors here, before the ranks wait for each other.
            tokens = self._layout(hidden_states, state, attention_mask, cu_seqlens, num_states)
            if cu_seqlens is not None:
                own = bounds_of_rank(self.ranks, cu_seqlens, hidden_states.shape[1])
                tokens = self._layout(hidden_states, state, None, own, None)
            return self._computed(hidden_states, state, tokens, *others)

    def _computed(
        self, hidden_states: Tensor, state: RecurrentState | None, tokens: Layout, *others: Any
    ) -> tuple[Any, ...]:
        """The results of a call with checked arguments."""
        if state is None:
            state = self.state_shapes.absent()
        elif hasattr(hidden_states, "device_mesh"):
            state = state.map(lambda t: distributed_like(hidden_states, t))
        y, new, *rest = self._compute(tokens.enter(hidden_states), state, tokens, *others)
        new = new if tokens.num_states is None else RecurrentStates(*new)
        return tokens.leave(y), new, *map(tokens.leave, rest)

    def _layout(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        num_states: int | None,
    ) -> Layout:
        """Check the arguments; return the layout of the tokens."""
        tokens = layout(hidden_states, self.hidden_size, attention_mask, cu_seqlens, num_states)
        if state is not None:
            self.state_shapes.check(state, sequence_count(hidden_states, cu_seqlens), hidden_states)
        return tokens

    def extra_repr(self) -> str:
        shown = vars(self)
        return ", ".join(f"{name}={shown[name]}" for name in _SHOWN if name in shown)


class RecurrentLayer(StatefulLayer):
    """A layer around one recurrence, with a chunked and a recurrent form."""

    # Other names of "chunk" in flash-linear-attention, which are refused.
    chunk_modes: ClassVar[tuple[str, ...]] = ()
    # The names of the short convolutions, in the order of their states.
    convolutions: tuple[str, ...] = ()

    def __init__(
        self, mode: str, hidden_size: int, norm_eps: float, layer_idx: int | None, conv_size: int = 1
    ) -> None:
        super().__init__(hidden_size)
        if mode in self.chunk_modes:
            raise ValueError(f"mode {mode!r} is no op of its own: use 'chunk', the same function")
        if mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode must be 'chunk' or 'fused_recurrent', got {mode!r}")
        _check.not_negative("norm_eps", norm_eps)
        _check.count("conv_size", conv_size)
        self.mode = mode
        self.layer_idx: Any = layer_idx  # layers that use it check it
        # Calls do not read `layer_idx`, since the compiler would make another graph for each of its values. So blocks
        # that are compiled one by one share a graph.
        self.is_first = layer_idx == 0

    def _keep_flags(self, **flags: bool) -> None:
        """Check that these options are bools, and keep them as attributes."""
        _check.flags(**flags)
        vars(self).update(flags)

    def _add_convolutions(
        self,
        names: str,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        factory: Factory,
        activation: str | None = "silu",
    ) -> tuple[tuple[int, int], ...]:
        """Make short convolutions of the projections `names`, if `use_short_conv`; return the shapes of their states.

        For "q" it is ``q_conv1d``, of the outputs of ``q_proj``.
        """
        self._keep_flags(use_short_conv=use_short_conv)
        _check.flags(conv_bias=conv_bias)
        if not use_short_conv:
            return ()
        shapes = []
        for name in names.split():
            D = getattr(self, f"{name}_proj").out_features
            setattr(self, f"{name}_conv1d", ShortConvolution(D, conv_size, conv_bias, activation, **factory))
            self.convolutions += (f"{name}_conv1d",)
            shapes.append((D, conv_size))
        return tuple(shapes)

    def _convolved(
        self,
        inputs: tuple[Tensor, ...],
        past: RecurrentState,
        tokens: Layout,
        **options: Any,
    ) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """Apply the short convolutions, if there are any, to `inputs`; return the outputs and the new states."""
        if not self.convolutions:
            return inputs, ()
        results = [
            getattr(self, name)(
                x,
                state,
                lengths=tokens.lengths,
                cu_seqlens=tokens.cu_seqlens,
                num_states=tokens.num_states,
                **options,
            )
            for name, x, state in zip(self.convolutions, inputs, past.conv, strict=True)
        ]
        outputs, states = zip(*results, strict=True)
        return outputs, states

    def _op(self, chunk: Op, recurrent: Op, x: Tensor, initial_state: Any, tokens: Layout) -> Op:
        """The form of an op that `mode` names, beginning with `initial_state`.

        A single token, and a call for several states, take the recurrent form.
        """
        if tokens.num_states is not None:
            return partial(recurrent, initial_state=initial_state, output_states=tokens.num_states)
        token_by_token = self.mode == "fused_recurrent" or _check.is_one(x.shape[1])
        op = recurrent if token_by_token and sharing() is None else chunk
        return partial(op, initial_state=initial_state, output_final_state=True, cu_seqlens=tokens.cu_seqlens)

    def _wide_op(self, chunk: Op, recurrent: Op, x: Tensor, initial_state: Any, tokens: Layout) -> Op:
        """`_op` for heads with any number of values."""
        return partial(by_values, self._op(chunk, recurrent, x, None, tokens), initial_state)
