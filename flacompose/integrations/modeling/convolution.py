"""The short convolutions of modeling files, by `causal_conv1d`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import given_bounds, unwritten
from flacompose.ops import causal_conv1d
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._recurrences.short_conv import op as short_conv


def convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    seq_idx: Tensor | Bounds | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_fn` of ``hidden_states [B, D, T]`` and ``weight [D, W]``."""
    x = hidden_states.transpose(1, 2)
    cu_seqlens = seq_idx.cu_seqlens if isinstance(seq_idx, Bounds) else given_bounds(kwargs)
    if cu_seqlens is None and isinstance(seq_idx, Tensor):
        y = _convolved_by_index(x, weight, bias, seq_idx)
    else:
        fused = activation in ("silu", "swish")
        y, _ = causal_conv1d(x, weight, bias, "silu" if fused else None, cu_seqlens=cu_seqlens)
        activation = None if fused else activation
    return _activated(y, activation).transpose(1, 2)


def convolve_step(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_update` of ``hidden_states [B, D, T]``, which writes to ``conv_state [B, D, L]``."""
    L, W = conv_state.shape[-1], weight.shape[-1]
    before = unwritten(conv_state) if L == W else torch.nn.functional.pad(conv_state, (W - L, 0))
    fused = activation in ("silu", "swish")
    y, last = short_conv.update(hidden_states.transpose(1, 2), weight, bias, before, None, fused)
    if L != W:
        last = last[..., -L:] if L < W else torch.cat([conv_state, hidden_states], -1)[..., -L:]
    # The op upcasts the state that it has overwritten. The compiler cancels this with an explicit `to`, but not with
    # the cast of `copy_`.
    conv_state.copy_(last.to(conv_state.dtype))
    return _activated(y, None if fused else activation).transpose(1, 2)


def _convolved_by_index(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor) -> Tensor:
    """The convolution of packed sequences, if only ``seq_idx [B, T]``, the sequence of each token, is given."""
    T, W = x.shape[1], weight.shape[1]
    if sharing() is not None:
        raise ValueError("seq_idx must come with cu_seq_lens_q across ranks, got seq_idx alone")
    if seq_idx.shape[1] != T:
        raise ValueError(f"seq_idx must have a number for each of {T} tokens, got {seq_idx.shape[1]}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    history = torch.nn.functional.pad(x, (0, 0, W - 1, 0)).to(dtype)
    of_history = torch.nn.functional.pad(seq_idx, (W - 1, 0), value=-1)
    y = x.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for w in range(W):
        same = (of_history[:, w : w + T] == seq_idx)[:, :, None]
        y = y + torch.where(same, history[:, w : w + T], 0) * weight[:, w]
    return y.to(x.dtype)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)


class Bounds(NamedTuple):
    """The bounds of packed sequences, in place of `seq_idx` in forwards that only pass it on to `convolve`."""

    cu_seqlens: Tensor | None
