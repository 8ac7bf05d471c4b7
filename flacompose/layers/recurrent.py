"""The base of all layers: a state that goes in and comes out, and a layout of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, overload

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.joint import Joinable
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
    """Where a module makes its parameters, and in which dtype."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def factory_of(device: torch.device | str | None, dtype: torch.dtype | None) -> Factory:
    """The `Factory` of these, once `dtype` is checked."""
    _check.optional_float_dtype(dtype)
    return Factory(device=device, dtype=dtype)


def linears(inputs: int, outputs: tuple[int, ...], factory: Factory) -> list[nn.Linear]:
    """A projection without bias to each of these numbers of outputs."""
    return [nn.Linear(inputs, n, bias=False, **factory) for n in outputs]


def low_rank(inputs: int, rank: int, outputs: int, bias: bool, factory: Factory) -> nn.Sequential:
    """A projection as the product of two, the second of which may have a bias."""
    first, second = nn.Linear(inputs, rank, False, **factory), nn.Linear(rank, outputs, bias, **factory)
    return nn.Sequential(first, second)


class StatefulLayer(Joinable):
    """A layer that is called with a state and returns the new one."""

    state_shapes: StateShapes
    # The formulas of a layer. It takes the tokens x [B, T, hidden_size], the state before them and their layout, and
    # returns the output [B, T, hidden_size] and the new state. In a call without a state, every part of it is None.
    # Where the layout has `num_states`, each part of the new state has that many after its first axis. A layer may have
    # more results, of the tokens: [B, T, D] each.
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

        It is zeros, but a running logsumexp, the normaliser of ABC and of LightNet, is -inf. The recurrent state and
        the normaliser are float32 (float64 in a float64 layer). The states of convolutions and of token shifts have the
        dtype that projections give, so that a compiled layer meets one dtype in every call.

        Args:
            batch_size: ``N``, the number of rows of a batch or of packed sequences.
            device: Default: the device of the layer's parameters. Give it where parameters are kept elsewhere than
                they are computed with, as in a model that is offloaded to the CPU.
            dtype: What projections give: float32, bfloat16, float16 or float64. Default: the dtype of autocast where
                it is on, else the dtype of the layer's weight matrices. Give it where these are neither, as under the
                mixed precision of FSDP2 (which rounds states unless its policy has ``cast_forward_inputs=False``).

        Raises:
            ValueError: If `batch_size` is below 0.
            TypeError: If it is no int, or `dtype` none of these.
        """
        _check.integer("batch_size", batch_size)
        _check.not_negative("batch_size", batch_size)
        # Quantised weights may be integers, eight-bit floats, or no parameters at all. Vectors, such as the weights of
        # norms, and the layer's own parameters are at times kept in float32 beside projections in bfloat16.
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

        A sequence given in pieces, each with the state that the piece before returned, gives what the whole gives.

        Args:
            hidden_states: ``[B, T, hidden_size]``.
            state: What `init_state` or a call returned, for ``N`` sequences, ``B`` or those packed.
                It is not written to. Default: zeros.
            attention_mask: ``[B, T]``, bool or integers, 0 for pads, wherever they are in a row, anything else
                for tokens. A pad changes no state, is seen by no token and gives zeros. It is the mask of these ``T``
                tokens; of a longer one, the mask of a whole history, the last ``T`` columns count. Default: no pads.
            cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B``
                is then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: a sequence a row.
            num_states: How many states to return, those after each of the last ``n`` tokens of each row: from 1 to 16,
                and at most ``T``. It is for calls of a few tokens, some of which may have to be taken back, as in
                speculative decoding: they are computed token by token, whatever the mode of the layer is. Not with
                `attention_mask` or `cu_seqlens`. Default: the state after the last token alone.

        Returns:
            ``(output, state)``: `output` is ``[B, T, hidden_size]``; `state` is new, that after the last tokens, or
                with `num_states` a [RecurrentStates][flacompose.layers.RecurrentStates].

        Raises:
            ValueError: If a shape is wrong, or a device not that of `hidden_states`, or `attention_mask` comes with
                `cu_seqlens`, or `num_states` is not as said.
            TypeError: If `state` is no `RecurrentState`, another argument no dense tensor, or a dtype wrong.
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
        """Check the arguments and compute the layer; `others` are arguments of this layer alone, as `lower_bound`."""
        if self.ranks is None:
            tokens = self._layout(hidden_states, state, attention_mask, cu_seqlens, num_states)
            return self._computed(hidden_states, state, tokens, *others)
        with shared(self.ranks):
            check_device(self.ranks, "hidden_states", hidden_states)
            # Errors are found here, before the ranks wait for each other.
            tokens = self._layout(hidden_states, state, attention_mask, cu_seqlens, num_states)
            if cu_seqlens is not None:
                own = bounds_of_rank(self.ranks, cu_seqlens, hidden_states.shape[1])
                tokens = self._layout(hidden_states, state, None, own, None)
            return self._computed(hidden_states, state, tokens, *others)

    def _computed(
        self, hidden_states: Tensor, state: RecurrentState | None, tokens: Layout, *others: Any
    ) -> tuple[Any, ...]:
        """The results of a call, once its arguments are checked."""
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
        """Check the arguments, return the layout of the tokens."""
        tokens = layout(hidden_states, self.hidden_size, attention_mask, cu_seqlens, num_states)
        if state is not None:
            self.state_shapes.check(state, sequence_count(hidden_states, cu_seqlens), hidden_states)
        return tokens

    def extra_repr(self) -> str:
        shown = vars(self)
        return ", ".join(f"{name}={shown[name]}" for name in _SHOWN if name in shown)


class RecurrentLayer(StatefulLayer):
    """A layer around one recurrence, whose op has a chunked form and a recurrent one."""

    # Other names of "chunk" in flash-linear-attention, which are refused.
    chunk_modes: ClassVar[tuple[str, ...]] = ()
    # The names of the short convolutions, in the order of their states; none in a layer that is made without them.
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
        self.layer_idx: Any = layer_idx  # layers that use it say what it may be
        # A call reads this in place of `layer_idx`: the compiler makes a graph for each value that is read, and blocks
        # that are compiled one by one shall share a graph.
        self.is_first = layer_idx == 0

    def _keep_flags(self, **flags: bool) -> None:
        """Keep these options as attributes, once it is checked that they are bools."""
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
        """Make short convolutions of some projections, if the layer has any; return the shapes of their states.

        For "q" of `names` it is ``q_conv1d``, of the outputs of ``q_proj``.
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
        """Each input through its short convolution, if the layer has any: the outputs, and the new states."""
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
        """The form of an op that `mode` names, from `initial_state` on; for a single token the recurrent form.

        Only the recurrent form can return several states.
        """
        if tokens.num_states is not None:
            return partial(recurrent, initial_state=initial_state, output_states=tokens.num_states)
        token_by_token = self.mode == "fused_recurrent" or _check.is_one(x.shape[1])
        op = recurrent if token_by_token and sharing() is None else chunk
        return partial(op, initial_state=initial_state, output_final_state=True, cu_seqlens=tokens.cu_seqlens)

    def _wide_op(self, chunk: Op, recurrent: Op, x: Tensor, initial_state: Any, tokens: Layout) -> Op:
        """`_op`, for heads of any number of values."""
        return partial(by_values, self._op(chunk, recurrent, x, None, tokens), initial_state)
