"""The layout of sequences in a batch of tokens: one per row, padded, or packed one after another.

`enter` left-aligns padded rows, so that a layer sees tokens first and pads last, and `leave` restores the order. Both
are index arithmetic on the device, and no shape depends on values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flacompose._errors import TypeError, ValueError
from flacompose.layers import _check
from flacompose.ops._arguments import intermediate_states
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._tensors.dtensor import replicated
from flacompose.ops._tensors.packed import inside
from flacompose.ops._tensors.sizes import violated


class Layout(NamedTuple):
    """The places of tokens in rows of ``T`` places, after `enter`."""

    is_token: Tensor | None = None  # [B, T], False at pads and past cu_seqlens[-1]; None if all are tokens
    lengths: Tensor | None = None  # [B], the number of tokens of each padded row
    order: Tensor | None = None  # [B, T], the place in the input of each left-aligned token
    inverse_order: Tensor | None = None  # [B, T], the inverse permutation of `order`
    cu_seqlens: Tensor | None = None  # [N + 1], the bounds of packed sequences
    num_states: int | None = (
        None  # the number of last tokens whose states are returned; None for the final state alone
    )

    def enter(self, x: Tensor) -> Tensor:
        """``x [B, T, D]``, with padded rows left-aligned and zeros in places without a token."""
        if self.order is not None:
            x = take(x, self.order)
        return self.masked(x)

    def leave(self, x: Tensor) -> Tensor:
        """The inverse of `enter`, with zeros in places without a token."""
        x = self.masked(x)
        return x if self.inverse_order is None else take(x, self.inverse_order)

    def masked(self, x: Tensor, value: float = 0) -> Tensor:
        """``x [B, T, ...]`` with `value` in places without a token.

        A token does not change a state if its key and log gates are 0, or if its logits are -inf.
        """
        if self.is_token is None:
            return x
        return torch.where(self.is_token.reshape(*self.is_token.shape, *[1] * (x.ndim - 2)), x, value)


def layout(
    hidden_states: Tensor,
    hidden_size: int,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    num_states: int | None = None,
) -> Layout:
    """Check these arguments of a layer, and prepare the layout of its sequences."""
    if isinstance(hidden_states, Tensor) and hidden_states.is_nested:
        raise TypeError(
            "hidden_states must be a dense tensor, got a nested one: put the sequences of different lengths "
            "one after another in a row, [1, T, hidden_size], and give their bounds as cu_seqlens "
            "(of jagged hidden_states: hidden_states.values()[None] and hidden_states.offsets())"
        )
    _check.floating("hidden_states", hidden_states)
    shape = tuple(hidden_states.shape)
    if len(shape) != 3 or shape[2] != hidden_size:
        raise ValueError(f"hidden_states must have shape (B, T, {hidden_size}), got {shape}")
    _check.not_empty("hidden_states", hidden_states)
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens exclude each other: packed sequences have no padding")
    if num_states is not None:
        if attention_mask is not None:
            raise ValueError(
                f"num_states must not be given with attention_mask: every token must count, got {num_states}"
            )
        intermediate_states.check(num_states, hidden_states, cu_seqlens, "num_states")
        return Layout(num_states=num_states)
    if attention_mask is not None:
        return _padded(hidden_states, attention_mask)
    if cu_seqlens is not None:
        _check.packed("hidden_states", hidden_states, cu_seqlens)
        if hasattr(hidden_states, "device_mesh"):
            raise TypeError(
                "cu_seqlens must not be given where hidden_states are a DTensor, as in layers that "
                "tensor_parallel_plan has sharded: its rows cannot be packed"
            )
        return Layout(inside(cu_seqlens, hidden_states.shape[1])[None], cu_seqlens=cu_seqlens)
    return Layout()


def distributed_like(x: Tensor, other: Tensor) -> Tensor:
    """`other`, a plain tensor that is the same on every rank, as a replicated DTensor if `x` is a DTensor."""
    return other if hasattr(other, "device_mesh") else replicated(other, x)


def _padded(hidden_states: Tensor, attention_mask: Tensor) -> Layout:
    B, T, _ = hidden_states.shape
    # Float masks are refused: they are usually added to logits, and are 0 at tokens.
    _check.integral("attention_mask", attention_mask, bools=True, why=" (nonzero at tokens, not additive)")
    if (
        attention_mask.ndim != 2
        or violated(attention_mask.shape[0] == B)
        or violated(attention_mask.shape[1] >= T)
    ):
        raise ValueError(
            f"attention_mask must have shape ({B}, {T}), or ({B}, L) with L > {T} for a whole history, "
            f"got {tuple(attention_mask.shape)}"
        )
    if sharing() is not None and violated(attention_mask.shape[1] == T):
        raise ValueError(
            f"attention_mask must cover this rank's {T} tokens, ({B}, {T}), got {tuple(attention_mask.shape)}"
        )
    _check.same_device("attention_mask", attention_mask, hidden_states)
    attention_mask = distributed_like(hidden_states, attention_mask)
    is_token = attention_mask[:, attention_mask.shape[1] - T :] != 0
    ordinal = is_token.long().cumsum(1)  # the number of tokens up to and including this place
    lengths = is_token.sum(1)
    place = distributed_like(ordinal, torch.arange(T, device=ordinal.device)).expand_as(ordinal)
    inverse_order = torch.where(is_token, ordinal - 1, lengths[:, None] + place - ordinal)
    order = inverse_order.scatter(1, inverse_order, place)
    return Layout(place < lengths[:, None], lengths, order, inverse_order)


def rows_of(x: Tensor) -> Tensor:
    """``x [B, T, ...]`` as ``[B * T, ...]`` in a graph, else `x`. A matrix ``[B * T, D]`` is returned as it is.

    The compiler views the input and the output of each product as rows itself, and so do the gradients. With symbolic
    sizes it takes longer over these views than over the product. A DTensor keeps its axes.
    """
    return x.flatten(0, 1) if is_compiling() and x.ndim > 2 and not hasattr(x, "device_mesh") else x


def tokens_of(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `rows_of`: ``rows [B * T, ...]`` as ``[B, T, ...]``, the first axes of `like`."""
    is_whole = not is_compiling() or hasattr(like, "device_mesh")
    return rows if is_whole else rows.view(*like.shape[:2], *rows.shape[1:])


def take(x: Tensor, index: Tensor) -> Tensor:
    """``y[b, t] = x[b, index[b, t]]``."""
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
