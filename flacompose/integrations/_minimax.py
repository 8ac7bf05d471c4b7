"""The layer of MiniMax's cache that has the state of its linear attention. It needs transformers to be imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer


class LightningLayer(LinearAttentionLayer):
    """A layer for linear attention that can repeat and select rows, which `MiniMaxCache` asks of all its layers."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        state = self.recurrent_states[0]
        if state is not None:
            self.recurrent_states[0] = state.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        state = self.recurrent_states[0]
        if state is not None:
            self.recurrent_states[0] = state[indices]


def linear_layer(cache: Any, index: int, layers: int) -> Any:
    """The layer of a `MiniMaxCache` that has the state of the model's layer `index`, of so many `layers`."""
    if index < len(cache.linear_cache) and isinstance(cache.linear_cache[index], Tensor):
        raise ValueError(
            "the cache must have been filled on this library's ops, got one that transformers has filled, in which it "
            "miscounts MiniMax's tokens: start again with an empty cache"
        )
    if len(cache.linear_cache) < layers:
        # The cache looks for each layer in this list, softmax attention included, and where it finds [], in its layers.
        cache.set_linear_cache(layers - 1, [])
    while len(cache.layers) <= index:
        cache.layers.append(LightningLayer() if len(cache.layers) == index else DynamicLayer())
    return cache.layers[index]
