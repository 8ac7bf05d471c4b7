"""The layer of Mamba-2."""

from __future__ import annotations

import math
import re

import pytest
import torch

from flacompose.layers import Mamba2, RecurrentState

from . import laws
from .truth import ACTIVATIONS, random_state, tensors

BASE = {"hidden_size": 24, "head_dim": 8, "state_size": 5}
GROUPED = BASE | {"n_groups": 3, "conv_kernel": 3, "use_bias": True}
CONFIGS = [
    BASE,
    GROUPED,
    BASE | {"norm_before_gate": True, "D_has_hdim": True, "n_groups": 2, "norm_eps": 0.1},
    BASE | {"rmsnorm": False, "use_conv_bias": False, "conv_kernel": 1, "expand": 1},
    BASE | {"dt_limit": (0.4, 0.9)},
    BASE | {"hidden_act": "gelu"},
]


def truth_of(layer, config):
    H, P, S = layer.num_heads, config["head_dim"], config["state_size"]
    G, eps = config.get("n_groups", 1), config.get("norm_eps", 1e-5)
    low, high = config.get("dt_limit", (0, math.inf))
    act, silu = ACTIVATIONS[config.get("hidden_act", "silu")], ACTIVATIONS["silu"]

    def norm(y, weight):
        y = [part / (part.square().mean() + eps).sqrt() for part in y.chunk(G)]
        return torch.cat(y) * weight

    def truth(p, u, state):
        D = p["D"].reshape(H, -1)
        h, window = state.recurrent[0], state.conv[0][0]
        out = []
        for token in u:
            z, xBC, dt = (p["in_proj.weight"] @ token + p.get("in_proj.bias", 0)).split(
                [H * P, H * P + 2 * G * S, H]
            )
            window = torch.cat([window[:, 1:], xBC[:, None]], 1)
            xBC = act((window * p["conv1d.weight"][:, 0]).sum(1) + p.get("conv1d.bias", 0))
            x, B, C = xBC.split([H * P, G * S, G * S])
            x = x.reshape(H, P)
            B, C = (torch.stack([y.chunk(G)[i * G // H] for i in range(H)]) for y in (B, C))  # [H, S]
            dt = (1 + (dt + p["dt_bias"]).exp()).log().clamp(low, high)
            decay = (-dt * p["A_log"].exp()).exp()
            h = decay[:, None, None] * h + dt[:, None, None] * B[:, :, None] * x[:, None]
            y = ((h * C[:, :, None]).sum(1) + D * x).flatten()
            if not config.get("rmsnorm", True):
                y = y * silu(z)
            elif config.get("norm_before_gate"):
                y = norm(y, p["norm.weight"]) * silu(z)
            else:
                y = norm(y * silu(z), p["norm.weight"])
            out.append(p["out_proj.weight"] @ y + p.get("out_proj.bias", 0))
        return torch.stack(out), RecurrentState(h[None], (window[None],))

    return truth


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(config, dtype, device):
    layer = laws.perturbed(Mamba2(**config), device, dtype)
    laws.check_values(layer, truth_of(layer, config))


@pytest.mark.parametrize("config", [BASE, GROUPED], ids=str)
def test_split(config, device):
    laws.check_split(laws.perturbed(Mamba2(**config), device))


@pytest.mark.parametrize("config", [BASE, GROUPED | {"dt_limit": (0.4, 0.9)}], ids=str)
def test_padding(config, device):
    """A least time step is none of a pad's."""
    layer = laws.perturbed(Mamba2(**config), device)
    laws.check_padding(layer, truth_of(layer, config))


def test_padding_gradients(device):
    laws.check_padding_gradients(laws.perturbed(Mamba2(**GROUPED), device))


@pytest.mark.parametrize("config", [BASE, GROUPED], ids=str)
def test_packed(config, device):
    layer = laws.perturbed(Mamba2(**config), device)
    laws.check_packed(layer, truth_of(layer, config))


@pytest.mark.parametrize("config", [GROUPED, BASE | {"norm_before_gate": True, "D_has_hdim": True}], ids=str)
def test_gradients(config):
    laws.check_gradients(laws.perturbed(Mamba2(**config), torch.device("cpu")))


@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
def test_bfloat16(autocast, device):
    # Two projections, a convolution and an activation on the way, each rounded to 8 bits.
    laws.check_bfloat16(laws.perturbed(Mamba2(**BASE), device, torch.float32), autocast, 2e-2)


def test_compiled_decoding(device):
    laws.check_compiled_decoding(laws.perturbed(Mamba2(**BASE), device, torch.float32))


def test_export(device, tmp_path):
    layer = laws.perturbed(Mamba2(**GROUPED), device)
    laws.check_exported(layer, "scalar_decay_chunk", tmp_path / "layer.pt2")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {},
            {
                "dt_bias": (6,),
                "A_log": (6,),
                "D": (6,),
                "conv1d.weight": (58, 1, 4),
                "conv1d.bias": (58,),
                "in_proj.weight": (112, 24),
                "norm.weight": (48,),
                "out_proj.weight": (24, 48),
            },
        ),
        (
            {"n_groups": 2, "use_bias": True, "use_conv_bias": False, "rmsnorm": False, "D_has_hdim": True},
            {
                "dt_bias": (6,),
                "A_log": (6,),
                "D": (48,),
                "conv1d.weight": (68, 1, 4),
                "in_proj.weight": (122, 24),
                "in_proj.bias": (122,),
                "out_proj.weight": (24, 48),
                "out_proj.bias": (24,),
            },
        ),
    ],
    ids=["defaults", "options"],
)
def test_checkpoint(config, expected):
    """Names, order and shapes: as Mamba2(**BASE, **config).state_dict() of flash-linear-attention 0.6.0 has them."""
    with torch.device("meta"):
        layer = Mamba2(**BASE, **config)
    laws.check_names_and_shapes(layer, expected)
    checkpoint = {name: torch.randn(shape) for name, shape in expected.items()}
    layer = Mamba2(**BASE, **config)
    layer.load_state_dict(checkpoint)
    assert all(torch.equal(x, checkpoint[name]) for name, x in layer.state_dict().items())


def test_arguments():
    """Names, order and defaults: those of the peer, whose last is `backend`."""
    expected = {
        "num_heads": None,
        "head_dim": 64,
        "hidden_size": 2048,
        "state_size": 128,
        "expand": 2,
        "n_groups": 1,
        "conv_kernel": 4,
        "conv_init": None,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "A_init_range": (1, 16),
        "D_has_hdim": False,
        "rmsnorm": True,
        "norm_before_gate": False,
        "dt_min": 0.001,
        "dt_max": 0.1,
        "dt_init_floor": 1e-4,
        "dt_limit": (0.0, math.inf),
        "use_bias": False,
        "norm_eps": 1e-5,
        "chunk_size": 256,
        "layer_idx": None,
    }
    laws.check_arguments(Mamba2, expected)


def test_first_values():
    layer = Mamba2(hidden_size=2048, head_dim=8, dt_min=0.01, dt_max=0.5, A_init_range=(2, 5), conv_init=0.25)
    layer.requires_grad_(False)
    dt, A = torch.nn.functional.softplus(layer.dt_bias), layer.A_log.exp()
    for x, low, high in ((dt, 0.01, 0.5), (A, 2, 5), (layer.conv1d.weight, -0.25, 0.25)):
        slack = 1e-3 * abs(low)
        assert low - slack <= float(x.min()) < low + (high - low) / 20
        assert high - (high - low) / 20 < float(x.max()) <= high * 1.001
    # Uniform logarithms of steps, uniform rates.
    assert abs(float(dt.log().mean()) - math.log(0.01 * 0.5) / 2) < 0.2
    assert abs(float(A.mean()) - 3.5) < 0.2
    assert torch.equal(layer.D, torch.ones(512))
    assert layer.A_log.dtype == torch.float32
    layer = Mamba2(**BASE, dt_min=1e-9, dt_max=1e-8, dt_init_floor=1e-3)
    torch.testing.assert_close(torch.nn.functional.softplus(layer.dt_bias.detach()), torch.full((6,), 1e-3))


def test_materialised_from_meta():
    with torch.device("meta"):
        layer = Mamba2(**GROUPED, conv_init=0.01)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert layer.conv1d.weight.abs().max() <= 0.01
    assert layer.conv1d.weight.unique().numel() > 1


def test_state(device):
    """``[N, H, S, P]``, and the window of the convolution of x, B and C."""
    layer = laws.perturbed(Mamba2(**GROUPED), device, torch.float32)
    state = layer.init_state(3)
    assert [tuple(t.shape) for t in tensors(state)] == [(3, 6, 5, 8), (3, 78, 3)]
    assert {t.dtype for t in tensors(state)} == {torch.float32}
    assert [t.dtype for t in tensors(layer.bfloat16().init_state(1))] == [torch.float32, torch.bfloat16]


def test_refused_limit():
    with pytest.raises(TypeError, match="dt_limit must be a tuple of two bounds, got NoneType"):
        Mamba2(**BASE, dt_limit=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 257}, "head_dim must be from 1 to 256, got 257"),
        ({"state_size": 0}, "state_size must be from 1 to 256, got 0"),
        (
            {"head_dim": 7},
            "expand * hidden_size must be a positive multiple of head_dim = 7, got 48",
        ),
        ({"num_heads": 5}, "num_heads must be expand * hidden_size / head_dim = 6, got 5"),
        ({"n_groups": 4}, "n_groups must divide the 6 heads, got 4"),
        ({"A_init_range": (0, 1)}, "A_init_range must be two ascending bounds above 0, got (0, 1)"),
        ({"dt_min": 0.2}, "(dt_min, dt_max) must be two ascending bounds above 0, got (0.2, 0.1)"),
        ({"dt_init_floor": 0}, "dt_init_floor must be above 0, got 0"),
        ({"dt_limit": (-1, 1)}, "dt_limit must be two ascending bounds of at least 0, got (-1, 1)"),
        ({"norm_eps": math.nan}, "norm_eps must be at least 0, got nan"),
        ({"hidden_act": "elu"}, "hidden_act must be one of relu"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"conv_kernel": 0}, "conv_kernel must be at least 1, got 0"),
        ({"conv_init": -0.1}, "conv_init must be at least 0, got -0.1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"A_init_range": (1,)}, "A_init_range must be two ascending bounds above 0, got (1,)"),
        (
            {"expand": 1.3},
            "expand * hidden_size must be a positive multiple of head_dim = 8, got 31.2",
        ),
        (
            {"expand": math.nan},
            "expand * hidden_size must be a positive multiple of head_dim = 8, got nan",
        ),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Mamba2(**BASE | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 24.0}, "hidden_size must be an int, got float"),
        ({"num_heads": 6.0}, "num_heads must be an int, got float"),
        ({"head_dim": 8.0}, "head_dim must be an int, got float"),
        ({"head_dim": "8"}, "head_dim must be an int, got str"),
        ({"state_size": 8.0}, "state_size must be an int, got float"),
        ({"n_groups": 2.0}, "n_groups must be an int, got float"),
        ({"conv_kernel": "a"}, "conv_kernel must be an int, got str"),
        ({"conv_init": "a"}, "conv_init must be a number, got str"),
        ({"chunk_size": 64.0}, "chunk_size must be an int, got float"),
        ({"expand": "2"}, "expand must be a number, got str"),
        ({"A_init_range": 3}, "A_init_range must be a tuple of two bounds, got int"),
        ({"A_init_range": None}, "A_init_range must be a tuple of two bounds, got NoneType"),
        ({"A_init_range": (1, "a")}, "A_init_range[1] must be a number, got str"),
        ({"dt_min": None}, "dt_min must be a number, got NoneType"),
        ({"dt_max": "a"}, "dt_max must be a number, got str"),
        ({"dt_init_floor": None}, "dt_init_floor must be a number, got NoneType"),
        ({"norm_eps": None}, "norm_eps must be a number, got NoneType"),
    ],
)
def test_refused_types(arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Mamba2(**BASE | arguments)


def test_fractional_expand():
    layer = Mamba2(**BASE | {"expand": 4 / 3})
    assert (layer.intermediate_size, layer.num_heads) == (32, 4)
    assert layer(torch.ones(2, 5, 24))[0].shape == (2, 5, 24)


def test_refused_inputs():
    layer = Mamba2(**BASE)
    x = torch.ones(2, 5, 24)
    state = random_state(layer, 2)
    with pytest.raises(ValueError, match=r"hidden_states must have shape \(B, T, 24\), got \(2, 24\)"):
        layer(x[:, 0])
    with pytest.raises(TypeError, match="state must be a RecurrentState, got tuple"):
        layer(x, tuple(state))
    with pytest.raises(ValueError, match=r"state.recurrent must have shape \(3, 6, 5, 8\)"):
        layer(x[:1], state, cu_seqlens=torch.tensor([0, 2, 2, 5]))
    with pytest.raises(ValueError, match="state.conv must hold 1 tensors, got 0"):
        layer(x, RecurrentState(state.recurrent))
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens exclude each other"):
        layer(x[:1], attention_mask=torch.ones(1, 5).long(), cu_seqlens=torch.tensor([0, 5]))
