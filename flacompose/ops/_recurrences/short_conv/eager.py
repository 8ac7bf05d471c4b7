"""PyTorch for the short convolution, for every device without a Triton kernel.

    y_t = act(a_t)        a_t = bias + sum_w weight_w * x_{t-W+1+w}

The W inputs of its state precede every sequence, also a packed one. So each token is a sum of W shifted
products, and reads no other sequence. The backward is such a sum in reverse. Both are functional and
differentiable to any order.
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
    """The requested gradients."""
    x, weight, bias, initial_state, cu_seqlens, silu = call.inputs
    W, d_final_state = weight.shape[1], call.arriving.final_state
    rows = _rows(x, weight, cu_seqlens)
    history = rows.history(upcast(x), initial_state)  # [R, W + L, D]
    da = rows.at_tokens(call.do.to(history.dtype))  # [R, L, D]
    if silu:
        a = _preactivation(history, weight, bias)
        s = a.sigmoid()
        # The places of states between packed sequences may hold NaN.
        da = rows.only_tokens(da * s * (1 + a * (1 - s)))

    def d_weight() -> Tensor:
        L = da.shape[1]
        return _new(torch.stack([(da * history[:, 1 + w : 1 + w + L]).sum((0, 1)) for w in range(W)], 1))

    if call.wants("x", "initial_state"):
        # A token reads its own input with the last column of the weight; later tokens read it with earlier columns.
        d_history = _sums(F.pad(da, (0, 0, W, W - 1)), weight.flip(1), history.shape[1])
        if d_final_state is not None:
            d_history = d_history + rows.at_last(d_final_state.to(history.dtype).mT)
    return call.select(
        x=lambda: _new(rows.of_tokens(d_history[:, W:])),
        weight=d_weight,
        bias=lambda: da.sum((0, 1)),
        initial_state=lambda: _new(rows.first(d_history).mT),
    )


def _preactivation(history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sums ``[R, L, D]`` of ``history [R, W + L, D]``. No token reads the first input."""
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
    """A copy of `x`, since an op must not return a view."""
    return x.to(dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)


def _rows(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> _Rows | _Packed:
    T, W = x.shape[1], weight.shape[1]
    return _Rows(T, W) if cu_seqlens is None else _Packed(T, W, cu_seqlens)


class _Rows:
    """One sequence per row: ``R = B`` rows, each of ``W`` inputs of the state and ``L = T`` tokens."""

    def __init__(self, T: int, W: int) -> None:
        self.T, self.W = T, W

    def history(self, x: Tensor, state: Tensor | None) -> Tensor:
        """``[R, W + L, D]``: the inputs of the states ``[N, D, W]``, then the tokens."""
        if state is None:
            return F.pad(x.contiguous(), (0, 0, self.W, 0))
        return torch.cat([state.to(x.dtype).mT, x], 1)

    def at_tokens(self, dy: Tensor) -> Tensor:
        """``[B, T, D]`` as ``[R, L, D]``, with zeros in places without a token."""
        return dy.contiguous()

    def only_tokens(self, x: Tensor) -> Tensor:
        return x

    def of_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `at_tokens`, with zeros for tokens in no sequence."""
        return x

    def first(self, history: Tensor) -> Tensor:
        """``[N, W, D]``: the state before each sequence."""
        return history[:, : self.W]

    def last(self, history: Tensor) -> Tensor:
        """``[N, W, D]``: the state after each sequence."""
        return history[:, self.T :]

    def at_last(self, state: Tensor) -> Tensor:
        """``[R, W + L, D]``, the transpose of `last`: the states at the places that `last` reads, else zeros."""
        return F.pad(state, (0, 0, self.T, 0))


class _Packed:
    """Packed sequences in one row of ``W + L = T + N * W`` places. The methods are those of `_Rows`."""

    def __init__(self, T: int, W: int, cu_seqlens: Tensor) -> None:
        N, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
        self.N, self.T, self.W = N, T, W
        cu = bounds(cu_seqlens, T)
        n, w = torch.arange(N, device=device), torch.arange(W, device=device)
        # A sequence has the places from `begin` to `end + W`: W places of its state, then its tokens.
        begin, end = cu[:-1] + n * W, cu[1:] + n * W
        self.first_at, self.last_at = (at[:, None] + w for at in (begin, end))

        place = torch.arange(T + N * W, device=device)
        n = (torch.searchsorted(begin, place, right=True) - 1).clamp(min=0)
        age, left = place - begin[n], place - end[n]
        token = (age >= W) & (left < W)
        # `_chosen` appends a row of zeros for places without a token or state.
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
