"""The layers of the delta rule."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.truth import EVERY, assert_close, assert_true, build, row, tokens_of

from flacompose.layers import (
    Comba,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedRMSNorm,
    KimiDeltaAttention,
)


@pytest.mark.filterwarnings("ignore:queries and keys of num_heads")  # many heads, to draw many decays
@pytest.mark.parametrize(
    ("layer", "low"),
    [(GatedDeltaNet, 0), (GatedDeltaProduct, 0), (Comba, 0), (KimiDeltaAttention, 1), (GatedDeltaNet2, 1)],
)
def test_first_decays(layer, low):
    """Rates are uniform up to 16, logarithms of steps uniform; no rate is 0, and none is -inf in half precision."""
    torch.manual_seed(0)
    made = layer(hidden_size=2, num_heads=1024, head_dim=1, expand_v=1).requires_grad_(False)
    rate, dt = made.A_log.exp(), F.softplus(made.dt_bias)
    for x, least, most in ((rate, low, 16), (dt.log(), math.log(0.001), math.log(0.1))):
        # The mean of 1024 uniform numbers is off by less than 5 of its standard deviations, 0.05 of the range.
        assert least - 1e-3 <= float(x.min()) and float(x.max()) <= most + 1e-3
        assert abs(float(x.mean()) - (least + most) / 2) < 0.05 * (most - least)
    assert made.A_log.dtype == torch.float32
    half = layer(hidden_size=2, num_heads=1024, head_dim=1, expand_v=1, dtype=torch.bfloat16)
    assert half.A_log.isfinite().all() and half.dt_bias.isfinite().all()


def test_first_bounded_decays():
    """Rates of a safe gate are 1 at first."""
    layer = KimiDeltaAttention(hidden_size=2, num_heads=3, head_dim=1, safe_gate=True, lower_bound=-5)
    assert not layer.A_log.any() and layer.dt_bias.all()


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "gated_deltaproduct", "gdn2", "comba", "mamba2"])
def test_rates_that_overflow(name):
    """Their exponential is inf, also of heads whose softplus is 0."""
    config = EVERY[name]
    layer = build(config)
    layer.A_log.data[1:] = 100
    layer.dt_bias.data[layer.dt_bias.numel() // 2 :] = -200
    x = tokens_of(layer, 1, 5)
    y, state = layer(x)
    y.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    with torch.no_grad():
        assert_true(config, layer.state_dict(), x[0], row(layer.init_state(1), 0), y[0], row(state, 0))


@pytest.mark.parametrize("layer", [GatedDeltaNet, GatedDeltaProduct])
def test_default_sizes(layer):
    """The peer's default heads have 512 values."""
    layer = layer(device="meta")
    assert layer.head_v_dim == 512
    assert layer.init_state(2).recurrent.shape == (2, 6, 256, 512)


def test_parts_are_one_head():
    """The first part of each head is what a head of its values alone has in its state."""
    config = {"layer": GatedDeltaNet, "hidden_size": 24, "num_heads": 2, "head_dim": 4, "expand_v": 150}
    layer = build(config, dtype=torch.float64)
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    state = layer(x)[1]
    assert state.recurrent.shape == (1, 4, 4, 300)
    narrow = build(config | {"expand_v": 75}, dtype=torch.float64)
    narrow.load_state_dict(
        {
            name: value.unflatten(0, (2, 2, 300))[:, 0].flatten(0, 1)
            if name.startswith(("v_", "g_"))
            else value.new_ones(300)
            if name.startswith("o_norm")
            else value.new_zeros(24, 600)
            if name.startswith("o_proj")
            else value
            for name, value in layer.state_dict().items()
        }
    )
    assert_close(narrow(x)[1].recurrent, state.recurrent[:, ::2], 1e-11)


def test_one_step_a_token():
    """Gated DeltaProduct of one step is Gated DeltaNet, of the same parameters."""
    config = {"hidden_size": 24, "num_heads": 2, "head_dim": 6, "allow_neg_eigval": True}
    net = build({"layer": GatedDeltaNet} | config, dtype=torch.float64)
    product = build({"layer": GatedDeltaProduct, "num_householder": 1} | config, dtype=torch.float64)
    product.load_state_dict(net.state_dict())
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    for a, b in zip(product(x), net(x), strict=True):
        for s, t in zip(*((a, b) if isinstance(a, tuple) else ([a], [b])), strict=True):
            torch.testing.assert_close(s, t, rtol=0, atol=1e-12)


def test_first_values_of_comba():
    """The correction is what its argument says, and the inner decay lets a sigmoid of 1 through."""
    layer = Comba(hidden_size=2, num_heads=3, head_dim=1, correction_factor=0.02)
    assert layer.decay.tolist() == [1, 1, 1] and layer.D.tolist() == pytest.approx([0.02] * 3)


def test_gate_of_the_norm():
    """A gated norm multiplies by silu or by the sigmoid, and refuses other activations."""
    x, g = torch.randn(2, 3, 8)
    for name, gate in (("silu", F.silu), ("swish", F.silu), ("sigmoid", torch.sigmoid)):
        assert_close(GatedRMSNorm(8, activation=name)(x, g), F.rms_norm(x, (8,), eps=1e-5) * gate(g), 1e-6)
    with pytest.raises(ValueError, match="activation must be one of silu, swish, sigmoid, got 'gelu'"):
        GatedRMSNorm(8, activation="gelu")
