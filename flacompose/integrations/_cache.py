"""Layers of caches for the recurrences that transformers keeps elsewhere. It needs transformers to be imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer


class RecurrentLayer(LinearAttentionLayer):
    """A layer for linear attention that can repeat and select rows, which `MiniMaxCache` asks of all its layers."""

    device: Any  # None until there is a state

    def keep(self, recurrent: Tensor, conv: Tensor | None = None) -> None:
        """Hold these states, which are new tensors, from now on."""
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
    """The layer of a cache that has the state of a model's layer `index`, for which transformers meant another."""
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    if not isinstance(cache.layers[index], RecurrentLayer):
        cache.layers[index] = RecurrentLayer()
    return cache.layers[index]


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
        cache.layers.append(RecurrentLayer() if len(cache.layers) == index else DynamicLayer())
    return cache.layers[index]
