"""Names, shapes, dtypes and first values of parameters are those of flash-linear-attention 0.6.0."""

from __future__ import annotations

import pickle
from inspect import Parameter, Signature, signature

import pytest
import torch
from helpers.truth import EVERY, LINEAR, build, made

from flacompose.layers import (
    ABCAttention,
    BasedLinearAttention,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    HGRNAttention,
    KimiDeltaAttention,
    LightNetAttention,
    LinearAttention,
    Mamba,
    Mamba2,
    MultiScaleRetention,
    ReBasedLinearAttention,
    RMSNorm,
    RodimusAttention,
    RWKV6Attention,
    RWKV7Attention,
    ShortConvolution,
    SimpleGatedLinearAttention,
)
from flacompose.layers.feature_map import HedgehogFeatureMap

DECAY = {"gk_proj.0.weight": (16, 64), "gk_proj.1.weight": (32, 16), "gk_proj.1.bias": (32,)}
OUTPUT = {"o_proj.weight": (64, 64)}
FUSED = {"g_norm_swish_gate.weight": (16,)}
NORM = {"g_norm.weight": (16,)}

RWKV6 = {
    "x_bias": (5, 24),
    "bonus": (3, 4),
    "x_proj.0.mu": (24,),
    "x_proj.0.linear.weight": (20, 24),
    "x_proj.2.weight": (24, 20),
    "r_proj.linear.weight": (12, 24),
    "w_proj.linear.lora.0.weight": (5, 24),
    "w_proj.linear.lora.2.weight": (12, 5),
    "w_proj.linear.lora.2.bias": (12,),
    "k_proj.linear.weight": (12, 24),
    "v_proj.linear.weight": (24, 24),
    "g_proj.linear.weight": (24, 24),
    "g_norm.weight": (24,),
    "g_norm.bias": (24,),
    "o_proj.weight": (24, 24),
}
RWKV7 = {
    **{f"x_{name}": (1, 1, 24) for name in "rwkvag"},
    "k_k": (24,),
    "k_a": (24,),
    "r_k": (3, 8),
    "r_proj.weight": (24, 24),
    "k_proj.weight": (24, 24),
    "v_proj.weight": (48, 24),
    "o_proj.weight": (24, 48),
    "w_lora.lora.0.weight": (5, 24),
    "w_lora.lora.2.weight": (24, 5),
    "w_lora.lora.2.bias": (24,),
    "v_lora.lora.0.weight": (3, 24),
    "v_lora.lora.2.weight": (48, 3),
    "v_lora.lora.2.bias": (48,),
    "a_lora.lora.0.weight": (32, 24),
    "a_lora.lora.2.weight": (24, 32),
    "a_lora.lora.2.bias": (24,),
    "g_lora.lora.0.weight": (7, 24),
    "g_lora.lora.2.weight": (48, 7),
    "g_norm.weight": (48,),
    "g_norm.bias": (48,),
}
HGRN_OUTPUT = {"g_norm.weight": (64,), "o_proj.weight": (64, 64)}
MAMBA2 = {"hidden_size": 24, "num_heads": 6, "head_dim": 8, "state_size": 5}

DECAYS = {"A_log": (4,), "dt_bias": (4,)}


def projections(**outputs: int) -> dict[str, tuple[int, ...]]:
    """Those without bias, of an input of 64."""
    return {f"{name}_proj.weight": (n, 64) for name, n in outputs.items()}


def convs(names: str, *channels: int, width: int = 4, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """The short convolutions of projections of these names and outputs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, D in zip(names, channels, strict=True):
        shapes |= {f"{name}_conv1d.weight": (D, 1, width)} | ({f"{name}_conv1d.bias": (D,)} if bias else {})
    return shapes


# As Layer(hidden_size=64, num_heads=4, **config).state_dict() of the peer lists them.
PROJECTIONS = projections(q=32, k=32, v=64, g=64)
HGRN, DELTA = projections(i=64, f=64, g=64), projections(q=64, k=64, v=64)


def delta_output(head: int, values: int) -> dict[str, tuple[int, ...]]:
    return {"o_norm.weight": (head,), "o_proj.weight": (64, values)}


CHECKPOINTS = [
    pytest.param(GatedLinearAttention, {}, PROJECTIONS | DECAY | OUTPUT | FUSED, id="defaults"),
    pytest.param(GatedLinearAttention, {"use_short_conv": True, "conv_bias": True, "conv_size": 3},
                 PROJECTIONS | convs("qkv", 32, 32, 64, width=3, bias=True) | DECAY | OUTPUT | FUSED, id="conv"),
    pytest.param(
        GatedLinearAttention,
        {"num_kv_heads": 2, "use_short_conv": True},
        projections(q=32, k=16, v=32, g=64)
        | convs("qkv", 32, 16, 32)
        | {"gk_proj.0.weight": (16, 64), "gk_proj.1.weight": (16, 16), "gk_proj.1.bias": (16,)}
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
    pytest.param(GatedLinearAttention, {"fuse_norm": False}, PROJECTIONS | DECAY | OUTPUT | NORM, id="norm apart"),
    pytest.param(GatedLinearAttention, {"gate_fn": "silu"}, PROJECTIONS | DECAY | OUTPUT | NORM,
                 id="silu is not swish"),
    pytest.param(GatedLinearAttention, {"elementwise_affine": False}, PROJECTIONS | DECAY | OUTPUT, id="no affine"),
    pytest.param(
        GatedLinearAttention,
        {"expand_k": 1.0, "expand_v": 2.0, "gate_low_rank_dim": 5},
        projections(q=64, k=64, v=128, g=128)
        | {
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
        projections(q=64, k=64, v=64, g=64)
        | convs("qkv", 64, 64, 64)
        | {
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
        projections(q=32, k=16, v=32, g=64)
        | convs("qkv", 32, 16, 32, width=3, bias=True)
        | {
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
        }
        | projections(q=64, k=64, v=64)
        | {"norm.weight": (16,), "o_proj.weight": (64, 64)},
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
        }
        | projections(q=64, k=32, v=32, o=64),
        id="hedgehog",
    ),
    pytest.param(
        LinearAttention,
        {"feature_map": "t2r", "expand_k": 0.5, "elementwise_affine": False},
        {"feature_map_q.layer.weight": (8, 8), "feature_map_k.layer.weight": (8, 8)}
        | projections(q=32, k=32, v=64, o=64),
        id="t2r",
    ),
    *(
        pytest.param(
            LinearAttention,
            {"feature_map": name},
            projections(q=64, k=64, v=64) | {"norm.weight": (16,), "o_proj.weight": (64, 64)},
            id=name,
        )
        for name in ("dpfp", "elu", "relu", "identity")
    ),
    pytest.param(
        MultiScaleRetention,
        {},
        projections(q=64, k=64, v=128, g=128)
        | {"o_proj.weight": (64, 128), "g_norm_swish_gate.weight": (32,)},
        id="retention defaults",
    ),
    pytest.param(
        MultiScaleRetention,
        {"num_kv_heads": 2, "use_short_conv": True, "use_output_gate": False},
        projections(q=64, k=32, v=64)
        | convs("qkv", 64, 32, 64)
        | {"o_proj.weight": (64, 128), "g_norm.weight": (32,)},
        id="retention grouped",
    ),
    (
        GatedSlotAttention,
        {"num_heads": 4, "num_kv_heads": 2, "feature_map": "t2r", "use_short_conv": True, "num_slots": 8},
        {"feature_map.layer.weight": (16, 16)}
        | projections(q=64, k=32, v=32, f=16)
        | convs("qkv", 64, 32, 32)
        | {"g_norm.weight": (64,), "o_proj.weight": (64, 64)},
    ),
    (
        ABCAttention,
        {"num_heads": 4, "use_short_conv": True, "conv_bias": True, "num_slots": 3},
        projections(q=32, k=32, v=64, g=64, s=12, o=64)
        | convs("qkv", 32, 32, 64, bias=True)
        | {"g_norm.weight": (16,)},
    ),
    (ABCAttention, {"num_heads": 4, "use_output_gate": False, "use_norm": False},
     projections(q=32, k=32, v=64, s=32, o=64)),
    (HGRN2Attention, {"expand_ratio": 16, "use_short_conv": True},
     projections(q=64, f=64, i=64) | convs("qfi", 64, 64, 64) | {"g_norm.weight": (64,), "o_proj.weight": (64, 64)}),
    (
        LightNetAttention,
        {"expand_ratio": 8, "num_heads": 4, "use_short_conv": True},
        projections(q=32, k=32, v=64)
        | convs("qkv", 32, 32, 64)
        | {
            "g_proj.0.weight": (128, 64),
            "g_proj.1.weight": (64, 128),
            "g_norm.weight": (64,),
            "o_proj.weight": (64, 64),
        },
    ),
    *(
        (
            RWKV6Attention,
            {
                "hidden_size": 24,
                "num_heads": 3,
                "proj_low_rank_dim": 4,
                "gate_low_rank_dim": 5,
                "elementwise_affine": affine,
            },
            {name: shape for name, shape in RWKV6.items() if affine or "g_norm" not in name},
        )
        for affine in (True, False)
    ),
    *(
        (
            RWKV7Attention,
            {
                "hidden_size": 24,
                "num_heads": None,
                "head_dim": 8,
                "value_dim": 48,
                "decay_low_rank_dim": 5,
                "gate_low_rank_dim": 7,
                "v_low_rank_dim": 3,
                "fuse_norm": affine,
                "elementwise_affine": affine,
                "layer_idx": layer_idx,
            },
            {
                name: shape
                for name, shape in RWKV7.items()
                if (affine or "g_norm" not in name) and (layer_idx or "v_lora" not in name)
            },
        )
        for affine, layer_idx in ((True, 1), (False, 0))
    ),
    (HGRNAttention, {}, HGRN | HGRN_OUTPUT),
    (HGRNAttention, {"elementwise_affine": False}, HGRN | {"o_proj.weight": (64, 64)}),
    (HGRNAttention, {"use_short_conv": True, "conv_bias": True}, HGRN | convs("fi", 64, 64, bias=True) | HGRN_OUTPUT),
    (
        HGRNAttention,
        {"expand_ratio": 2, "use_short_conv": True, "conv_size": 3},
        dict.fromkeys(HGRN, (128, 64))
        | convs("fi", 128, 128, width=3)
        | {"g_norm.weight": (128,), "o_proj.weight": (64, 128)},
    ),
    (
        Mamba,
        {"intermediate_size": 48, "use_bias": True},
        {
            "A_log": (48, 16),
            "D": (48,),
            "conv1d.weight": (48, 1, 4),
            "conv1d.bias": (48,),
            "in_proj.weight": (96, 64),
            "in_proj.bias": (96,),
            "x_proj.weight": (36, 48),
            "dt_proj.weight": (48, 4),
            "dt_proj.bias": (48,),
            "out_proj.weight": (64, 48),
            "out_proj.bias": (64,),
        },
    ),
    (
        Mamba2,
        MAMBA2,
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
        Mamba2,
        MAMBA2
        | {"n_groups": 2, "use_bias": True, "use_conv_bias": False, "rmsnorm": False, "D_has_hdim": True},
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
    (DeltaNet, {}, DELTA | {"b_proj.weight": (4, 64)} | convs("qkv", 64, 64, 64) | delta_output(16, 64)),
    (DeltaNet, {"d_model": 64, "use_beta": False, "use_gate": True, "use_short_conv": False, "expand_v": 2.0},
     DELTA | {"v_proj.weight": (128, 64), "g_proj.weight": (128, 64)} | delta_output(32, 128)),
    (
        GatedDeltaNet,
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 32, "conv_bias": True},
        DECAYS
        | DELTA
        | {"v_proj.weight": (256, 64), "a_proj.weight": (4, 64), "b_proj.weight": (4, 64)}
        | convs("qkv", 64, 64, 256, bias=True)
        | {"g_proj.weight": (256, 64)}
        | delta_output(64, 256),
    ),
    (
        GatedDeltaNet,
        {"num_heads": 4, "head_dim": 16, "expand_v": 32, "use_gate": False, "use_short_conv": False},
        DECAYS
        | DELTA
        | {"v_proj.weight": (2048, 64), "a_proj.weight": (4, 64), "b_proj.weight": (4, 64)}
        | delta_output(512, 2048),
    ),
    (
        GatedDeltaProduct,
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 32, "num_householder": 3},
        DECAYS
        | DELTA
        | {"k_proj.weight": (192, 64), "v_proj.weight": (768, 64), "b_proj.weight": (12, 64)}
        | {"a_proj.weight": (4, 64)}
        | convs("qkv", 64, 192, 768)
        | {"g_proj.weight": (256, 64)}
        | delta_output(64, 256),
    ),
    (
        GatedDeltaProduct,
        {
            "num_heads": 4,
            "head_dim": 16,
            "expand_v": 1,
            "use_forget_gate": False,
            "use_output_gate": False,
            "use_short_conv": False,
        },
        DELTA
        | {"k_proj.weight": (128, 64), "v_proj.weight": (128, 64), "b_proj.weight": (8, 64)}
        | delta_output(16, 64),
    ),
    *(
        (
            KimiDeltaAttention,
            {"num_heads": 2, "num_v_heads": 4, "head_dim": 32, "use_short_conv": conv},
            {"A_log": (4,), "dt_bias": (128,)}
            | DELTA
            | {"v_proj.weight": (128, 64)}
            | (convs("qkv", 64, 64, 128) if conv else {})
            | {"f_proj.0.weight": (32, 64), "f_proj.1.weight": (128, 32), "b_proj.weight": (4, 64)}
            | {"g_proj.0.weight": (32, 64), "g_proj.1.weight": (128, 32), "g_proj.1.bias": (128,)}
            | delta_output(32, 128),
        )
        for conv in (True, False)
    ),
    (
        GatedDeltaNet2,
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 32},
        {"A_log": (2,), "dt_bias": (64,)}
        | DELTA
        | {"v_proj.weight": (128, 64)}
        | convs("qkv", 64, 64, 128)
        | {"f_proj.0.weight": (32, 64), "f_proj.1.weight": (64, 32)}
        | {"b_proj.weight": (64, 64), "w_proj.weight": (128, 64)}
        | {"g_proj.0.weight": (32, 64), "g_proj.1.weight": (128, 32), "g_proj.1.bias": (128,)}
        | delta_output(32, 128),
    ),
    (
        Comba,
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 32, "conv_bias": True},
        {"decay": (2,), "D": (2,)}
        | DECAYS
        | DELTA
        | {"v_proj.weight": (256, 64), "a_proj.weight": (4, 64), "b_proj.weight": (4, 64)}
        | convs("qkv", 64, 64, 256, bias=True)
        | {"g_proj.weight": (256, 64)}
        | delta_output(64, 256),
    ),
    (
        Comba,
        {"head_dim": 16, "use_inner_decay": False, "use_output_correction": False, "use_output_gate": False,
         "use_short_conv": False},
        DECAYS
        | DELTA
        | {"v_proj.weight": (128, 64), "a_proj.weight": (4, 64), "b_proj.weight": (4, 64)}
        | delta_output(32, 128),
    ),
    *(
        (
            RodimusAttention,
            {"expand_ratio": 24, "use_short_conv": conv},
            {"residual_weight": (128,), "gate_proj.weight": (128, 64), "up_proj.weight": (128, 64)}
            | {"activation_norm.weight": (128,), "down_proj.weight": (64, 128)}
            | ({"short_conv.weight": (128, 1, 4), "short_conv.bias": (128,)} if conv else {})
            | {"k_proj.weight": (24, 128), "q_proj.weight": (24, 128)}
            | {"g_gate_proj.weight": (24, 128), "g_gate_proj.bias": (24,)}
            | {"tau_gate_proj.weight": (24, 128), "tau_gate_proj.bias": (24,)}
            | {"i_gate_proj.0.weight": (16, 128), "i_gate_proj.1.weight": (128, 16), "i_gate_proj.1.bias": (128,)},
        )
        for conv in (True, False)
    ),
    (BasedLinearAttention, {"num_key_value_heads": 4}, DELTA | OUTPUT),
    (ReBasedLinearAttention, {"num_key_value_heads": 4},
     {"feature_map.gamma": (16,), "feature_map.beta": (16,)} | DELTA | OUTPUT),
    (ReBasedLinearAttention, {"num_key_value_heads": 4, "use_gamma": False, "use_beta": False}, DELTA | OUTPUT),
]  # fmt: skip


@pytest.mark.parametrize(("layer_type", "config", "expected"), CHECKPOINTS)
def test_names_and_shapes(layer_type, config, expected):
    """A layer has the parameters of the peer in the peer's order, and loads a checkpoint of them."""
    sizes = {"hidden_size": 64, "num_heads": 4}
    config = {name: n for name, n in sizes.items() if name in signature(layer_type).parameters} | config
    parameters = layer_type(**config, device="meta").state_dict()
    assert [(name, tuple(x.shape)) for name, x in parameters.items()] == list(expected.items())
    assert all(x.is_meta for x in parameters.values())
    checkpoint = {name: torch.randn(shape) for name, shape in expected.items()}
    if config.get("tie_feature_map_qk"):
        checkpoint |= {name: checkpoint[name.replace("map_k", "map_q")] for name in checkpoint}
    layer = made({"layer": layer_type} | config)
    layer.load_state_dict(checkpoint)
    assert all(torch.equal(x, checkpoint[name]) for name, x in layer.state_dict().items())
    assert layer(torch.randn(1, 3, layer.hidden_size))[0].shape == (1, 3, layer.hidden_size)


SIGNATURES = {
    "gla": (
        "(mode='chunk', hidden_size=1024, expand_k=0.5, expand_v=1.0, num_heads=4, num_kv_heads=None, "
        "feature_map=None, use_short_conv=False, conv_size=4, conv_bias=False, use_output_gate=True, "
        "gate_fn='swish', elementwise_affine=True, norm_eps=1e-05, gate_logit_normalizer=16, "
        "gate_low_rank_dim=16, clamp_min=None, fuse_norm=True, layer_idx=None, *, device=None, dtype=None)"
    ),
    "simple_gla": (
        "(mode='chunk', hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=4, num_kv_heads=None, "
        "feature_map=None, use_short_conv=True, conv_size=4, conv_bias=False, gate_fn='swish', "
        "elementwise_affine=True, norm_eps=1e-05, gate_logit_normalizer=16, fuse_norm=True, layer_idx=None, "
        "*, device=None, dtype=None)"
    ),
    "linear_attn": (
        "(mode='chunk', hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=8, num_kv_heads=None, "
        "feature_map='elementwise_product', tie_feature_map_qk=False, output_norm='rmsnorm', norm_q=False, "
        "norm_k=False, do_feature_map_norm=False, elementwise_affine=True, norm_eps=1e-05, layer_idx=None, "
        "*, device=None, dtype=None)"
    ),
    "retention": (
        "(mode='chunk', hidden_size=1024, expand_k=1.0, expand_v=2.0, num_heads=8, num_kv_heads=None, "
        "feature_map=None, use_short_conv=False, conv_size=4, conv_bias=False, use_output_gate=True, "
        "gate_fn='swish', elementwise_affine=True, norm_eps=1e-05, fuse_norm=True, layer_idx=None, *, "
        "device=None, dtype=None)"
    ),
    "lightning_attn": (
        "(mode='chunk', hidden_size=1024, num_heads=8, head_dim=None, *, layer_idx, num_layers, "
        "hidden_act='silu', norm_eps=1e-06, decay='minimax', device=None, dtype=None)"
    ),
    "mamba": (
        "(hidden_size=2048, state_size=16, conv_kernel=4, use_conv_bias=True, intermediate_size=2048, "
        "dt_rank='auto', dt_min=0.001, dt_max=0.1, dt_init='random', dt_scale=1.0, dt_init_floor=0.0001, "
        "use_bias=False, hidden_act='silu', layer_idx=None, *, device=None, dtype=None)"
    ),
    "mamba2": (
        "(num_heads=None, head_dim=64, hidden_size=2048, state_size=128, expand=2, n_groups=1, "
        "conv_kernel=4, conv_init=None, use_conv_bias=True, hidden_act='silu', A_init_range=(1, 16), "
        "D_has_hdim=False, rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1, "
        "dt_init_floor=0.0001, dt_limit=(0.0, inf), use_bias=False, norm_eps=1e-05, chunk_size=256, "
        "layer_idx=None, *, device=None, dtype=None)"
    ),
    **dict.fromkeys(
        ("mamba3", "mamba3 mimo"),
        "(hidden_size=2048, state_size=128, expand=2, head_dim=64, n_groups=1, rope_fraction=0.5, dt_min=0.001, "
        "dt_max=0.1, dt_init_floor=0.0001, A_floor=0.0001, is_outproj_norm=False, is_mimo=False, mimo_rank=4, "
        "chunk_size=64, use_bias=False, norm_eps=1e-05, layer_idx=None, *, A_activation='softplus', device=None, "
        "dtype=None)",
    ),
    "rwkv6": (
        "(mode='chunk', hidden_size=1024, expand_k=0.5, expand_v=1.0, num_heads=4, gate_fn='swish', "
        "proj_low_rank_dim=32, gate_low_rank_dim=64, fuse_norm=True, elementwise_affine=True, "
        "norm_eps=1e-05, layer_idx=None, *, device=None, dtype=None)"
    ),
    "rwkv7": (
        "(mode='chunk', hidden_size=1024, head_dim=64, num_heads=None, decay_low_rank_dim=None, "
        "gate_low_rank_dim=None, a_low_rank_dim=None, v_low_rank_dim=None, elementwise_affine=True, "
        "norm_eps=1e-05, layer_idx=None, fuse_norm=False, value_dim=None, num_hidden_layers=None, "
        "allow_neg_eigval=False, *, device=None, dtype=None)"
    ),
    "mlstm": (
        "(mode='chunk', hidden_size=1024, num_heads=4, qk_dim_factor=0.5, v_dim_factor=1.0, gate_soft_cap=15.0, "
        "use_bias=False, norm_eps=1e-06, eps=1e-06, layer_idx=None, *, device=None, dtype=None)"
    ),
    "griffin": (
        "(mode='chunk', hidden_size=2560, num_heads=10, lru_width=None, conv_size=4, hidden_act='gelu', "
        "layer_idx=None, *, device=None, dtype=None)"
    ),
    "hgrn": (
        "(mode='chunk', hidden_size=1024, expand_ratio=1, use_short_conv=False, conv_size=4, "
        "conv_bias=False, elementwise_affine=True, norm_eps=1e-05, layer_idx=None, *, device=None, "
        "dtype=None)"
    ),
    "hgrn2": (
        "(mode='chunk', hidden_size=1024, num_heads=None, expand_ratio=128, use_short_conv=False, "
        "conv_size=4, conv_bias=False, elementwise_affine=True, norm_eps=1e-05, layer_idx=None, *, "
        "device=None, dtype=None)"
    ),
    "lightnet": (
        "(mode='chunk', hidden_size=1024, num_heads=None, expand_ratio=128, use_short_conv=False, "
        "conv_size=4, conv_bias=False, gate_low_rank_dim=128, elementwise_affine=True, norm_eps=1e-05, "
        "layer_idx=None, *, device=None, dtype=None)"
    ),
    "gsa": (
        "(mode='chunk', hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=4, num_kv_heads=None, "
        "use_short_conv=False, conv_size=4, conv_bias=False, num_slots=None, elementwise_affine=True, "
        "norm_eps=1e-05, gate_logit_normalizer=8, feature_map='swish', use_output_gate=False, use_norm=True, "
        "layer_idx=None, scale=1.0, *, device=None, dtype=None)"
    ),
    "abc": (
        "(hidden_size=1024, expand_k=0.5, expand_v=1.0, num_heads=4, use_short_conv=False, conv_size=4, "
        "conv_bias=False, num_slots=None, elementwise_affine=True, norm_eps=1e-05, gate_low_rank_dim=16, "
        "gate_logit_normalizer=16, use_rope=True, use_input_gate=False, use_output_gate=True, use_norm=True, "
        "clamp_min=-32, clamp_max=32, layer_idx=None, *, device=None, dtype=None)"
    ),
    "delta_net": (
        "(mode='chunk', d_model=None, hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=4, "
        "use_beta=True, use_gate=False, use_short_conv=True, conv_size=4, conv_bias=False, "
        "allow_neg_eigval=False, layer_idx=None, qk_activation='silu', qk_norm='l2', norm_eps=1e-05, *, "
        "device=None, dtype=None)"
    ),
    "gated_deltanet": (
        "(hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode='chunk', "
        "use_gate=True, use_short_conv=True, allow_neg_eigval=False, conv_size=4, conv_bias=False, "
        "layer_idx=None, norm_eps=1e-05, output_gate_activation='swish', *, device=None, dtype=None)"
    ),
    "gated_deltaproduct": (
        "(hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode='chunk', "
        "use_output_gate=True, use_short_conv=True, conv_size=4, conv_bias=False, layer_idx=None, "
        "norm_eps=1e-05, use_forget_gate=True, allow_neg_eigval=True, num_householder=2, *, device=None, "
        "dtype=None)"
    ),
    "kda": (
        "(hidden_size=2048, expand_v=1, head_dim=128, num_heads=16, num_v_heads=None, mode='chunk', "
        "use_short_conv=True, allow_neg_eigval=False, safe_gate=False, lower_bound=None, conv_size=4, "
        "conv_bias=False, layer_idx=None, norm_eps=1e-05, *, device=None, dtype=None)"
    ),
    "gdn2": (
        "(hidden_size=2048, expand_v=1.0, head_dim=128, num_heads=16, num_v_heads=None, mode='chunk', "
        "use_short_conv=True, allow_neg_eigval=False, conv_size=4, conv_bias=False, layer_idx=None, "
        "norm_eps=1e-05, *, device=None, dtype=None)"
    ),
    "comba": (
        "(hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode='chunk', "
        "use_short_conv=True, use_output_gate=True, use_output_correction=True, use_inner_decay=True, "
        "correction_factor=1.0, conv_size=4, conv_bias=False, layer_idx=None, norm_eps=1e-05, *, "
        "device=None, dtype=None)"
    ),
    "rodimus": (
        "(block_type='rodimus', mode='chunk', hidden_size=1024, input_gate_low_rank='auto', expand_ratio=64, "
        "use_short_conv=True, conv_size=4, conv_bias=True, norm_eps=1e-05, k_norm_eps=None, "
        "residual_in_fp32=True, layer_idx=None, *, device=None, dtype=None)"
    ),
    "based": (
        "(hidden_size, feature_dim=16, num_key_value_heads=12, num_heads=12, feature_name='taylor_exp', "
        "eps=1e-12, causal=True, mode='chunk', *, device=None, dtype=None)"
    ),
    "rebased": (
        "(hidden_size, l_max=2048, feature_dim=16, num_key_value_heads=16, num_heads=16, use_gamma=True, "
        "use_beta=True, normalize=True, causal=True, eps=1e-05, mode='chunk', layer_idx=None, *, device=None, "
        "dtype=None)"
    ),
}


@pytest.mark.parametrize("name", EVERY)
def test_arguments(name):
    """A layer takes the arguments of the peer in the peer's order, with its defaults, then PyTorch's two by keyword."""
    arguments = signature(EVERY[name]["layer"]).parameters.values()
    arguments = [argument.replace(annotation=Parameter.empty) for argument in arguments]
    assert str(Signature(arguments)) == SIGNATURES[name]


def test_first_values():
    """First values are those of `nn.Linear`, of `nn.Conv1d` and ones, drawn in the order of the parameters."""
    torch.manual_seed(3)
    conv = ShortConvolution(8, 4, bias=True)
    torch.manual_seed(3)
    expected = torch.nn.Conv1d(8, 8, 4, groups=8)
    assert torch.equal(conv.weight, expected.weight)
    assert torch.equal(conv.bias, expected.bias)
    assert torch.equal(RMSNorm(8).weight, torch.ones(8))
    for wrong, message in (
        ((1.5,), "hidden_size must be an int"),
        ((8, "False"), "elementwise_affine must be a bool or None, got 'False'"),
        ((8, True, -1.0), "eps must"),
        ((8, True, 1e-5, None, torch.int32), "dtype must be float32, .* got int32"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            RMSNorm(*wrong)
    with pytest.raises(ValueError, match=r"x must have a last axis of size 8, got shape \(2, 1\)"):
        RMSNorm(8)(torch.ones(2, 1))
    hedgehog = HedgehogFeatureMap(4)
    assert torch.equal(hedgehog.layer.weight, torch.eye(4))
    assert not hedgehog.layer.bias.any()


def test_one_map_of_features_for_both():
    """Linear attention maps queries and keys by one module where they are tied, and else by one each."""
    layer = build(LINEAR | {"tie_feature_map_qk": True})
    assert layer.feature_map_q is layer.feature_map_k
    assert layer.feature_map_q is not build(LINEAR).feature_map_k


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
    """A layer with any activation can be pickled, and computes the same afterwards."""
    layer = GatedLinearAttention(
        hidden_size=16, num_heads=2, gate_fn=name, feature_map=name, use_short_conv=True
    )
    x = torch.randn(1, 3, 16)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], layer(x)[0])
