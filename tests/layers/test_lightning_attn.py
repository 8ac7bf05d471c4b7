"""The layer of lightning attention."""

from __future__ import annotations

import math
import re

import pytest
import torch

from flacompose.layers import LightningAttention, RecurrentState

from . import laws
from .truth import ACTIVATIONS, assert_close, random_state, tensors

BASE = {"hidden_size": 24, "num_heads": 4, "layer_idx": 1, "num_layers": 3}
TNL = BASE | {"decay": "tnl", "head_dim": 5, "hidden_act": "gelu", "norm_eps": 0.1}
CONFIGS = [BASE, TNL, BASE | {"mode": "fused_recurrent"}, BASE | {"layer_idx": 0, "num_layers": 1}]


def truth_of(layer, config):
    H, D = layer.num_heads, layer.head_dim
    depth, L = config["layer_idx"], config["num_layers"]
    act, eps = ACTIVATIONS[config.get("hidden_act", "silu")], config.get("norm_eps", 1e-6)
    if config.get("decay", "minimax") == "tnl":
        rates = [8 * h / H * (1 - depth / L) for h in range(H)]
    else:
        rates = [2 ** (-8 * (h + 1) / H) * (1 - depth / (L - 1 + 1e-5) + 1e-5) for h in range(H)]
    decay = (-torch.tensor(rates, dtype=torch.float64)).exp()[:, None, None]

    def truth(p, x, state):
        S, out = state.recurrent[0], []
        for token in x:
            qkv = act(p["qkv_proj.weight"] @ token)
            q, k, v = (qkv[i * D :].unfold(0, D, 3 * D) for i in range(3))  # [H, D], a head's side by side
            S = decay * S + k[:, :, None] * v[:, None]
            o = (S * q[:, :, None]).sum(1).flatten()
            o = o / (o.square().mean() + eps).sqrt() * p["norm.weight"]
            o = o / (1 + (-p["output_gate.weight"] @ token).exp())
            out.append(p["out_proj.weight"] @ o)
        return torch.stack(out), RecurrentState(S[None])

    return truth


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(config, dtype, device):
    layer = laws.perturbed(LightningAttention(**config), device, dtype)
    laws.check_values(layer, truth_of(layer, config))


@pytest.mark.parametrize("config", [BASE, TNL], ids=str)
def test_split(config, device):
    laws.check_split(laws.perturbed(LightningAttention(**config), device))


@pytest.mark.parametrize("config", [BASE, TNL, BASE | {"mode": "fused_recurrent"}], ids=str)
def test_padding(config, device):
    layer = laws.perturbed(LightningAttention(**config), device)
    laws.check_padding(layer, truth_of(layer, config))


def test_padding_gradients(device):
    laws.check_padding_gradients(laws.perturbed(LightningAttention(**BASE), device))


@pytest.mark.parametrize("config", [BASE, TNL], ids=str)
def test_packed(config, device):
    layer = laws.perturbed(LightningAttention(**config), device)
    laws.check_packed(layer, truth_of(layer, config))


def test_gradients():
    laws.check_gradients(laws.perturbed(LightningAttention(**TNL), torch.device("cpu")))


@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
def test_bfloat16(autocast, device):
    # Projections, an activation, a norm and a gate on the way, each rounded to 8 bits.
    laws.check_bfloat16(laws.perturbed(LightningAttention(**BASE), device, torch.float32), autocast, 2e-2)


def test_compiled_decoding(device):
    laws.check_compiled_decoding(laws.perturbed(LightningAttention(**BASE), device, torch.float32))


def test_export(device, tmp_path):
    layer = laws.perturbed(LightningAttention(**BASE), device)
    laws.check_exported(layer, "scalar_decay_chunk", tmp_path / "layer.pt2")


def test_minimax_of_transformers(device):
    """Its parameters load, and give what it gives, of a prompt and of what follows."""
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


def test_state(device):
    layer = LightningAttention(**BASE).to(device)
    (state,) = tensors(layer.init_state(3))
    assert state.shape == (3, 4, 6, 6)
    assert state.dtype == torch.float32
    assert not state.any()
    assert layer.double().init_state(1).recurrent.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "parallel"}, "mode must be 'chunk' or 'fused_recurrent', got 'parallel'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": 5}, "hidden_size must be a multiple of num_heads = 5 without a head_dim, got 24"),
        ({"head_dim": 257}, "head_dim must be from 1 to 256, got 257"),
        ({"layer_idx": 3}, "layer_idx must be from 0 to num_layers - 1 = 2, got 3"),
        ({"decay": "retnet"}, "decay must be 'tnl' or 'minimax', got 'retnet'"),
        ({"norm_eps": math.nan}, "norm_eps must be at least 0, got nan"),
        ({"hidden_act": "elu"}, "hidden_act must be one of relu"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LightningAttention(**BASE | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 24.0}, "hidden_size must be an int, got float"),
        ({"num_heads": 4.0}, "num_heads must be an int, got float"),
        ({"head_dim": 6.0}, "head_dim must be an int, got float"),
        ({"layer_idx": 0.5}, "layer_idx must be an int, got float"),
        ({"layer_idx": "0"}, "layer_idx must be an int, got str"),
        ({"num_layers": 2.5}, "num_layers must be an int, got float"),
        ({"norm_eps": None}, "norm_eps must be a number, got NoneType"),
    ],
)
def test_refused_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        LightningAttention(**BASE | arguments)


def test_refused_inputs():
    layer = LightningAttention(**BASE)
    x = torch.ones(2, 5, 24)
    with pytest.raises(ValueError, match=r"hidden_states must have shape \(B, T, 24\), got \(2, 24\)"):
        layer(x[:, 0])
    with pytest.raises(ValueError, match=r"state.recurrent must have shape \(2, 4, 6, 6\), got \(3, "):
        layer(x, random_state(layer, 3))
    with pytest.raises(ValueError, match="state.conv must hold 0 tensors, got 1"):
        layer(x, RecurrentState(random_state(layer, 2).recurrent, (x,)))
