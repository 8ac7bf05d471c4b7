"""Lightning attention: its rates of decay."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from contract.graphs import recorded

from flacompose.ops import chunk_lightning_attn, fused_recurrent_lightning_attn

each_form = pytest.mark.parametrize("form", [chunk_lightning_attn, fused_recurrent_lightning_attn])


def rates(form, H: int, layer_idx: int, num_layers: int, decay: str, device: torch.device) -> torch.Tensor:
    """The rate of each head, from what one token leaves of a state of 1."""
    q = torch.zeros(1, 1, H, 1, dtype=torch.float64, device=device)
    state = torch.ones(1, H, 1, 1, dtype=torch.float64, device=device)
    _, left = form(q, q, q, layer_idx, num_layers, initial_state=state, output_final_state=True, decay=decay)
    return -left.flatten().log()


exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


@each_form
@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 24), (7, 24), (23, 24)])
@pytest.mark.parametrize("H", [1, 8, 12])
def test_rates_of_transnormerllm(form, H: int, layer: int, layers: int, device: torch.device) -> None:
    h = torch.arange(H, dtype=torch.float64, device=device)
    exact(rates(form, H, layer, layers, "tnl", device), 8 / H * (1 - layer / layers) * h)


@each_form
@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 24), (7, 24), (23, 24)])
@pytest.mark.parametrize("H", [1, 8, 12])
def test_rates_of_minimax(form, H: int, layer: int, layers: int, device: torch.device) -> None:
    expected = [2 ** (-8 * (h + 1) / H) * (1 - layer / (layers - 1 + 1e-5) + 1e-5) for h in range(H)]
    expected = torch.tensor(expected, dtype=torch.float64, device=device)
    exact(rates(form, H, layer, layers, "minimax", device), expected)


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_rates_of_the_checkpoints_of_minimax(layer: int, device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = modeling.MiniMaxConfig(
        vocab_size=8, hidden_size=48, intermediate_size=8, num_hidden_layers=6, num_attention_heads=12,
        num_key_value_heads=12, head_dim=4,
    )  # fmt: skip
    slopes = modeling.MiniMaxLightningAttention(config, layer).get_slope_rate().flatten()
    actual = rates(chunk_lightning_attn, 12, layer, 6, "minimax", device)
    torch.testing.assert_close(actual, slopes.to(device).double(), rtol=1e-6, atol=1e-12)


@each_form
def test_tnl_is_the_default(form, device: torch.device) -> None:
    q, k, v = torch.randn(3, 1, 20, 8, 8, device=device)
    o, _ = form(q, k, v, 1, 4)
    assert torch.equal(o, form(q, k, v, 1, 4, decay="tnl")[0])
    assert not torch.equal(o, form(q, k, v, 1, 4, decay="minimax")[0])


WRONG = [
    ({"layer_idx": 4}, ValueError, "layer_idx must be from 0 to num_layers - 1 = 3, got 4"),
    ({"layer_idx": -1}, ValueError, "layer_idx must be from 0 to num_layers - 1 = 3, got -1"),
    ({"layer_idx": 1.0}, TypeError, "layer_idx must be an int, got float"),
    ({"layer_idx": True}, TypeError, "layer_idx must be an int, got bool"),
    ({"num_layers": math.nan}, TypeError, "num_layers must be an int, got float"),
    ({"decay": "alibi"}, ValueError, "decay must be 'tnl' or 'minimax', got 'alibi'"),
]


@each_form
@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_errors(form, wrong: dict, error: type[Exception], message: str, device: torch.device) -> None:
    q = torch.randn(1, 3, 2, 4, device=device)
    arguments = {"layer_idx": 1, "num_layers": 4, **wrong}
    with recorded() as calls, pytest.raises(error, match=f"^{re.escape(message)}$"):
        form(q, q, q, **arguments)
    assert not calls
