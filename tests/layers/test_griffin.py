"""The recurrent block of Griffin."""

from __future__ import annotations

import pytest
import torch
from helpers.truth import assert_close

from flacompose.layers import GriffinRecurrentBlock


def test_recurrent_gemma_of_transformers(device):
    """The parameters of RecurrentGemma in transformers load, and give what it gives, of a prompt and of tokens."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    modeling = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    config = transformers.RecurrentGemmaConfig(hidden_size=24, num_attention_heads=4, num_hidden_layers=3)
    theirs = modeling.RecurrentGemmaRecurrentBlock(config, layer_idx=0).to(device)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    ours = GriffinRecurrentBlock(hidden_size=24, num_heads=4).to(device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, state, start = torch.randn(2, 12, 24, device=device), None, 0
    with torch.no_grad():
        for piece in x.split([10, 1, 1], 1):
            position = torch.arange(start, start + piece.shape[1], device=device).expand(2, -1)
            expected, _ = theirs(piece, position, None, use_cache=True)
            y, state = ours(piece, state)
            assert_close(y, expected, 2e-5)
            assert_close(state.recurrent, theirs.rg_lru.recurrent_states, 2e-5)
            start += piece.shape[1]


def test_first_decays():
    layer = GriffinRecurrentBlock(hidden_size=2048, num_heads=4)
    decay = (-torch.nn.functional.softplus(layer.rg_lru.recurrent_param)).exp()
    assert 0.9 <= decay.min() < 0.905 and 0.998 < decay.max() <= 0.999
    assert abs(layer.rg_lru.input_gate_weight.std() * 512**0.5 - 1) < 0.02
