"""The short causal convolution in front of a recurrence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from flacompose._errors import ValueError
from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.layout import distributed_like, take
from flacompose.ops._arguments import intermediate_states
from flacompose.ops._operators.bounds import verified
from flacompose.ops._parallel.exchange import last_tokens
from flacompose.ops._parallel.ranks import Ranks, bounds_of_rank, check_device, shared, sharing
from flacompose.ops._recurrences.short_conv import op
from flacompose.ops._tensors.dtype import autocast_dtype, upcast
from flacompose.ops._tensors.packed import bounds, sequence_of
from flacompose.ops._tensors.sizes import always_true


def _are_sizes(sizes: Any, D: int) -> bool:
    are_numbers = isinstance(sizes, (tuple, list)) and all(isinstance(n, int) and n >= 0 for n in sizes)
    return are_numbers and sum(sizes) == D


class ShortConvolution(nn.Module):
    r"""Depthwise causal convolution over time, with explicit state.

    $$y_t = \operatorname{activation}\Bigl(b + \sum_{w=0}^{W-1} \text{weight}_w \odot x_{t-(W-1)+w}\Bigr)$$

    Inputs before the first token come from the state, or are zeros. Sums are taken in float32 (float64 for float64).
    Several tokens on a GPU are computed by the op `flacompose.ops.causal_conv1d`, unless the dtype is float64, ``W`` is
    above 8, or a graph is compiled under `torch.no_grad`. In all other cases the convolution is ``W`` shifted
    multiply-adds in PyTorch, which the compiler fuses with their neighbours into one kernel, and a small kernel for the
    new state. On a GPU their gradient would be many kernels and a copy of the inputs; compiled for a CPU, the op would
    take two to four times as long. `torch.nn.functional.conv1d` does not fuse with other operations, and does not
    compile for training with a dynamic ``T`` at batch 1.

    Args:
        hidden_size: Number of channels ``D``.
        kernel_size: Width ``W``.
        bias: Whether there is a bias.
        activation: "silu" or "swish", which are the same, or None.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        weight: ``[D, 1, W]``. Column ``W - 1`` weights the newest token. Initialized as in `torch.nn.Conv1d`.
        bias: ``[D]`` or None, initialized likewise.

    Raises:
        ValueError: If `hidden_size` or `kernel_size` is below 1, or `activation` is unknown.
        TypeError: If a size is no int, `bias` is no bool, or the ops do not take `dtype`.
    """

    bias: nn.Parameter | None

    # The ranks that share the tokens, which `context_parallel` sets.
    ranks: Ranks | None = None

    @explained
    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check.count("hidden_size", hidden_size)
        _check.count("kernel_size", kernel_size)
        _check.flags(bias=bias)
        _check.optional_float_dtype(dtype)
        if activation not in ("silu", "swish", None):
            raise ValueError(f"activation must be 'silu', 'swish' or None, got {activation!r}")
        self.hidden_size = hidden_size
        self.kernel_size = kernel_size
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, device=device, dtype=dtype))
        new_bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", new_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.kernel_size)
            nn.init.uniform_(self.bias, -bound, bound)

    if TYPE_CHECKING:  # nn.Module says nothing of the types of a call

        def __call__(
            self,
            x: Tensor,
            state: Tensor | None = None,
            *,
            lengths: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            num_states: int | None = None,
            sizes: Sequence[int] | None = None,
        ) -> tuple[Any, Tensor]: ...

    @explained
    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_states: int | None = None,
        sizes: Sequence[int] | None = None,
    ) -> tuple[Any, Tensor]:
        """Convolve; return the outputs and the new state.

        Args:
            x: ``[B, T, D]``.
            state: The inputs before the first token, ``[N, D, W]``, the newest in column ``W - 1``, in any float dtype;
                ``N`` is ``B``, or the number of packed sequences. It is not changed. Default: zeros.
            lengths: ``[B]`` integers. The first ``lengths[b]`` places of row ``b`` are tokens, and the new state is the
                state after them. Outputs of other places are arbitrary. Default: all places are tokens.
            cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B``
                is then 1. Sequences may be empty. Outputs past ``cu_seqlens[-1]`` are arbitrary.
            num_states: Number ``n`` of states to return, from 1 to 16: the states after each of the last ``n`` tokens
                of each row. Not with `lengths` or `cu_seqlens`. Default: the state after the last token alone.
            sizes: Numbers of channels, ``D`` in all. `y` is then a tuple of tensors with these channels, contiguous
                where the op computes them, as other ops read them. Default: one tensor.

        Returns:
            ``(y, state)``: ``[B, T, D]`` and a new ``[N, D, W]``, or ``[N, n, D, W]`` with `num_states`, both in the
                dtype of `x`.

        Raises:
            ValueError: If a shape or a device is wrong, `num_states` or `sizes` is wrong or not allowed, or `lengths`
                comes with `cu_seqlens`.
            TypeError: If an argument is no tensor, `x` or `state` has no float dtype, `lengths` no integer dtype, or
                `cu_seqlens` is neither int32 nor int64.
        """
        if self.ranks is not None and sharing() is None:
            with shared(self.ranks):
                check_device(self.ranks, "x", x)
                if cu_seqlens is not None:
                    _check.packed("x", x, cu_seqlens)
                bounds_here = bounds_of_rank(self.ranks, cu_seqlens, x.shape[1])
                return self.forward(
                    x, state, lengths=lengths, cu_seqlens=bounds_here, num_states=num_states, sizes=sizes
                )
        D, W = self.hidden_size, self.kernel_size
        _check.floating("x", x)
        if x.ndim != 3 or x.shape[2] != D:
            raise ValueError(f"x must have shape (B, T, {D}), got {tuple(x.shape)}")
        N = x.shape[0]
        if lengths is not None and cu_seqlens is not None:
            raise ValueError("lengths and cu_seqlens exclude each other")
        if lengths is not None:
            _check.like(x, "lengths", lengths, (N,), _check.integral)
        if num_states is not None:
            intermediate_states.check(num_states, x, cu_seqlens, "num_states")
            if lengths is not None:
                raise ValueError(f"num_states must not be given with lengths, got {num_states}")
        if cu_seqlens is not None:
            N = _check.packed("x", x, cu_seqlens)
        if sizes is not None and not _are_sizes(sizes, D):
            raise ValueError(f"sizes must be numbers of channels, {D} in all, got {sizes}")
        if state is not None:
            _check.like(x, "state", state, (N, D, W))
            state = state.to(x.dtype)

        ranks, after = sharing(), None
        if ranks is not None:
            before = None if state is None else state.mT
            start, after = last_tokens(ranks, x, before, W, lengths, cu_seqlens)
            state = start.mT
        new: Tensor
        if self._takes_op(x, num_states):
            ys, new = self._by_op(x, state, lengths, cu_seqlens, sizes)
            return (ys[0] if sizes is None else ys), new if after is None else _as_state(after)
        if always_true(x.shape[1] == 0):  # of a rank without tokens
            y, new = self._rows(x, state, None, None)
            y = y[: x.shape[0]]
        elif cu_seqlens is not None:
            y, new = self._packed(x, state, cu_seqlens)
        elif state is not None and lengths is None and num_states is None and _check.is_one(x.shape[1]):
            y, new = self._step(x, state)
        else:
            y, new = self._rows(x, state, lengths, num_states)
        new = new if after is None else _as_state(after)
        if self.bias is not None:
            y = y + self.bias
        y = (y if self.activation is None else F.silu(y)).to(x.dtype)
        return y if sizes is None else y.split(list(sizes), -1), new

    def _takes_op(self, x: Tensor, num_states: int | None) -> bool:
        """Whether the op computes `x`: several tokens by a kernel, unless only a forward pass is compiled."""
        alone = is_compiling() and not torch.is_grad_enabled()
        is_plain = num_states is None and not hasattr(x, "device_mesh") and not _check.is_one(x.shape[1])
        runs_kernel = x.is_cuda and op.has_kernel(x.dtype, self.kernel_size)
        return runs_kernel and is_plain and not alone and autocast_dtype(x.device) in (None, x.dtype)

    def _by_op(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        sizes: Sequence[int] | None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The outputs, split into `sizes` channels, and the new state of all channels."""
        sizes = [self.hidden_size] if sizes is None else list(sizes)
        absent = [None] * len(sizes)
        parts = zip(
            x.split(sizes, 2),
            self.weight[:, 0].split(sizes),
            absent if self.bias is None else self.bias.split(sizes),
            absent if state is None else state.split(sizes, 1),
            strict=True,
        )
        silu = self.activation is not None
        ys, states = zip(*(op.forward(*op.Inputs(*part, cu_seqlens, silu)) for part in parts), strict=True)
        if lengths is None:
            new = torch.cat(states, 1) if len(sizes) > 1 else states[0]
        else:
            new = _as_state(_last(self._history(x, state), lengths, x.shape[1]))
        return ys, new.to(x.dtype)

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token. Its output is a sum over the new state."""
        state = torch.cat([state[:, :, 1:], x.transpose(1, 2)], dim=2)
        return (upcast(state) * self.weight[:, 0]).sum(2)[:, None], state

    def _rows(
        self, x: Tensor, state: Tensor | None, lengths: Tensor | None, num_states: int | None
    ) -> tuple[Tensor, Tensor]:
        """One sequence per row."""
        T, W = x.shape[1], self.kernel_size
        history = self._history(x, state)
        if num_states is not None:
            return self._sums(upcast(history), T), intermediate_states.windows(history, W, num_states)
        last = history[:, T:] if lengths is None else _last(history, lengths, T)
        return self._sums(upcast(history), T), _as_state(last)

    def _history(self, x: Tensor, state: Tensor | None) -> Tensor:
        """``[B, W + T, D]``: the ``W`` inputs of the state, then `x`."""
        # A sum of two padded tensors fuses with its readers; a concatenation would be written to memory.
        history = F.pad(x, (0, 0, self.kernel_size, 0))
        return history if state is None else history + F.pad(state.transpose(1, 2), (0, 0, 0, x.shape[1]))

    def _packed(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Several sequences in one row."""
        T, W = x.shape[1], self.kernel_size
        cu = bounds(verified(cu_seqlens, T), T)
        begin, end = cu[:-1], cu[1:]
        t = torch.arange(T, device=x.device)
        age = (t - cu[sequence_of(t, cu)])[:, None]
        y = self._sums(upcast(F.pad(x, (0, 0, W, 0))), T, age)

        column = torch.arange(W, device=x.device)
        # [N, W]: the tokens in the new state. A number below `begin` is a column of the old state.
        source = end[:, None] - W + column
        last = x[0, source.clamp(min=0)]
        if state is None:
            old = torch.zeros_like(last)
        else:
            if W > 1:
                y = y + self._from_state(state, begin, end, T)
            old = take(state.transpose(1, 2), ((end - begin)[:, None] + column).clamp(max=W - 1))
        return y, _as_state(torch.where((source >= begin[:, None])[:, :, None], last, old))

    def _from_state(self, state: Tensor, begin: Tensor, end: Tensor, T: int) -> Tensor:
        """The contribution of the state, ``[1, T, D]``, to the first ``W - 1`` tokens of each packed sequence."""
        _, D, W = state.shape
        y = self._sums(F.pad(upcast(state).transpose(1, 2), (0, 0, 0, W - 1)), W - 1)  # [N, W - 1, D]
        token = begin[:, None] + torch.arange(W - 1, device=state.device)  # [N, W - 1]
        token = torch.where(token < end[:, None], token, T)  # row T is dropped below: the sequence is shorter
        return y.new_zeros(T + 1, D).index_put((token,), y)[None, :T]

    def _sums(self, h: Tensor, T: int, age: Tensor | None = None) -> Tensor:
        """``T`` outputs of ``h [N, W + T, D]``, the ``W`` inputs before the tokens, then the tokens.

        ``age [T, 1]`` is the number of earlier tokens of the same sequence; tokens of other sequences are skipped.
        """
        # `unbind`, since its gradient is one `stack`; each index would have a gradient of its own, padded with zeros.
        weights = self.weight.squeeze(1).unbind(1)

        def product(w: int) -> Tensor:
            y, tokens_before = h[:, 1 + w : 1 + w + T] * weights[w], len(weights) - 1 - w
            return y if age is None or tokens_before == 0 else torch.where(age >= tokens_before, y, 0)

        # Products are added one by one. Uncompiled, all of them together would take the memory of W inputs.
        total = product(0)
        for w in range(1, len(weights)):
            total = total + product(w)
        return total

    def extra_repr(self) -> str:
        D, W, bias = self.hidden_size, self.kernel_size, self.bias is not None
        return f"{D}, kernel_size={W}, bias={bias}, activation={self.activation}"


def _last(history: Tensor, lengths: Tensor, T: int) -> Tensor:
    """``[B, W, D]`` of ``history [B, W + T, D]``: the last inputs of each row, which has ``lengths [B]`` tokens."""
    # Clamped, so that wrong `lengths` cannot cause an access out of bounds.
    column = distributed_like(lengths, torch.arange(history.shape[1] - T, device=history.device))
    return take(history, lengths.long().clamp(0, T)[:, None] + column)


def _as_state(last: Tensor) -> Tensor:
    """``[N, W, D]`` as a state ``[N, D, W]``, a copy."""
    return last.transpose(1, 2).clone(memory_format=torch.contiguous_format)
