"""MiniMax: one op computes its lightning attention, and the state is elsewhere in the cache."""

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
    """Lightning attention by one op, in place of the loops over blocks and tokens.

    The state is in a cache layer of linear attention, as in other models. Transformers keeps it in a list, which beam
    search does not reorder. The cache would then take the layer for softmax attention without tokens, and derive
    positions and masks from it.
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
