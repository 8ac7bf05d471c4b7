"""The layer of lightning attention."""

from __future__ import annotations

import pytest
import torch
from helpers.truth import assert_close

from flacompose.layers import LightningAttention


def test_minimax_of_transformers(device):
    """The parameters of MiniMax in transformers load, and give what it gives, of a prompt and of what follows."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = transformers.MiniMaxConfig(
        hidden_size=24, num_attention_heads=4, head_dim=8, num_hidden_layers=4, block_size=32
    )
    theirs = modeling.MiniMaxLightningAttention(config, layer_idx=1)
    theirs = theirs.to(device)
    ours = LightningAttention(hidden_size=24, num_heads=4, head_dim=8, layer_idx=1, num_layers=4).to(device)
    ours.load_state_dict(dict(theirs.named_parameters()))
    x = torch.randn(2, 75, 24, device=device)
    cache, state = modeling.MiniMaxCache(), None
    with torch.no_grad():
        for piece in x.split([70, 1, 4], 1):
            expected, after = theirs(piece, None, None, cache)
            y, state = ours(piece, state)
            assert_close(y, expected, 2e-5)
            assert_close(state.recurrent, after, 2e-5)
