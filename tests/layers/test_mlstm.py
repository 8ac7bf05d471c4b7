"""The layer of mLSTM, beside that of transformers' xLSTM, whose weights it loads."""

from __future__ import annotations

import pytest
import torch
from helpers.truth import assert_close

from flacompose.layers import MLSTM


@pytest.mark.parametrize("use_bias", [False, True])
def test_weights_of_transformers(use_bias: bool) -> None:
    """With the same weights it gives the same outputs, and before training it has gates as they are there."""
    pytest.importorskip("transformers")
    from transformers.models.xlstm.modeling_xlstm import xLSTMConfig, xLSTMLayer

    # Training computes in the dtype of the inputs, in whole chunks.
    sizes = {"hidden_size": 32, "num_heads": 2, "use_bias": use_bias}
    given = {"num_hidden_layers": 1, "mode": "train", "chunk_size": 16, "norm_reduction_force_float32": False}
    theirs = xLSTMLayer(xLSTMConfig(**sizes, **given)).double()
    layer = MLSTM(**sizes, dtype=torch.float64)
    assert (layer.igate_preact.bias == -10).all() and not layer.igate_preact.weight.any()
    assert layer.fgate_preact.bias.tolist() == [3, 6]
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 48, 32, dtype=torch.float64)
    assert_close(layer(x)[0], theirs(x)[0], 1e-11)
