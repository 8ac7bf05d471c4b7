"""The functions that transformers' modeling files call for their recurrences, over the ops of this library.

They take the arguments of the functions that they stand in for, and ignore the same ones. Where a modeling file expects
that its cache is written to, it is written to here, at the edge: the ops themselves return new states.

Packed sequences come as `cu_seq_lens_q`, which transformers' collators make for attention, or as `cu_seqlens`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    mamba_chunk_scan_combined,
    selective_state_update,
)


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`causal_conv1d_fn` of ``hidden_states [B, D, T]`` and ``weight [D, W]``."""
    x = hidden_states.transpose(1, 2)
    cu_seqlens = _bounds(kwargs)
    if cu_seqlens is None and seq_idx is not None:
        y = _convolved_by_index(x, weight, bias, seq_idx)
    else:
        fused = activation in ("silu", "swish")
        y, _ = causal_conv1d(x, weight, bias, "silu" if fused else None, cu_seqlens=cu_seqlens)
        activation = None if fused else activation
    return _activated(y, activation).transpose(1, 2)


def convolve_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_update` of ``hidden_states [B, D, T]``, which writes to ``conv_state [B, D, L]``."""
    L, W = conv_state.shape[-1], weight.shape[-1]
    before = conv_state if L == W else torch.nn.functional.pad(conv_state, (W - L, 0))
    fused = activation in ("silu", "swish")
    y, last = causal_conv1d(
        hidden_states.transpose(1, 2),
        weight,
        bias,
        "silu" if fused else None,
        before,
        output_final_state=True,
    )
    assert last is not None
    conv_state.copy_(last[..., -L:] if L <= W else torch.cat([conv_state, hidden_states], -1)[..., -L:])
    return _activated(y, None if fused else activation).transpose(1, 2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`torch_chunk_gated_delta_rule`."""
    return chunk_gated_delta_rule(
        query, key, value, g, beta,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=_bounds(kwargs),
    )  # fmt: skip


def gated_delta_rule_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`torch_recurrent_gated_delta_rule`."""
    return fused_recurrent_gated_delta_rule(
        query, key, value, g, beta,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=_bounds(kwargs),
    )  # fmt: skip


def kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kimi_delta_attention`, which transformers never gives the bounds of packed sequences by that name."""
    return chunk_kda(
        query, key, value, g, beta,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=_bounds(kwargs),
    )  # fmt: skip


def kda_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`recurrent_kimi_delta_attention`."""
    return fused_recurrent_kda(
        query, key, value, g, beta,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=_bounds(kwargs),
    )  # fmt: skip


def ssd(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba2_chunk_scan`."""
    return mamba_chunk_scan_combined(
        hidden_states, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, dt_softplus,
        (float(dt_limit[0]), float(dt_limit[1])), return_final_states, _bounds(kwargs),
    )  # fmt: skip


def state_space_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`mamba_selective_state_update` and `mamba2_selective_state_update`, which write to `state`."""
    y, new = selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
    state.copy_(new)
    return y


def no_fused_block(*_: Any, **__: Any) -> None:
    """Of the functions that compute a whole block in one: transformers then calls its parts."""


def _bounds(kwargs: dict[str, Any]) -> Tensor | None:
    """The bounds of packed sequences, or None if each row is one."""
    given = kwargs.get("cu_seqlens")
    given = kwargs.get("cu_seq_lens_q") if given is None else given
    if given is None and kwargs.get("seq_idx") is not None:
        raise ValueError(
            "seq_idx must come with cu_seq_lens_q, the bounds of the packed sequences, got seq_idx alone"
        )
    return given


def _convolved_by_index(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor) -> Tensor:
    """The convolution where only ``seq_idx [B, T]``, the number of each token's sequence, tells sequences apart."""
    T, W = x.shape[1], weight.shape[1]
    history = torch.nn.functional.pad(x, (0, 0, W - 1, 0)).float()
    of_history = torch.nn.functional.pad(seq_idx, (W - 1, 0), value=-1)
    y = x.new_zeros((), dtype=history.dtype) if bias is None else bias.to(history.dtype)
    for w in range(W):
        same = (of_history[:, w : w + T] == seq_idx)[:, :, None]
        y = y + torch.where(same, history[:, w : w + T], 0) * weight[:, w]
    return y.to(x.dtype)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)
