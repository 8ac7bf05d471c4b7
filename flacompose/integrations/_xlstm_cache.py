"""The cache of xLSTM with rows that beam search can reorder. It needs transformers to be imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.xlstm.modeling_xlstm import xLSTMCache


class BeamCache(xLSTMCache):
    """With states of the sizes of the layers, and with the method that beam search asks of a cache."""

    def __init__(self, model: Any, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        # Without rows: transformers rounds the sizes of all heads together up to multiples of 64.
        super().__init__(model.config, 0, dtype, device)
        heads, layer = model.config.num_heads, model.blocks[0].mlstm_layer
        K, V = layer.qk_dim // heads, layer.v_dim // heads
        self.rnn_state = {
            i: tuple(
                torch.zeros(batch, heads, *sizes, dtype=dtype, device=device)
                for sizes in ((K, V), (K,), (1,))
            )
            for i in range(len(model.blocks))
        }

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.rnn_state = {
            layer: (C[beam_idx], n[beam_idx], m[beam_idx]) for layer, (C, n, m) in self.rnn_state.items()
        }
