"""The cache of xLSTM with rows that beam search can reorder. It needs transformers to be imported."""

from __future__ import annotations

from torch import Tensor
from transformers.models.xlstm.modeling_xlstm import xLSTMCache


class BeamCache(xLSTMCache):
    """With the method that beam search asks of a cache, and that of transformers lacks."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.rnn_state = {
            layer: (C[beam_idx], n[beam_idx], m[beam_idx]) for layer, (C, n, m) in self.rnn_state.items()
        }
