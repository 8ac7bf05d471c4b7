"""Where the sequences lie in a batch of tokens: one per row, padded, or packed one after another.

A padded row is left-aligned on the way in, so that all that follows sees its tokens first and its pads last, and put
back on the way out. All of it is index arithmetic on the device, of shapes that no value decides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flacompose.layers import _check
from flacompose.ops._varlen import inside


class Layout(NamedTuple):
    """The sequences of ``T`` tokens a row, after `enter`."""

    valid: Tensor | None = None  # [B, T], False for pads and past cu_seqlens[-1]; None: every token counts
    lengths: Tensor | None = None  # [B], the tokens of each padded row
    order: Tensor | None = None  # [B, T], the place in the input of each left-aligned token
    rank: Tensor | None = None  # [B, T], its inverse

    def enter(self, x: Tensor) -> Tensor:
        """``x [B, T, D]`` with padded rows left-aligned, and zeros, whatever it holds there, where nothing counts."""
        if self.order is not None:
            x = _take(x, self.order)
        return self.silence(x)

    def leave(self, x: Tensor) -> Tensor:
        """The inverse of `enter`: every token where it came from, and zeros where nothing counts."""
        x = self.silence(x)
        return x if self.rank is None else _take(x, self.rank)

    def silence(self, x: Tensor, value: float = 0) -> Tensor:
        """``x [B, T, ...]`` with zeros, or `value`, where nothing counts.

        A token whose key and whose gates (natural logarithms) are 0 leaves a state as it is, and so does one whose
        logits are -inf.
        """
        if self.valid is None:
            return x
        return torch.where(self.valid.reshape(*self.valid.shape, *[1] * (x.ndim - 2)), x, value)


def layout(
    hidden_states: Tensor,
    hidden_size: int,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Layout:
    """Check what says where the sequences lie, and prepare it.

    Args:
        hidden_states: ``[B, T, hidden_size]``.
        hidden_size: of the layer.
        attention_mask: ``[B, T]``, bool or integers, nonzero for the tokens that count, which need not be neighbours;
            ``[B, L]`` with ``L > T`` for a whole history, whose last ``T`` columns are these tokens.
        cu_seqlens: ``[N + 1]`` int32 or int64, the boundaries of ``N`` sequences packed in one row.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check.floating("hidden_states", hidden_states)
    if hidden_states.ndim != 3 or hidden_states.shape[2] != hidden_size:
        raise ValueError(
            f"hidden_states must have shape (B, T, {hidden_size}), got {tuple(hidden_states.shape)}"
        )
    if 0 in hidden_states.shape:
        raise ValueError(f"hidden_states must have no empty dimension, got {tuple(hidden_states.shape)}")
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens exclude each other: packed sequences have no padding")
    if attention_mask is not None:
        return _padded(hidden_states, attention_mask)
    if cu_seqlens is not None:
        return _packed(hidden_states, cu_seqlens)
    return Layout()


def _padded(hidden_states: Tensor, attention_mask: Tensor) -> Layout:
    B, T, _ = hidden_states.shape
    # A float mask may be one that is added to logits, 0 at tokens: it would be taken inverted.
    _check.integral("attention_mask", attention_mask, bools=True, why=" (nonzero at tokens, not additive)")
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask must have shape ({B}, {T}), or ({B}, L) with L > {T} for a whole history, "
            f"got {tuple(attention_mask.shape)}"
        )
    _check.same_device("attention_mask", attention_mask, hidden_states)
    counts = attention_mask[:, attention_mask.shape[1] - T :] != 0
    seen = counts.long().cumsum(1)  # the tokens up to and with this one
    lengths = seen[:, -1]
    place = torch.arange(T, device=seen.device).expand_as(seen)
    rank = torch.where(counts, seen - 1, lengths[:, None] + place - seen)
    order = rank.scatter(1, rank, place)
    return Layout(place < lengths[:, None], lengths, order, rank)


def _packed(hidden_states: Tensor, cu_seqlens: Tensor) -> Layout:
    _check.packed("hidden_states", hidden_states, cu_seqlens)
    return Layout(inside(cu_seqlens, hidden_states.shape[1])[None])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """``y[b, t] = x[b, index[b, t]]``."""
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
