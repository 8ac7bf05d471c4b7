"""What is refused, and in which words."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from helpers.truth import (
    EVERY,
    GLA,
    LINEAR,
    NORMALIZED,
    RETENTION,
    assert_close,
    assert_states_close,
    build,
    random_state,
)

from flacompose.layers import (
    ABCAttention,
    Comba,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    HGRN2Attention,
    KimiDeltaAttention,
    LightNetAttention,
    RecurrentState,
    ShortConvolution,
)
from flacompose.models.feed_forward import RWKV7FeedForward
from flacompose.models.softmax_attention import SoftmaxAttention

SMALL = {"hidden_size": 16, "num_heads": 2}
CONFIG = GLA | SMALL | {"use_short_conv": True}
every_layer = pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
X = torch.ones(2, 5, 16)
MASK = torch.ones(2, 5, dtype=torch.long)
RECURRENT = torch.zeros(2, 2, 4, 8)
CONV = (torch.zeros(2, 8, 4), torch.zeros(2, 8, 4), torch.zeros(2, 16, 4))
RWKV6, ABC = EVERY["rwkv6"], EVERY["abc"]
HK, HV = torch.zeros(2, 2, 4, 5), torch.zeros(2, 2, 5, 8)  # of ABC

CHOICES = "one of relu, sigmoid, logsigmoid, silu, swish, sqrelu, gelu, got"
MAPS = "one of hedgehog, t2r, elementwise_product, dpfp, elu, relu, identity, got"
GATED = "gla simple_gla retention"
HEADS = f"{GATED} linear_attn rwkv6 gsa abc delta_net"
VALUE_HEADS = "gated_deltanet gated_deltaproduct kda gdn2 comba"
EXPANDED = "hgrn2 lightnet"
# Which layers, "" for all that have these arguments; the arguments; the message, with numbers of the configuration; and
# the error, where it is no ValueError.
REFUSED = [
    ("", {"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
    ("", {"mode": "chunks"}, "mode must be 'chunk' or 'fused_recurrent', got 'chunks'"),
    (f"{GATED} linear_attn gsa hgrn2 delta_net", {"mode": "fused_chunk"}, "mode 'fused_chunk' is no op of its own"),
    ("retention", {"mode": "parallel"}, "mode 'parallel' is no op of its own: use 'chunk'"),
    ("rwkv6 rwkv7 lightnet", {"mode": "fused_chunk"}, "mode must be 'chunk' or 'fused_recurrent', got"),
    ("", {"norm_eps": -1e-5}, "norm_eps must be at least 0, got -1e-05"),
    ("", {"norm_eps": math.nan}, "norm_eps must be at least 0, got nan"),
    ("", {"norm_eps": math.inf}, "norm_eps must be finite, got inf"),
    *(("", {"use_short_conv": use, "conv_size": 0}, "conv_size must be at least 1, got 0") for use in (True, False)),
    (f"{HEADS} {EXPANDED} {VALUE_HEADS} lightning_attn rwkv7 mlstm griffin", {"num_heads": 0},
     "num_heads must be at least 1, got 0"),
    ("", {"num_kv_heads": 0}, "num_kv_heads must divide num_heads = {num_heads}, got 0"),
    ("", {"num_kv_heads": 3}, "num_kv_heads must divide num_heads = {num_heads}, got 3"),
    *(
        (HEADS, {"hidden_size": 64, f"expand_{x}": ratio},
         f"hidden_size * expand_{x} must be a positive multiple of num_heads = {{num_heads}}, got {product}")
        for x in "kv"
        for ratio, product in ((0.3, 19.2), (0.015625, 1.0), (math.nan, math.nan))
    ),
    (" ".join(name for name in HEADS.split() if name not in ("gsa", "abc")),
     {"hidden_size": 4096, "expand_k": 2, "expand_v": 1},
     "hidden_size * expand_k / num_heads must be at most 512, got "),
    ("retention", {"hidden_size": 12},
     "hidden_size * expand_k / num_heads must be even, for rotary positions, got 3"),
    ("abc", {"num_heads": 4}, "hidden_size * expand_k / num_heads must be even, for rotary positions, got 3"),
    *(
        (names, {argument: name}, f"{argument} must be {choices} {name!r}")
        for name in (["relu"], "softmax", None)
        for names, argument, choices in (
            (f"{GATED} rwkv6", "gate_fn", CHOICES),
            ("lightning_attn mamba mamba2 griffin", "hidden_act", CHOICES),
            ("linear_attn", "feature_map", MAPS),
        )
    ),
    (GATED, {"feature_map": "elu"}, f"feature_map must be {CHOICES} 'elu'"),
    ("gsa", {"feature_map": "elu"}, "feature_map must be 'swish', 'relu' or 't2r', got 'elu'"),
    ("gla", {"gate_fn": "bias_gelu"}, f"gate_fn must be {CHOICES} 'bias_gelu' (bias_gelu takes a bias"),
    *(
        ("gla simple_gla gsa", {"gate_logit_normalizer": x}, f"gate_logit_normalizer must be positive, got {x}")
        for x in (0, -1, math.nan)
    ),
    ("gla", {"clamp_min": 0.5}, "clamp_min must be at most 0, as log-decays are, got 0.5"),
    ("gla", {"clamp_min": math.nan}, "clamp_min must be at most 0, as log-decays are, got nan"),
    ("gla", {"clamp_min": math.inf}, "clamp_min must be at most 0, as log-decays are, got inf"),
    *(
        (names, {f"{name}_low_rank_dim": 0}, f"{name}_low_rank_dim must be at least 1, got 0")
        for names, name in (("gla rwkv6 lightnet", "gate"), ("rwkv6", "proj"))
    ),
    ("linear_attn", {"hidden_size": 320, "feature_map": "dpfp"},
     "feature_map 'dpfp' must map 80 keys of a head to at most 512, got 640"),
    ("linear_attn", {"hidden_size": 1152, "feature_map": "hedgehog"},
     "feature_map 'hedgehog' must map 288 keys of a head to at most 512, got 576"),
    ("linear_attn", {"output_norm": "layernorm"}, "output_norm must be 'rmsnorm' or 'identity', got 'layernorm'"),
    ("mlstm", {"gate_soft_cap": 0}, "gate_soft_cap must be positive, got 0"),
    ("mlstm", {"gate_soft_cap": math.inf}, "gate_soft_cap must be finite, got inf"),
    ("mlstm", {"eps": -1.0}, "eps must be at least 0, got -1.0"),
    ("mlstm", {"qk_dim_factor": 0.3}, "hidden_size * qk_dim_factor must be a positive multiple of num_heads = 4, got"),
    ("mlstm", {"v_dim_factor": 100}, "hidden_size * v_dim_factor / num_heads must be from 1 to 512, got 600"),
    ("lightning_attn", {"num_heads": 5},
     "hidden_size must be a multiple of num_heads = 5 without a head_dim, got 24"),
    ("lightning_attn", {"head_dim": 513}, "head_dim must be from 1 to 512, got 513"),
    ("lightning_attn", {"hidden_size": 2048, "num_heads": 2},
     "hidden_size / num_heads must be from 1 to 512, got 1024"),
    ("lightning_attn", {"layer_idx": 3}, "layer_idx must be from 0 to num_layers - 1 = 2, got 3"),
    ("lightning_attn", {"decay": "retnet"}, "decay must be 'tnl' or 'minimax', got 'retnet'"),
    ("griffin", {"lru_width": 37}, "lru_width must be a multiple of num_heads = 4, got 37"),
    ("griffin", {"conv_size": 0}, "conv_size must be at least 1, got 0"),
    ("hgrn", {"expand_ratio": 0.3}, "hidden_size * expand_ratio must be a positive int, got 7.1"),
    ("hgrn", {"expand_ratio": -1}, "hidden_size * expand_ratio must be a positive int, got -24"),
    ("hgrn", {"expand_ratio": math.nan}, "hidden_size * expand_ratio must be a positive int, got nan"),
    ("gsa", {"expand_v": 2.0}, "expand_v must be 1, since the norm has hidden_size channels, got 2.0"),
    ("gsa", {"num_slots": 513}, "num_slots must be from 1 to 512, got 513"),
    ("gsa abc", {"num_slots": 0}, "num_slots must be from 1 to 512, got 0"),
    ("gsa", {"scale": math.nan}, "scale must be finite, got nan"),
    ("gsa", {"scale": -math.inf}, "scale must be finite, got -inf"),
    ("abc", {"clamp_min": 33}, "clamp_min must be at most clamp_max = 32, got 33"),
    *(
        (
            "abc",
            {"clamp_min": None, "clamp_max": None, name: x},
            f"{name} must be finite or {none}, got {x}",
        )
        for name, none in (("clamp_min", -math.inf), ("clamp_max", math.inf))
        for x in (math.nan, -none)
    ),
    ("hgrn2", {"num_heads": 4}, "num_heads must be hidden_size // expand_ratio = 3, got 4"),
    *(
        (EXPANDED, *refused)
        for refused in (
            ({"expand_ratio": None}, "num_heads or expand_ratio must be given, got None for both"),
            ({"expand_ratio": 128}, "expand_ratio must be at most hidden_size = 24, got 128"),
            ({"expand_ratio": 513, "hidden_size": 1026}, "expand_ratio must be from 1 to 512, got 513"),
            ({"expand_ratio": None, "num_heads": 5}, "hidden_size must be a multiple of num_heads = 5"),
            (
                {"expand_ratio": None, "num_heads": 2, "hidden_size": 2048},
                "hidden_size / num_heads must be at most 512, got 1024",
            ),
        )
    ),
    ("mamba", {"dt_rank": 0}, "dt_rank must be at least 1, got 0"),
    ("mamba", {"dt_init": "zeros"}, "dt_init must be one of random, constant, got 'zeros'"),
    ("mamba", {"state_size": 513}, "state_size must be from 1 to 512, got 513"),
    ("mamba", {"intermediate_size": 0}, "intermediate_size must be at least 1, got 0"),
    ("mamba", {"dt_scale": math.inf}, "dt_scale must be finite, got inf"),
    ("mamba", {"dt_min": 0.2}, "(dt_min, dt_max) must be two ascending bounds above 0, got (0.2, 0.1)"),
    ("mamba3", {"state_size": 7}, "state_size must be even, got 7"),
    ("mamba3", {"state_size": 2, "rope_fraction": 0.5}, "state_size must be at least 4 where rope_fraction is 0.5"),
    ("mamba3", {"rope_fraction": 0.25}, "rope_fraction must be 0.5 or 1, got 0.25"),
    ("mamba3", {"n_groups": 4}, "n_groups must divide the 6 heads, got 4"),
    ("mamba3", {"A_floor": 0}, "A_floor must be above 0, got 0"),
    ("mamba3", {"A_activation": "relu"}, "A_activation must be one of softplus, heavy_tail, got 'relu'"),
    ("mamba2", {"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ("mamba2", {"state_size": 513}, "state_size must be from 1 to 512, got 513"),
    ("mamba2", {"state_size": 0}, "state_size must be from 1 to 512, got 0"),
    ("mamba2", {"head_dim": 7}, "expand * hidden_size must be a positive multiple of head_dim = 7, got 48"),
    ("mamba2", {"expand": 1.3}, "expand * hidden_size must be a positive multiple of head_dim = 8, got 31.2"),
    ("mamba2", {"expand": math.nan}, "expand * hidden_size must be a positive multiple of head_dim = 8, got nan"),
    ("mamba2", {"num_heads": 5}, "num_heads must be expand * hidden_size / head_dim = 6, got 5"),
    ("mamba2", {"n_groups": 4}, "n_groups must divide the 6 heads, got 4"),
    ("mamba2", {"A_init_range": (0, 1)}, "A_init_range must be two ascending bounds above 0, got (0, 1)"),
    ("mamba2", {"A_init_range": (1,)}, "A_init_range must be two ascending bounds above 0, got (1,)"),
    ("mamba2", {"A_init_range": (1, math.inf)}, "A_init_range[1] must be finite, got inf"),
    ("mamba2", {"A_init_range": 3}, "A_init_range must be a tuple of two bounds, got int", TypeError),
    ("mamba2", {"A_init_range": None}, "A_init_range must be a tuple of two bounds, got NoneType", TypeError),
    ("mamba2", {"A_init_range": (1, "a")}, "A_init_range[1] must be a number, got str", TypeError),
    ("mamba2", {"dt_min": 0.2}, "(dt_min, dt_max) must be two ascending bounds above 0, got (0.2, 0.1)"),
    ("mamba2", {"dt_max": math.inf}, "dt_max must be finite, got inf"),
    ("mamba2", {"dt_init_floor": 0}, "dt_init_floor must be above 0, got 0"),
    ("mamba2", {"dt_init_floor": math.nan}, "dt_init_floor must be finite, got nan"),
    ("mamba2", {"dt_limit": None}, "dt_limit must be a tuple of two bounds, got NoneType", TypeError),
    ("mamba2", {"dt_limit": (-1, 1)}, "dt_limit must be two ascending bounds of at least 0, got (-1, 1)"),
    ("mamba2", {"dt_limit": (math.inf, math.inf)}, "dt_limit[0] must be finite, got inf"),
    ("mamba2", {"conv_kernel": 0}, "conv_kernel must be at least 1, got 0"),
    ("mamba2", {"conv_init": -0.1}, "conv_init must be at least 0, got -0.1"),
    ("mamba2", {"conv_init": math.inf}, "conv_init must be finite, got inf"),
    ("mamba2", {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ("delta_net", {"d_model": 0}, "d_model must be at least 1, got 0"),
    *(
        (names, {argument: x}, f"{argument} must be one of {choices}, got {x!r}")
        for x in (["silu"], "gelu", None)
        for names, argument, choices in (
            ("delta_net", "qk_activation", "silu, relu, elu, identity"),
            ("delta_net", "qk_norm", "l2, sum"),
            ("gated_deltanet", "output_gate_activation", "swish, silu, sigmoid"),
        )
    ),
    *(
        (VALUE_HEADS, *refused)
        for refused in (
            ({"num_v_heads": 0}, "num_v_heads must be a multiple of num_heads = 2, got 0"),
            ({"num_v_heads": 3}, "num_v_heads must be a multiple of num_heads = 2, got 3"),
            ({"head_dim": 513}, "head_dim must be from 1 to 512, got 513"),
            ({"expand_v": 1.3}, "head_dim * expand_v must be a positive int, got 7.8"),
            ({"expand_v": 0}, "head_dim * expand_v must be a positive int, got 0"),
            (
                {"head_dim": 1, "expand_v": 513},
                "head_dim * expand_v must have 2 equal parts of at most 512, got 513",
            ),
        )
    ),
    *(
        ("rwkv7", *refused)
        for refused in (
            ({"num_heads": None}, "head_dim or num_heads must be given, got None for both"),
            ({"head_dim": 513}, "head_dim must be from 1 to 512, got 513"),
            ({"head_dim": 0}, "head_dim must be from 1 to 512, got 0"),
            ({"head_dim": 5}, "hidden_size must be a multiple of head_dim = 5, got 24"),
            (
                {"head_dim": 64},
                "hidden_size must be a multiple of head_dim = 64, got 24 (64 is the default; give head_dim=None",
            ),
            ({"head_dim": 8}, "num_heads must be hidden_size // head_dim = 3, got 4 with head_dim = 8"),
            (
                {"head_dim": 64, "hidden_size": 128},
                "num_heads must be hidden_size // head_dim = 2, got 4 with head_dim = 64 (64 is the default; give",
            ),
            ({"num_heads": 5}, "hidden_size must be a multiple of num_heads = 5, got 24"),
            ({"num_heads": 1, "hidden_size": 513}, "hidden_size / num_heads must be from 1 to 512, got 513"),
            ({"value_dim": 0}, "value_dim must be at least 1, got 0"),
            ({"value_dim": 26}, "value_dim must be a multiple of num_heads = 4, got 26"),
            *(
                ({f"{name}_low_rank_dim": 0}, f"{name}_low_rank_dim must be at least 1, got 0")
                for name in ("decay", "gate", "a", "v")
            ),
            ({"layer_idx": 3}, "layer_idx must be from 0 to num_hidden_layers - 1 = 2, got 3"),
            ({"layer_idx": -1}, "layer_idx must be at least 0, got -1"),
            ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        )
    ),
    ("gated_deltaproduct", {"num_householder": 0}, "num_householder must be at least 1, got 0"),
    ("kda", {"lower_bound": 0}, "lower_bound must be below 0, as log-decays are, got 0"),
    ("kda", {"lower_bound": -math.inf}, "lower_bound must be finite, got -inf"),
    *(
        ("based rebased", *refused)
        for refused in (
            ({"mode": "parallel"}, "mode 'parallel' is no op of its own: use 'chunk'"),
            ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
            ({"num_key_value_heads": 2}, "num_key_value_heads must be num_heads = 4, got 2"),
            ({"hidden_size": 3}, "hidden_size must be at least num_heads = 4, got 3"),
            ({"feature_dim": 0}, "feature_dim must be at least 1, got 0"),
            ({"causal": False}, "causal must be True: a recurrence sees no later token, got False"),
            ({"eps": 0.0}, "eps must be positive, got 0.0"),
        )
    ),
    ("based", {"feature_name": "hedgehog"}, "feature_name must be one of taylor_exp, got 'hedgehog'"),
    ("rodimus", {"block_type": "mamba"}, "block_type must be one of rodimus, rodimus_plus, got 'mamba'"),
    ("rodimus", {"input_gate_low_rank": 0}, "input_gate_low_rank must be at least 1, got 0"),
    ("rodimus", {"input_gate_low_rank": None}, "input_gate_low_rank must be an int, got NoneType", TypeError),
    ("rodimus", {"expand_ratio": 513}, "expand_ratio must be from 1 to 512, got 513"),
    ("rodimus", {"k_norm_eps": 0}, "k_norm_eps must be positive, got 0"),
    ("comba", {"correction_factor": math.nan}, "correction_factor must be finite, got nan"),
    ("kda", {"safe_gate": True}, "safe_gate must not be True without a lower_bound"),
    ("abc", {"mode": "chunk"}, "ABCAttention.__init__() got an unexpected keyword argument 'mode'", TypeError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        (name, arguments, error[0] if error else ValueError, message.format(**EVERY[name] | arguments))
        for names, arguments, message, *error in REFUSED
        for name in names.split() or EVERY
        if names or set(arguments) <= set(inspect.signature(EVERY[name]["layer"]).parameters)
    ],
)
def test_refused_arguments(name, arguments, error, message):
    """A layer refuses arguments that it cannot be built with, and says what it expected."""
    config = {argument: x for argument, x in EVERY[name].items() if argument != "num_kv_heads"} | arguments
    layer = config.pop("layer")
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        layer(**config)


def test_numbers_that_only_nearly_fit():
    """Sizes need to be whole, not the ratios that they are products of, and heads may leave some keys over."""
    layer = build(EVERY["mamba2"] | {"expand": 4 / 3, "n_groups": 1})
    assert (layer.intermediate_size, layer.num_heads) == (32, 4)
    assert layer(torch.ones(2, 5, 24))[0].shape == (2, 5, 24)
    for name in EXPANDED.split():
        for expand_ratio, heads in ((10, 2), (5, 4)):
            assert build(EVERY[name] | {"expand_ratio": expand_ratio}).num_heads == heads


def test_infinite_bounds_of_abc():
    """Infinite bounds of the logits of ABC are no bounds."""
    config = {"layer": ABCAttention} | SMALL
    layer = build(config | {"clamp_min": -math.inf, "clamp_max": math.inf})
    bounded, _ = layer(X)
    layer.clamp_min = layer.clamp_max = None
    assert torch.equal(bounded, layer(X)[0])


def test_expand_ratio():
    """The error of an expand_ratio that is too large says that it may be the default, and what to give."""
    with pytest.raises(ValueError, match="^hidden_size / num_heads must be at most 512, got 1024$"):
        LightNetAttention(hidden_size=2048, num_heads=2, expand_ratio=None)
    refused = r"^expand_ratio must be at most hidden_size = 64, got 128 \(128 is the default; "
    with pytest.raises(ValueError, match=refused + r"give expand_ratio, the number of keys of a head\)$"):
        HGRN2Attention(hidden_size=64)
    refused_size = (
        r"^hidden_size must be a multiple of num_heads = 7, got 1000 \(128 is the default; give expand_ratio"
    )
    for layer in (HGRN2Attention, LightNetAttention):
        with pytest.raises(ValueError, match=refused_size):
            layer(hidden_size=1000)
    with pytest.raises(
        ValueError, match=refused + r"expand_ratio=None means hidden_size // num_heads = 16\)$"
    ):
        HGRN2Attention(hidden_size=64, num_heads=4)
    assert HGRN2Attention(hidden_size=64, num_heads=4, expand_ratio=None).head_k_dim == 16
    assert LightNetAttention(hidden_size=64, num_heads=4).key_dim == 512  # which may have more keys


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (-1, ValueError, "must be at least 0, got -1"),
        ("a", TypeError, "must be an int, got str"),
        (2.0, TypeError, "must be an int, got float"),
    ],
)
def test_refused_batch_size(batch_size, error, message):
    """A state is made for a whole number of sequences, none included."""
    with pytest.raises(error, match=f"batch_size {message}"):
        build(CONFIG).init_state(batch_size)


# By annotation, what an argument has to be in the words of an error, and what it refuses.
TYPES = {"bool": ("a bool", ("False", 1)), "int": ("an int", ("2", 2.0)), "float": ("a number", ("2",))}


# Arguments of the peer without a use here, which are not looked at.
USED = ("lightning_attn", "rwkv7", "hgrn", "hgrn2")
UNUSED = {name: ["layer_idx"] for name in EVERY if name not in USED}
UNUSED["rebased"] += ["l_max"]
UNUSED["abc"] += ["gate_low_rank_dim", "gate_logit_normalizer"]


def wrong_types(name):
    """The arguments of a layer that have one type, values that they refuse, and in which words."""
    for argument, parameter in inspect.signature(EVERY[name]["layer"]).parameters.items():
        kind, *optional = parameter.annotation.split(" | ")
        if kind in TYPES and argument not in UNUSED.get(name, ()):
            expected, values = TYPES[kind]
            for value in values if optional else (*values, None):
                got = repr(value) if kind == "bool" else type(value).__name__
                or_none = " or None" if kind == "bool" and optional else ""
                yield argument, value, f"{argument} must be {expected}{or_none}, got {got}"


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [(name, *wrong) for name in EVERY for wrong in wrong_types(name)],
)
def test_refused_types(name, argument, value, message):
    """An ``if`` would take the string "False" of a configuration for True; a layer refuses it, as any other type."""
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        build(EVERY[name] | {argument: value})


@pytest.mark.parametrize(
    "config",
    [EVERY["abc"] | {"use_norm": False}, LINEAR | {"output_norm": "identity"}],
    ids=["abc", "linear_attn"],
)
def test_refused_flags_without_a_use(config):
    """An option that the others make useless is checked all the same."""
    with pytest.raises(TypeError, match="^elementwise_affine must be a bool"):
        build(config | {"elementwise_affine": "False"})


@pytest.mark.parametrize("name", ["gla", "rwkv6", "rwkv7", "abc", "hgrn"])
def test_no_affine_norm(name):
    """None stands for False."""
    layers = [build(EVERY[name] | {"elementwise_affine": affine}) for affine in (None, False, True)]
    none, without, affine = ({*layer.state_dict()} for layer in layers)
    assert none == without < affine


@every_layer
@pytest.mark.parametrize(
    ("dtype", "got"), [(torch.complex64, "complex64"), (torch.int32, "int32"), ("float32", "str")]
)
def test_refused_dtypes(config, dtype, got):
    message = f"dtype must be float32, bfloat16, float16 or float64, got {got}"
    with pytest.raises(TypeError, match=f"^{message}$"):
        config["layer"](**{name: x for name, x in config.items() if name != "layer"}, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ((None,), TypeError, "hidden_states must be a tensor, got NoneType"),
        ((X[0],), ValueError, "hidden_states must have shape (B, T, 16), got (5, 16)"),
        ((X[:, :, :8],), ValueError, "hidden_states must have shape (B, T, 16), got (2, 5, 8)"),
        ((X[:, :0],), ValueError, "hidden_states must have no empty dimension, got (2, 0, 16)"),
        ((X[:0],), ValueError, "hidden_states must have no empty dimension, got (0, 5, 16)"),
        ((X.long(),), TypeError, "hidden_states must be float32, bfloat16, float16 or float64, got int64"),
        ((X[:1], RecurrentState(RECURRENT, CONV)), ValueError,
         "state.recurrent must have shape (1, 2, 4, 8), got (2, "),
        ((X, RecurrentState(RECURRENT)), ValueError, "state.conv must hold 3 tensors, got 0"),
        ((X, MASK), TypeError, "state must be a RecurrentState, got Tensor (pass the state of the call before, "
            "whole; a mask is the keyword attention_mask)"),
        ((X, (RECURRENT, CONV)), TypeError, "state must be a RecurrentState, got tuple"),
        ((X, RecurrentState(None, CONV)), TypeError, "state.recurrent must be a tensor, got NoneType"),
        ((X, RecurrentState(RECURRENT.long(), CONV)), TypeError, "state.recurrent must be float32, bfloat16, "),
        ((X, RecurrentState(RECURRENT.to("meta"), CONV)), ValueError, "state.recurrent must be on cpu, got meta"),
        ((X, RecurrentState(RECURRENT, None)), TypeError, "state.conv must be a tuple of tensors, got NoneType"),
        ((X, RecurrentState(RECURRENT, (CONV[0], None, CONV[2]))), TypeError,
         "state.conv[1] must be a tensor, got NoneType"),
        ((X, RecurrentState(RECURRENT, (CONV[0], CONV[1], CONV[2].int()))), TypeError,
         "state.conv[2] must be float32, bfloat16, float16 or float64, got int32"),
        ((X, RecurrentState(RECURRENT, (CONV[0], CONV[2], CONV[1]))), ValueError,
         "state.conv[1] must have shape (2, 8, 4), got (2, 16, 4)"),
    ],
)  # fmt: skip
def test_refused_calls(call, error, message):
    """A layer refuses tokens and states of another kind, shape, dtype or device."""
    with pytest.raises(error, match=re.escape(message)):
        build(CONFIG)(*call)


@pytest.mark.parametrize(
    ("config", "field", "value", "error", "message"),
    [
        (LINEAR | NORMALIZED, "normalizer", (), TypeError, "must be a tensor, got tuple"),
        (LINEAR | NORMALIZED, "normalizer", torch.ones(2, 2, 4), ValueError,
         "must have shape (2, 2, 8), got (2, 2, 4)"),
        (LINEAR, "normalizer", torch.ones(2, 2, 8), ValueError, "must be () in this layer, got Tensor"),
        (LINEAR | {"feature_map": "hedgehog"}, "recurrent", torch.ones(2, 2, 8, 8), ValueError,
         "must have shape (2, 2, 16, 8), got (2, 2, 8, 8)"),
        (RETENTION, "position", (), TypeError, "must be a tensor, got tuple"),
        (RETENTION, "position", torch.zeros(2), TypeError, "must be an integer dtype, got float32"),
        (RETENTION, "position", torch.zeros(2, 1).long(), ValueError, "must have shape (2,), got (2, 1)"),
        (RETENTION, "position", torch.zeros(2, device="meta").long(), ValueError, "must be on cpu, got meta"),
        (LINEAR, "position", torch.zeros(2).long(), ValueError, "must be () in this layer, got Tensor"),
        (LINEAR, "conv", CONV, ValueError, "must hold 0 tensors, got 3"),
        (LINEAR, "shift", X[:, 0], ValueError, "must be () in this layer, got Tensor"),
        (LINEAR, "cache", X, TypeError, "must be a tuple of tensors, got Tensor"),
        (LINEAR, "cache", (X, X), ValueError, "must hold 0 tensors, got 2"),
        (RWKV6, "shift", (), TypeError, "must be a tensor, got tuple"),
        (RWKV6, "shift", X[:, :1], ValueError, "must have shape (2, 16), got (2, 1, 16)"),
        (RWKV6, "shift", X[:, 0].to("meta"), ValueError, "must be on cpu, got meta"),
        (RWKV6, "shift", X[:, 0].long(), TypeError, "must be float32, bfloat16, float16 or float64, got int64"),
        (ABC, "recurrent", HK, TypeError, "must be a tuple of tensors, got Tensor"),
        (ABC, "recurrent", (HK,), ValueError, "must hold 2 tensors, got 1"),
        (ABC, "recurrent", (HV, HV), ValueError, "[0] must have shape (2, 2, 4, 5), got (2, 2, 5, 8)"),
        (ABC, "normalizer", (), TypeError, "must be a tensor, got tuple"),
        (ABC, "normalizer", HK, ValueError, "must have shape (2, 2, 5), got (2, 2, 4, 5)"),
    ],
)  # fmt: skip
def test_refused_states(config, field, value, error, message):
    """A layer refuses a state in which a part is missing, too much or of another shape."""
    layer = build(config | SMALL)
    with pytest.raises(
        error, match=re.escape(f"state.{field}{message if message[0] == '[' else ' ' + message}")
    ):
        layer(X, layer.init_state(2)._replace(**{field: value}))


@every_layer
def test_hidden_states_of_another_dtype(config):
    """The error is PyTorch's own, since a layer does not know what its projections take."""
    layer = build(config)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.ones(2, 5, 24, dtype=dtype))


@every_layer
def test_nested_hidden_states(config):
    """Nested tensors are refused with the advice to pack their sequences, which works."""
    layer = build(config)
    sequences = [torch.randn(n, 24) for n in (3, 1, 5)]
    nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    with pytest.raises(
        TypeError, match="^hidden_states must be a dense tensor, got a nested one: .* cu_seqlens"
    ):
        layer(nested)
    y, _ = layer(nested.values()[None], cu_seqlens=nested.offsets())  # what the message says
    assert_close(y[:, 4:], layer(sequences[2][None])[0], 1e-5)


WHOLE_HISTORY = "attention_mask must have shape (2, 5), or (2, L) with L > 5 for a whole history, got"
CU_SEQLENS = torch.tensor([0, 5])


@pytest.mark.parametrize(
    ("rows", "layout", "error", "message"),
    [
        (2, {"attention_mask": [[1]]}, TypeError, "attention_mask must be a tensor, got list"),
        (2, {"attention_mask": MASK.float()}, TypeError,
         "attention_mask must be bool or an integer dtype, got float32 (nonzero at tokens"),
        (2, {"attention_mask": MASK[:, :4]}, ValueError, f"{WHOLE_HISTORY} (2, 4)"),
        (2, {"attention_mask": MASK[:1]}, ValueError, f"{WHOLE_HISTORY} (1, 5)"),
        (2, {"attention_mask": MASK[:, None, None]}, ValueError, f"{WHOLE_HISTORY} (2, 1, 1, 5)"),
        (2, {"attention_mask": MASK.to("meta")}, ValueError, "attention_mask must be on cpu, got meta"),
        (1, {"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a tensor, got list"),
        (1, {"cu_seqlens": CU_SEQLENS.short()}, TypeError, "cu_seqlens must be int32 or int64, got int16"),
        (1, {"cu_seqlens": CU_SEQLENS.float()}, TypeError, "cu_seqlens must be int32 or int64, got float32"),
        (1, {"cu_seqlens": CU_SEQLENS[0]}, ValueError, "cu_seqlens must have shape [N + 1] with N >= 1, got ()"),
        (2, {"cu_seqlens": CU_SEQLENS}, ValueError, "cu_seqlens needs hidden_states of one row (B = 1), got B = 2"),
        (1, {"cu_seqlens": torch.tensor([0, 2, 2, 5]), "state": RecurrentState(RECURRENT, CONV)}, ValueError,
         "state.recurrent must have shape (3, 2, 4, 8), got (2, 2, 4, 8)"),
        (1, {"cu_seqlens": CU_SEQLENS, "attention_mask": MASK[:1]}, ValueError,
         "attention_mask and cu_seqlens exclude each other"),
    ],
)  # fmt: skip
def test_refused_layouts(rows, layout, error, message):
    """A layer refuses masks and bounds of sequences that do not fit its tokens."""
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        build(CONFIG)(X[:rows], **layout)


@pytest.mark.parametrize(
    ("lower_bound", "error", "message"),
    [
        (0.5, TypeError, "must be a tensor, got float"),
        (torch.zeros(24).long(), TypeError, "must be float32, bfloat16, float16 or "),
        (torch.zeros(8), ValueError, "must have shape (24,), got (8,)"),
        (torch.zeros(5, 24), ValueError, "must have shape (24,), got (5, 24)"),
        (torch.zeros(24, device="meta"), ValueError, "must be on cpu, got meta"),
    ],
)
@pytest.mark.parametrize("name", ["hgrn", "hgrn2"])
def test_refused_lower_bounds(name, lower_bound, error, message):
    """Layers with forget gates refuse a lower bound that is no tensor of one number a channel."""
    with pytest.raises(error, match=f"^lower_bound {re.escape(message)}"):
        build(EVERY[name])(torch.ones(2, 5, 24), lower_bound=lower_bound)


def test_autocast_takes_any_but_float64(device):
    """Under autocast a layer takes bfloat16 as it does float32, compiled too; float64 is refused by PyTorch."""
    layer = build(CONFIG, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        for call in (layer, compiled):
            assert call(X.to(device, torch.bfloat16))[0].dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            layer(X.to(device, torch.float64))


@pytest.mark.parametrize("given", [[0, 5, 3, 9], [4, 5], [0, 99]], ids=str)
@every_layer
def test_wrong_bounds(config, given):
    """On a CPU a layer refuses them in the words of the ops, whichever of its parts reads them first."""
    layer = build(config)
    with pytest.raises(ValueError, match=rf"^cu_seqlens must .*got {re.escape(str(given))}"):
        layer(torch.randn(1, 9, 24), cu_seqlens=torch.tensor(given))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU refuses such bounds")
@pytest.mark.parametrize(
    ("given", "taken"), [([0, 5, 3, 9], [0, 5, 5, 9]), ([-2, 7, 4], [0, 7, 7]), ([0, 99, 1], [0, 9, 9])]
)
@every_layer
def test_wrong_bounds_on_a_gpu(config, given, taken, device):
    """They are taken as each at least the one before, within the tokens, since their values are not read."""
    layer = build(config, device=device)
    x, state = torch.randn(1, 9, 24, device=device), random_state(layer, len(given) - 1)
    y, new = layer(x, state, cu_seqlens=torch.tensor(given, device=device))
    expected, after = layer(x, state, cu_seqlens=torch.tensor(taken, device=device))
    assert_close(y, expected, 1e-6)
    assert_states_close(new, after, 1e-6)


@pytest.mark.parametrize(
    "part",
    [RWKV7FeedForward(24, 8), ShortConvolution(24, 4), SoftmaxAttention(24, 2)],
    ids=lambda part: type(part).__name__,
)
def test_wrong_bounds_in_plain_pytorch(part):
    """What reads bounds in PyTorch alone refuses wrong ones too, in graphs as well."""
    compiled = torch.compile(part, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(1, 9, 24)
    y, _ = compiled(x, cu_seqlens=torch.tensor([0, 4, 4, 7]))
    assert_close(y[:, :7], part(x, cu_seqlens=torch.tensor([0, 4, 4, 7]))[0][:, :7], 1e-6)
    for call in (part, compiled):
        for given in ([0, 5, 3, 9], [1, 5, 5, 9], [0, 5, 5, 10]):
            with pytest.raises(ValueError, match=rf"^cu_seqlens must .*got {re.escape(str(given))}"):
                call(x, cu_seqlens=torch.tensor(given))


@pytest.mark.parametrize(
    "layer",
    [Comba, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, KimiDeltaAttention],
    ids=lambda x: x.__name__,
)
def test_heads_far_wider_than_the_model(layer):
    """The default size of a head is for large models: in a small one it makes projections of many times its size."""
    with pytest.warns(UserWarning, match=r"far wider than hidden_size = 16; .* as head_dim=3$"):
        layer(hidden_size=16, num_heads=5)
    layer(hidden_size=16, num_heads=5, head_dim=3)
