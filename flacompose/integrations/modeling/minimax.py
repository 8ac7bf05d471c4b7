"""MiniMax: its lightning attention is computed by one op, and its state is in another place of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import bounds_of, is_step
from flacompose.integrations.modeling.forward import Forward, layer_forward
from flacompose.ops import chunk_simple_gla, fused_recurrent_simple_gla


@layer_forward
def minimax_attention_forward(
    forward: Forward, layer: Any, cache: Any, /,
    hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None, *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Lightning attention, in place of its forward: one op for its loops over blocks and over tokens.

    The state is where other models have theirs, in a layer of the cache for linear attention. In the list that
    transformers keeps it in for MiniMax, beams would not reorder it, and the cache would take this layer for one of
    softmax attention that has seen no token, and count positions and masks by it.
    """
    from transformers.models.minimax.modeling_minimax import apply_mask_to_padding_states

    from flacompose.integrations.modeling.caches import linear_layer

    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    qkv = apply_mask_to_padding_states(qkv, attention_mask)
    q, k, v = qkv.unflatten(-1, (layer.num_attention_heads, 3 * layer.head_dim)).split(layer.head_dim, -1)

    cached = None if cache is None else linear_layer(cache, layer.layer_idx, layer.num_hidden_layers)
    state = None if cached is None else cached.recurrent_states[0]
    attention = fused_recurrent_simple_gla if is_step(hidden_states) else chunk_simple_gla
    o, state = attention(
        q, k, v, g_gamma=-layer.slope_rate.flatten(), scale=1.0,
        initial_state=state, output_final_state=True, cu_seqlens=bounds_of(kwargs),
    )  # fmt: skip
    if cached is not None:
        cached.keep(state)

    o = layer.norm(o.flatten(2)) * torch.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(o), state


FORWARDS = {"MiniMaxLightningAttention": minimax_attention_forward}
