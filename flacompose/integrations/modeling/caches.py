"""Caches for states that the caches of transformers cannot hold. Importing this file needs transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.models.xlstm.modeling_xlstm import xLSTMCache


class RecurrentLayer(LinearAttentionLayer):
    """A cache layer of linear attention that can repeat and select rows, as `MiniMaxCache` expects."""

    device: Any  # None until there is a state

    def keep(self, recurrent: Tensor, conv: Tensor | None = None) -> None:
        """Replace the states by these new tensors."""
        self.recurrent_states[0], self.device = recurrent, recurrent.device
        self.is_recurrent_states_initialized[0] = self.has_previous_state[0] = True
        if conv is not None:
            self.conv_states[0], self.conv_kernel_size[0] = conv, conv.shape[-1]
            self.is_conv_states_initialized[0] = True

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each_row(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each_row(lambda state: state[indices])

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        for states in self.recurrent_states, self.conv_states:
            if states[0] is not None:
                states[0] = change(states[0])


def recurrent_layer(cache: Any, index: int) -> RecurrentLayer:
    """The cache layer for the state of layer `index` of a model, in place of the one that transformers made."""
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    if not isinstance(cache.layers[index], RecurrentLayer):
        cache.layers[index] = RecurrentLayer()
    return cache.layers[index]


def linear_layer(cache: Any, index: int, layers: int) -> Any:
    """The layer of a `MiniMaxCache` for the state of layer `index` of a model with `layers` layers."""
    if index < len(cache.linear_cache) and isinstance(cache.linear_cache[index], Tensor):
        raise ValueError(
            "the cache must have been filled on this library's ops, got one that transformers has filled, in which it "
            "miscounts MiniMax's tokens: start again with an empty cache"
        )
    if len(cache.linear_cache) < layers:
        # The cache looks for every layer in this list first, and if it finds [], in its own layers.
        cache.set_linear_cache(layers - 1, [])
    while len(cache.layers) <= index:
        cache.layers.append(RecurrentLayer() if len(cache.layers) == index else DynamicLayer())
    return cache.layers[index]


class BeamCache(xLSTMCache):
    """The cache of xLSTM, with the state sizes of its layers, and rows that beam search can reorder."""

    def __init__(self, model: Any, batch: int, dtype: torch.dtype, device: Any) -> None:
        # Made for 0 rows, since transformers rounds the sizes of its states up.
        super().__init__(model.config, 0, dtype, device)
        H, layer = model.config.num_heads, model.blocks[0].mlstm_layer
        K, V = layer.qk_dim // H, layer.v_dim // H

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(batch, H, *sizes, dtype=dtype, device=device)

        self.rnn_state = {i: (zeros(K, V), zeros(K), zeros(1)) for i in range(len(model.blocks))}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.rnn_state = {
            layer: (C[beam_idx], n[beam_idx], m[beam_idx]) for layer, (C, n, m) in self.rnn_state.items()
        }
