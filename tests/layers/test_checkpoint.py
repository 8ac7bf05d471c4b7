"""Names, shapes, dtypes and first values of parameters are those of flash-linear-attention 0.6.0."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

from flacompose.layers import GatedLinearAttention, RMSNorm, ShortConvolution

# As GatedLinearAttention(hidden_size=64, num_heads=4, **config).state_dict() of the peer lists them.
PROJECTIONS = {
    "q_proj.weight": (32, 64),
    "k_proj.weight": (32, 64),
    "v_proj.weight": (64, 64),
    "g_proj.weight": (64, 64),
}
DECAY = {"gk_proj.0.weight": (16, 64), "gk_proj.1.weight": (32, 16), "gk_proj.1.bias": (32,)}
OUTPUT = {"o_proj.weight": (64, 64)}
FUSED = {"g_norm_swish_gate.weight": (16,)}
NORM = {"g_norm.weight": (16,)}

CHECKPOINTS = [
    pytest.param({}, PROJECTIONS | DECAY | OUTPUT | FUSED, id="defaults"),
    pytest.param(
        {"use_short_conv": True, "conv_bias": True, "conv_size": 3},
        PROJECTIONS
        | {"q_conv1d.weight": (32, 1, 3), "q_conv1d.bias": (32,)}
        | {"k_conv1d.weight": (32, 1, 3), "k_conv1d.bias": (32,)}
        | {"v_conv1d.weight": (64, 1, 3), "v_conv1d.bias": (64,)}
        | DECAY
        | OUTPUT
        | FUSED,
        id="conv",
    ),
    pytest.param(
        {"num_kv_heads": 2, "use_short_conv": True},
        {
            "q_proj.weight": (32, 64),
            "k_proj.weight": (16, 64),
            "v_proj.weight": (32, 64),
            "g_proj.weight": (64, 64),
            "q_conv1d.weight": (32, 1, 4),
            "k_conv1d.weight": (16, 1, 4),
            "v_conv1d.weight": (32, 1, 4),
            "gk_proj.0.weight": (16, 64),
            "gk_proj.1.weight": (16, 16),
            "gk_proj.1.bias": (16,),
        }
        | OUTPUT
        | FUSED,
        id="grouped",
    ),
    pytest.param(
        {"use_output_gate": False},
        {name: shape for name, shape in PROJECTIONS.items() if name != "g_proj.weight"}
        | DECAY
        | OUTPUT
        | NORM,
        id="no gate",
    ),
    pytest.param({"fuse_norm": False}, PROJECTIONS | DECAY | OUTPUT | NORM, id="norm apart"),
    pytest.param({"gate_fn": "silu"}, PROJECTIONS | DECAY | OUTPUT | NORM, id="silu is not swish"),
    pytest.param({"elementwise_affine": False}, PROJECTIONS | DECAY | OUTPUT, id="no affine"),
    pytest.param(
        {"expand_k": 1.0, "expand_v": 2.0, "gate_low_rank_dim": 5},
        {
            "q_proj.weight": (64, 64),
            "k_proj.weight": (64, 64),
            "v_proj.weight": (128, 64),
            "g_proj.weight": (128, 64),
            "gk_proj.0.weight": (5, 64),
            "gk_proj.1.weight": (64, 5),
            "gk_proj.1.bias": (64,),
            "o_proj.weight": (64, 128),
            "g_norm_swish_gate.weight": (32,),
        },
        id="sizes",
    ),
]


@pytest.mark.parametrize(("config", "expected"), CHECKPOINTS)
def test_names_and_shapes(config, expected):
    with torch.device("meta"):
        layer = GatedLinearAttention(hidden_size=64, num_heads=4, **config)
    parameters = layer.state_dict()
    assert [(name, tuple(x.shape)) for name, x in parameters.items()] == list(expected.items())
    assert all(x.is_meta for x in parameters.values())
    checkpoint = {name: torch.randn(shape) for name, shape in expected.items()}
    layer = GatedLinearAttention(hidden_size=64, num_heads=4, **config)
    layer.load_state_dict(checkpoint)
    assert all(torch.equal(x, checkpoint[name]) for name, x in layer.state_dict().items())


def test_arguments():
    """Names, order and defaults: those of the peer."""
    arguments = inspect.signature(GatedLinearAttention).parameters
    assert {name: a.default for name, a in arguments.items()} == {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "num_heads": 4,
        "num_kv_heads": None,
        "feature_map": None,
        "use_short_conv": False,
        "conv_size": 4,
        "conv_bias": False,
        "use_output_gate": True,
        "gate_fn": "swish",
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "gate_logit_normalizer": 16,
        "gate_low_rank_dim": 16,
        "clamp_min": None,
        "fuse_norm": True,
        "layer_idx": None,
    }


def test_first_values():
    """Those of `nn.Linear`, `nn.Conv1d` and ones, drawn in the order of the parameters."""
    torch.manual_seed(3)
    conv = ShortConvolution(8, 4, bias=True)
    torch.manual_seed(3)
    expected = torch.nn.Conv1d(8, 8, 4, groups=8)
    assert torch.equal(conv.weight, expected.weight)
    assert torch.equal(conv.bias, expected.bias)
    assert torch.equal(RMSNorm(8).weight, torch.ones(8))


def test_dtypes():
    """A norm apart from its gate keeps its weight in float32; all else follows the default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = GatedLinearAttention(hidden_size=64, fuse_norm=False, use_short_conv=True)
        fused = GatedLinearAttention(hidden_size=64)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.g_norm.weight.dtype == torch.float32
    assert fused.g_norm_swish_gate.weight.dtype == torch.bfloat16
    assert layer.q_proj.weight.dtype == layer.q_conv1d.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["relu", "sigmoid", "logsigmoid", "silu", "swish", "sqrelu", "gelu"])
def test_pickles(name):
    layer = GatedLinearAttention(
        hidden_size=16, num_heads=2, gate_fn=name, feature_map=name, use_short_conv=True
    )
    x = torch.randn(1, 3, 16)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], layer(x)[0])


def test_materialised_from_meta():
    """The way sharded training builds a model: on meta, then memory, then every module's own first values."""
    with torch.device("meta"):
        layer = GatedLinearAttention(hidden_size=16, num_heads=2, use_short_conv=True, conv_bias=True)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fused_chunk"}, "mode 'fused_chunk' is no op of its own"),
        ({"mode": "parallel"}, "mode must be 'chunk' or 'fused_recurrent', got 'parallel'"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
        (
            {"expand_k": 0.3},
            "hidden_size \\* expand_k must be a positive multiple of num_heads = 4, got 19.2",
        ),
        (
            {"expand_v": 0.03125},
            "hidden_size \\* expand_v must be a positive multiple of num_heads = 4, got 2.0",
        ),
        ({"feature_map": "elu"}, "feature_map must be one of relu, .*, got 'elu'"),
        ({"gate_fn": "bias_gelu"}, "gate_fn must be one of .*, got 'bias_gelu' \\(bias_gelu takes a bias"),
        ({"gate_logit_normalizer": 0}, "gate_logit_normalizer must be positive, got 0"),
        ({"clamp_min": 0.5}, "clamp_min must be at most 0, as log-decays are, got 0.5"),
        ({"use_short_conv": True, "conv_size": 0}, "kernel_size must be at least 1, got 0"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GatedLinearAttention(hidden_size=64, num_heads=4, **arguments)


def test_unknown_arguments():
    with pytest.raises(TypeError, match="use_cache"):
        GatedLinearAttention(hidden_size=64, use_cache=True)
