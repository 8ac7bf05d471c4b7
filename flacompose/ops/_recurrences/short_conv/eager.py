"""PyTorch for the short convolution, for every device without a Triton kernel.

    y_t = act(a_t)        a_t = bias + sum_w weight_w * x_{t-W+1+w}

Every sequence is preceded by the W inputs of its state, so that a sum of W shifted products holds at all of
its tokens. Packed sequences follow one another, each after its own state, so that no token reads another
sequence. Backwards in time likewise. Everything is functional and differentiable to any order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.short_conv.inputs import Inputs
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import bounds, inside, sequence_of


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, W])``."""
    x, weight, bias, initial_state, cu_seqlens, silu = inputs
    rows = _rows(x, weight, cu_seqlens)
    history = rows.history(upcast(x), initial_state)
    a = _preactivation(history, weight, bias)
    y = rows.of_tokens(F.silu(a) if silu else a)
    return _new(y, x.dtype), _new(rows.last(history).mT)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    x, weight, bias, initial_state, cu_seqlens, silu = call.inputs
    W, d_final_state = weight.shape[1], call.arriving.final_state
    rows = _rows(x, weight, cu_seqlens)
    history = rows.history(upcast(x), initial_state)  # [R, W + L, D]
    da = rows.at_tokens(call.do.to(history.dtype))  # [R, L, D]
    if silu:
        a = _preactivation(history, weight, bias)
        s = a.sigmoid()
        # The places between packed sequences may hold NaN, which belongs to no token.
        da = rows.only_tokens(da * s * (1 + a * (1 - s)))

    def d_weight() -> Tensor:
        L = da.shape[1]
        return _new(torch.stack([(da * history[:, 1 + w : 1 + w + L]).sum((0, 1)) for w in range(W)], 1))

    if call.wants("x", "initial_state"):
        # The token of an input reads it with the last column of the weight, and later tokens with the columns
        # before.
        d_history = _sums(F.pad(da, (0, 0, W, W - 1)), weight.flip(1), history.shape[1])
        if d_final_state is not None:
            d_history = d_history + rows.at_last(d_final_state.to(history.dtype).mT)
    return call.made(
        x=lambda: _new(rows.of_tokens(d_history[:, W:])),
        weight=d_weight,
        bias=lambda: da.sum((0, 1)),
        initial_state=lambda: _new(rows.first(d_history).mT),
    )


def _preactivation(history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[R, L, D]`` of ``history [R, W + L, D]``, whose first input is read by no token."""
    a = _sums(history[:, 1:], weight, history.shape[1] - weight.shape[1])
    return a if bias is None else a + bias.to(a.dtype)


def _sums(x: Tensor, weight: Tensor, L: int) -> Tensor:
    """``sum_w weight_w * x_{i+w}`` for the first ``L`` places ``i`` of ``x [R, L + W - 1, D]``."""
    first, *others = weight.to(x.dtype).unbind(1)
    total = x[:, :L] * first
    for w, column in enumerate(others, 1):
        total = torch.addcmul(total, x[:, w : w + L], column)
    return total


def _new(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` in memory of its own: an op returns no view."""
    return x.to(dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)


def _rows(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> _Rows | _Packed:
    T, W = x.shape[1], weight.shape[1]
    return _Rows(T, W) if cu_seqlens is None else _Packed(T, W, cu_seqlens)


class _Rows:
    """A sequence in each row: ``R = B`` rows of ``W`` inputs of its state and of its ``L = T`` tokens."""

    def __init__(self, T: int, W: int) -> None:
        self.T, self.W = T, W

    def history(self, x: Tensor, state: Tensor | None) -> Tensor:
        """``[R, W + L, D]`` of the tokens and of the states ``[N, D, W]`` before them."""
        if state is None:
            return F.pad(x.contiguous(), (0, 0, self.W, 0))
        return torch.cat([state.to(x.dtype).mT, x], 1)

    def at_tokens(self, dy: Tensor) -> Tensor:
        """``[B, T, D]`` as ``[R, L, D]``, zeros where there is no token."""
        return dy.contiguous()

    def only_tokens(self, x: Tensor) -> Tensor:
        return x

    def of_tokens(self, x: Tensor) -> Tensor:
        """``[B, T, D]`` of ``[R, L, D]``, zeros for a token in no sequence."""
        return x

    def first(self, history: Tensor) -> Tensor:
        """``[N, W, D]``: the state before each sequence."""
        return history[:, : self.W]

    def last(self, history: Tensor) -> Tensor:
        """``[N, W, D]``: the state after each sequence."""
        return history[:, self.T :]

    def at_last(self, state: Tensor) -> Tensor:
        """``[R, W + L, D]``, the transpose of `last`: these states in their places, and zeros elsewhere."""
        return F.pad(state, (0, 0, self.T, 0))


class _Packed:
    """Packed sequences in one row of ``W + L = T + N * W`` places; `_Rows` documents the methods."""

    def __init__(self, T: int, W: int, cu_seqlens: Tensor) -> None:
        N, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
        self.N, self.T, self.W = N, T, W
        cu = bounds(cu_seqlens, T)
        n, w = torch.arange(N, device=device), torch.arange(W, device=device)
        # A sequence, after the W places of its state, has the places from `begin` to `end + W`.
        begin, end = cu[:-1] + n * W, cu[1:] + n * W
        self.first_at, self.last_at = (at[:, None] + w for at in (begin, end))

        place = torch.arange(T + N * W, device=device)
        n = (torch.searchsorted(begin, place, right=True) - 1).clamp(min=0)
        age, left = place - begin[n], place - end[n]
        token = (age >= W) & (left < W)
        # `_chosen` appends a row of zeros, which stands for places without a token or state.
        self.token = torch.where(token, cu[n] + age - W, T)
        self.state = torch.where((age >= 0) & (age < W), n * W + age, N * W)
        self.last_state = torch.where((left >= 0) & (left < W), n * W + left, N * W)

        t = torch.arange(T, device=device)
        self.place = torch.where(inside(cu_seqlens, T), t + sequence_of(t, cu) * W, T + (N - 1) * W)

    def history(self, x: Tensor, state: Tensor | None) -> Tensor:
        history = _chosen(x, self.token)
        return history if state is None else history + self._placed(state.to(x.dtype).mT, self.state)

    def at_tokens(self, dy: Tensor) -> Tensor:
        return _chosen(dy, self.token[self.W :])

    def only_tokens(self, x: Tensor) -> Tensor:
        return torch.where((self.token[self.W :] < self.T)[:, None], x, 0)

    def of_tokens(self, x: Tensor) -> Tensor:
        return _chosen(x, self.place)

    def first(self, history: Tensor) -> Tensor:
        return history[0, self.first_at]

    def last(self, history: Tensor) -> Tensor:
        return history[0, self.last_at]

    def at_last(self, state: Tensor) -> Tensor:
        return self._placed(state, self.last_state)

    def _placed(self, state: Tensor, at: Tensor) -> Tensor:
        return _chosen(state.flatten(0, 1)[None], at)


def _chosen(x: Tensor, at: Tensor) -> Tensor:
    """The rows ``x[:, at]`` of ``x [1, L, D]``; row L is zeros."""
    return F.pad(x, (0, 0, 0, 1))[:, at]
