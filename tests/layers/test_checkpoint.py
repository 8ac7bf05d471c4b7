"""Names, shapes, dtypes and first values of parameters are those of flash-linear-attention 0.6.0."""

from __future__ import annotations

import pickle

import pytest
import torch

from flacompose.layers import (
    GatedLinearAttention,
    LinearAttention,
    MultiScaleRetention,
    RMSNorm,
    ShortConvolution,
    SimpleGatedLinearAttention,
)
from flacompose.layers.feature_map import HedgehogFeatureMap

from . import laws

# As Layer(hidden_size=64, num_heads=4, **config).state_dict() of the peer lists them.
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
    pytest.param(GatedLinearAttention, {}, PROJECTIONS | DECAY | OUTPUT | FUSED, id="defaults"),
    pytest.param(
        GatedLinearAttention,
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
        GatedLinearAttention,
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
        GatedLinearAttention,
        {"use_output_gate": False},
        {name: shape for name, shape in PROJECTIONS.items() if name != "g_proj.weight"}
        | DECAY
        | OUTPUT
        | NORM,
        id="no gate",
    ),
    pytest.param(
        GatedLinearAttention, {"fuse_norm": False}, PROJECTIONS | DECAY | OUTPUT | NORM, id="norm apart"
    ),
    pytest.param(
        GatedLinearAttention, {"gate_fn": "silu"}, PROJECTIONS | DECAY | OUTPUT | NORM, id="silu is not swish"
    ),
    pytest.param(
        GatedLinearAttention, {"elementwise_affine": False}, PROJECTIONS | DECAY | OUTPUT, id="no affine"
    ),
    pytest.param(
        GatedLinearAttention,
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
    pytest.param(
        SimpleGatedLinearAttention,
        {},
        {
            "q_proj.weight": (64, 64),
            "k_proj.weight": (64, 64),
            "v_proj.weight": (64, 64),
            "g_proj.weight": (64, 64),
            "q_conv1d.weight": (64, 1, 4),
            "k_conv1d.weight": (64, 1, 4),
            "v_conv1d.weight": (64, 1, 4),
            "gk_proj.weight": (4, 64),
            "gk_proj.bias": (4,),
            "g_norm_swish_gate.weight": (16,),
            "o_proj.weight": (64, 64),
        },
        id="simple defaults",
    ),
    pytest.param(
        SimpleGatedLinearAttention,
        {"num_kv_heads": 2, "expand_k": 0.5, "conv_bias": True, "conv_size": 3, "fuse_norm": False},
        {
            "q_proj.weight": (32, 64),
            "k_proj.weight": (16, 64),
            "v_proj.weight": (32, 64),
            "g_proj.weight": (64, 64),
            "q_conv1d.weight": (32, 1, 3),
            "q_conv1d.bias": (32,),
            "k_conv1d.weight": (16, 1, 3),
            "k_conv1d.bias": (16,),
            "v_conv1d.weight": (32, 1, 3),
            "v_conv1d.bias": (32,),
            "gk_proj.weight": (4, 64),
            "gk_proj.bias": (4,),
            "g_norm.weight": (16,),
            "o_proj.weight": (64, 64),
        },
        id="simple grouped",
    ),
    pytest.param(
        LinearAttention,
        {},
        {
            "feature_map_q.layer1.weight": (16, 16),
            "feature_map_q.layer1.bias": (16,),
            "feature_map_q.layer2.weight": (16, 16),
            "feature_map_q.layer2.bias": (16,),
            "feature_map_k.layer1.weight": (16, 16),
            "feature_map_k.layer1.bias": (16,),
            "feature_map_k.layer2.weight": (16, 16),
            "feature_map_k.layer2.bias": (16,),
            "q_proj.weight": (64, 64),
            "k_proj.weight": (64, 64),
            "v_proj.weight": (64, 64),
            "norm.weight": (16,),
            "o_proj.weight": (64, 64),
        },
        id="linear defaults",
    ),
    pytest.param(
        LinearAttention,
        {"feature_map": "hedgehog", "tie_feature_map_qk": True, "num_kv_heads": 2, "output_norm": "identity"},
        {
            "feature_map_q.layer.weight": (16, 16),
            "feature_map_q.layer.bias": (16,),
            "feature_map_k.layer.weight": (16, 16),
            "feature_map_k.layer.bias": (16,),
            "q_proj.weight": (64, 64),
            "k_proj.weight": (32, 64),
            "v_proj.weight": (32, 64),
            "o_proj.weight": (64, 64),
        },
        id="hedgehog",
    ),
    pytest.param(
        LinearAttention,
        {"feature_map": "t2r", "expand_k": 0.5, "elementwise_affine": False},
        {
            "feature_map_q.layer.weight": (8, 8),
            "feature_map_k.layer.weight": (8, 8),
            "q_proj.weight": (32, 64),
            "k_proj.weight": (32, 64),
            "v_proj.weight": (64, 64),
            "o_proj.weight": (64, 64),
        },
        id="t2r",
    ),
    *(
        pytest.param(
            LinearAttention,
            {"feature_map": name},
            {
                "q_proj.weight": (64, 64),
                "k_proj.weight": (64, 64),
                "v_proj.weight": (64, 64),
                "norm.weight": (16,),
                "o_proj.weight": (64, 64),
            },
            id=name,
        )
        for name in ("dpfp", "elu", "relu", "identity")
    ),
    pytest.param(
        MultiScaleRetention,
        {},
        {
            "q_proj.weight": (64, 64),
            "k_proj.weight": (64, 64),
            "v_proj.weight": (128, 64),
            "g_proj.weight": (128, 64),
            "o_proj.weight": (64, 128),
            "g_norm_swish_gate.weight": (32,),
        },
        id="retention defaults",
    ),
    pytest.param(
        MultiScaleRetention,
        {"num_kv_heads": 2, "use_short_conv": True, "use_output_gate": False},
        {
            "q_proj.weight": (64, 64),
            "k_proj.weight": (32, 64),
            "v_proj.weight": (64, 64),
            "q_conv1d.weight": (64, 1, 4),
            "k_conv1d.weight": (32, 1, 4),
            "v_conv1d.weight": (64, 1, 4),
            "o_proj.weight": (64, 128),
            "g_norm.weight": (32,),
        },
        id="retention grouped",
    ),
]


@pytest.mark.parametrize(("layer_type", "config", "expected"), CHECKPOINTS)
def test_names_and_shapes(layer_type, config, expected):
    with torch.device("meta"):
        layer = layer_type(hidden_size=64, num_heads=4, **config)
    laws.check_names_and_shapes(layer, expected)
    checkpoint = {name: torch.randn(shape) for name, shape in expected.items()}
    if config.get("tie_feature_map_qk"):
        checkpoint |= {name: checkpoint[name.replace("map_k", "map_q")] for name in checkpoint}
    layer = layer_type(hidden_size=64, num_heads=4, **config)
    layer.load_state_dict(checkpoint)
    assert all(torch.equal(x, checkpoint[name]) for name, x in layer.state_dict().items())


ARGUMENTS = {
    GatedLinearAttention: {
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
    },
    SimpleGatedLinearAttention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_heads": 4,
        "num_kv_heads": None,
        "feature_map": None,
        "use_short_conv": True,
        "conv_size": 4,
        "conv_bias": False,
        "gate_fn": "swish",
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "gate_logit_normalizer": 16,
        "fuse_norm": True,
        "layer_idx": None,
    },
    LinearAttention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_heads": 8,
        "num_kv_heads": None,
        "feature_map": "elementwise_product",
        "tie_feature_map_qk": False,
        "output_norm": "rmsnorm",
        "norm_q": False,
        "norm_k": False,
        "do_feature_map_norm": False,
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "layer_idx": None,
    },
    MultiScaleRetention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 1.0,
        "expand_v": 2.0,
        "num_heads": 8,
        "num_kv_heads": None,
        "feature_map": None,
        "use_short_conv": False,
        "conv_size": 4,
        "conv_bias": False,
        "use_output_gate": True,
        "gate_fn": "swish",
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "fuse_norm": True,
        "layer_idx": None,
    },
}


@pytest.mark.parametrize("layer_type", ARGUMENTS)
def test_arguments(layer_type):
    """Those of the peer."""
    laws.check_arguments(layer_type, ARGUMENTS[layer_type])


def test_first_values():
    """Those of `nn.Linear`, `nn.Conv1d` and ones, drawn in the order of the parameters."""
    torch.manual_seed(3)
    conv = ShortConvolution(8, 4, bias=True)
    torch.manual_seed(3)
    expected = torch.nn.Conv1d(8, 8, 4, groups=8)
    assert torch.equal(conv.weight, expected.weight)
    assert torch.equal(conv.bias, expected.bias)
    assert torch.equal(RMSNorm(8).weight, torch.ones(8))
    hedgehog = HedgehogFeatureMap(4)
    assert torch.equal(hedgehog.layer.weight, torch.eye(4))
    assert not hedgehog.layer.bias.any()


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


@pytest.mark.parametrize(
    ("layer_type", "config"),
    [
        (GatedLinearAttention, {"use_short_conv": True, "conv_bias": True}),
        (SimpleGatedLinearAttention, {"conv_bias": True}),
        *((LinearAttention, {"feature_map": name}) for name in ("hedgehog", "t2r", "elementwise_product")),
        (MultiScaleRetention, {}),
    ],
    ids=str,
)
def test_materialised_from_meta(layer_type, config):
    """The way sharded training builds a model: on meta, then memory, then every module's own first values."""
    with torch.device("meta"):
        layer = layer_type(hidden_size=16, num_heads=2, **config)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    if config.get("feature_map") == "hedgehog":
        assert torch.equal(layer.feature_map_k.layer.weight, torch.eye(8))
    assert layer(torch.randn(1, 3, 16))[0].isfinite().all()


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
        ({"use_short_conv": True, "conv_size": 0}, "conv_size must be at least 1, got 0"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GatedLinearAttention(hidden_size=64, num_heads=4, **arguments)


@pytest.mark.parametrize(
    ("layer_type", "arguments", "message"),
    [
        (SimpleGatedLinearAttention, {"mode": "fused_chunk"}, "mode 'fused_chunk' is no op of its own"),
        (
            SimpleGatedLinearAttention,
            {"gate_logit_normalizer": -1},
            "gate_logit_normalizer must be positive, got -1",
        ),
        (LinearAttention, {"mode": "fused_chunk"}, "mode 'fused_chunk' is no op of its own"),
        (
            LinearAttention,
            {"feature_map": "gelu"},
            "feature_map must be one of hedgehog, t2r, elementwise_product, dpfp, elu, relu, identity, got 'gelu'",
        ),
        (
            LinearAttention,
            {"hidden_size": 160, "feature_map": "dpfp"},
            "feature_map 'dpfp' must map 40 keys of a head to at most 256, got 320",
        ),
        (
            LinearAttention,
            {"hidden_size": 576, "feature_map": "hedgehog"},
            "feature_map 'hedgehog' must map 144 keys of a head to at most 256, got 288",
        ),
        (
            LinearAttention,
            {"output_norm": "layernorm"},
            "output_norm must be 'rmsnorm' or 'identity', got 'layernorm'",
        ),
        (MultiScaleRetention, {"mode": "fused_chunk"}, "mode 'fused_chunk' is no op of its own"),
        (MultiScaleRetention, {"mode": "parallel"}, "mode 'parallel' is no op of its own: use 'chunk'"),
        (
            MultiScaleRetention,
            {"hidden_size": 12},
            "hidden_size \\* expand_k / num_heads must be even, for rotary positions, got 3",
        ),
    ],
)
def test_refused_arguments_of_other_layers(layer_type, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_type(**{"hidden_size": 64, "num_heads": 4} | arguments)


@pytest.mark.parametrize("layer_type", ARGUMENTS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "chunks"}, "mode must be 'chunk' or 'fused_recurrent', got 'chunks'"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
        (
            {"expand_k": 0.3},
            "hidden_size \\* expand_k must be a positive multiple of num_heads = 4, got 19.2",
        ),
        ({"norm_eps": -1}, "norm_eps must be at least 0, got -1"),
        ({"expand_v": 32}, "hidden_size \\* expand_v / num_heads must be at most 256, got 512"),
    ],
)
def test_refused_sizes(layer_type, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_type(**{"hidden_size": 64, "num_heads": 4} | arguments)
