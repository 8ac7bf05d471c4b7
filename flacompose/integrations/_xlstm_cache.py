"""The cache of xLSTM with rows that beam search can reorder. It needs transformers to be imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.xlstm.modeling_xlstm import xLSTMCache


class BeamCache(xLSTMCache):
    """With states of the sizes of the layers, and with the method that beam search asks of a cache."""

    def __init__(self, model: Any, batch: int, dtype: torch.dtype, device: Any) -> None:
        # Without rows: transformers rounds the sizes of all heads together up to multiples of 64.
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
