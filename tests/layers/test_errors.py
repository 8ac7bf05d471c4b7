"""What is refused, and in which words."""

from __future__ import annotations

import math
import re

import pytest
import torch

from flacompose.layers import (
    ABCAttention,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    LightNetAttention,
    Mamba2,
    RecurrentState,
    ShortConvolution,
)

from .truth import (
    EVERY,
    GLA,
    LAYERS,
    LINEAR,
    NORMALIZED,
    RETENTION,
    assert_close,
    assert_states_close,
    build,
    random_state,
    tensors,
)

SMALL = {"hidden_size": 16, "num_heads": 2}
CONFIG = GLA | SMALL | {"use_short_conv": True}
CONFIGS = {name: config | SMALL for name, config in LAYERS.items()}
each_layer = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
every_layer = pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
X = torch.ones(2, 5, 16)
MASK = torch.ones(2, 5, dtype=torch.long)
RECURRENT = torch.zeros(2, 2, 4, 8)
CONV = (torch.zeros(2, 8, 4), torch.zeros(2, 8, 4), torch.zeros(2, 16, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"hidden_size": 2048, "num_heads": 2},
            "hidden_size * expand_k / num_heads must be at most 256, got 512",
        ),
        (
            {"hidden_size": 1024, "num_heads": 2},
            "hidden_size * expand_v / num_heads must be at most 256, got 512",
        ),
        (
            {"expand_k": math.nan},
            "hidden_size * expand_k must be a positive multiple of num_heads = 4, got nan",
        ),
        ({"gate_logit_normalizer": math.nan}, "gate_logit_normalizer must be positive, got nan"),
        ({"clamp_min": math.nan}, "clamp_min must be at most 0, as log-decays are, got nan"),
        ({"norm_eps": -1e-5}, "norm_eps must be at least 0, got -1e-05"),
        ({"norm_eps": math.nan}, "norm_eps must be at least 0, got nan"),
        ({"gate_low_rank_dim": 0}, "gate_low_rank_dim must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must divide num_heads = 4, got 0"),
    ],
)
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GatedLinearAttention(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gate_logit_normalizer": "a"}, "gate_logit_normalizer must be a number, got str"),
        ({"clamp_min": "a"}, "clamp_min must be a number, got str"),
        ({"gate_low_rank_dim": 2.0}, "gate_low_rank_dim must be an int, got float"),
    ],
)
def test_refused_types_of_the_gate(arguments, message):
    with pytest.raises(TypeError, match=message):
        GatedLinearAttention(**SMALL | arguments)


@each_layer
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden_size": 32.0}, TypeError, "hidden_size must be an int, got float"),
        ({"hidden_size": "32"}, TypeError, "hidden_size must be an int, got str"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be an int, got float"),
        ({"num_kv_heads": 2.0}, TypeError, "num_kv_heads must be an int, got float"),
        ({"num_kv_heads": "2"}, TypeError, "num_kv_heads must be an int, got str"),
        ({"expand_k": "1"}, TypeError, "expand_k must be a number, got str"),
        ({"norm_eps": None}, TypeError, "norm_eps must be a number, got NoneType"),
    ],
)
def test_refused_of_each_layer(config, arguments, error, message):
    with pytest.raises(error, match=message):
        build(config | arguments)


@every_layer
def test_infinite_norm_eps(config):
    with pytest.raises(ValueError, match="^norm_eps must be finite, got inf$"):
        build(config | {"norm_eps": math.inf})


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (GatedSlotAttention, {"scale": math.nan}, "scale must be finite, got nan"),
        (GatedSlotAttention, {"scale": -math.inf}, "scale must be finite, got -inf"),
        *(
            (
                ABCAttention,
                {"clamp_min": None, "clamp_max": None, name: value},
                f"{name} must be finite or {none}",
            )
            for name, none in (("clamp_min", -math.inf), ("clamp_max", math.inf))
            for value in (math.nan, -none)
        ),
        (
            GatedLinearAttention,
            {"clamp_min": math.inf},
            "clamp_min must be at most 0, as log-decays are, got inf",
        ),
        (Mamba2, {"conv_init": math.inf}, "conv_init must be finite, got inf"),
        (Mamba2, {"A_init_range": (1, math.inf)}, "A_init_range[1] must be finite, got inf"),
        (Mamba2, {"dt_max": math.inf}, "dt_max must be finite, got inf"),
        (Mamba2, {"dt_init_floor": math.nan}, "dt_init_floor must be finite, got nan"),
        (Mamba2, {"dt_limit": (math.inf, math.inf)}, "dt_limit[0] must be finite, got inf"),
    ],
)
def test_numbers_that_are_not_finite(layer, arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        layer(**arguments)


def test_infinite_bounds_of_abc():
    config = {"layer": ABCAttention} | SMALL
    layer = build(config | {"clamp_min": -math.inf, "clamp_max": math.inf})
    bounded, _ = layer(X)
    layer.clamp_min = layer.clamp_max = None
    assert torch.equal(bounded, layer(X)[0])


@pytest.mark.parametrize("layer", [HGRN2Attention, LightNetAttention])
@pytest.mark.parametrize(
    "arguments", [{"num_heads": 2, "expand_ratio": None}, {"expand_ratio": 256, "hidden_size": 514}], ids=str
)
def test_value_size_of_expanded_heads(layer, arguments):
    with pytest.raises(ValueError, match="^hidden_size / num_heads must be at most 256, got (512|257)$"):
        layer(**{"hidden_size": 1024} | arguments)


def test_expand_ratio():
    with pytest.raises(ValueError, match="^hidden_size / num_heads must be at most 256, got 512$"):
        LightNetAttention(hidden_size=1024, num_heads=2, expand_ratio=128)
    refused = r"^expand_ratio must be at most hidden_size = 64, got 128 \(128 is the default; "
    with pytest.raises(ValueError, match=refused + r"give expand_ratio, the number of keys of a head\)$"):
        HGRN2Attention(hidden_size=64)
    with pytest.raises(
        ValueError, match=refused + r"expand_ratio=None means hidden_size // num_heads = 16\)$"
    ):
        HGRN2Attention(hidden_size=64, num_heads=4)
    assert HGRN2Attention(hidden_size=64, num_heads=4, expand_ratio=None).head_k_dim == 16
    assert LightNetAttention(hidden_size=64, num_heads=4).key_dim == 512  # which may have more keys


@pytest.mark.parametrize("name", [["relu"], "softmax", None], ids=str)
@pytest.mark.parametrize(
    ("config", "argument", "choices"),
    [
        *(
            (config, argument, "relu, sigmoid, logsigmoid, silu, swish, sqrelu, gelu")
            for config, argument in (
                ("rwkv6", "gate_fn"),
                ("gla", "gate_fn"),
                ("lightning_attn", "hidden_act"),
                ("mamba2", "hidden_act"),
            )
        ),
        ("linear_attn", "feature_map", "hedgehog, t2r, elementwise_product, dpfp, elu, relu, identity"),
    ],
)
def test_refused_activations(config, argument, choices, name):
    message = f"{argument} must be one of {choices}, got {name!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build(EVERY[config] | {argument: name})


@pytest.mark.parametrize(
    ("conv_size", "error", "message"),
    [
        (0, ValueError, "conv_size must be at least 1, got 0"),
        ("a", TypeError, "conv_size must be an int, got str"),
    ],
)
@pytest.mark.parametrize("use_short_conv", [True, False])
@pytest.mark.parametrize(
    "config", ["gla", "simple_gla", "retention", "hgrn", "hgrn2", "lightnet", "gsa", "abc"]
)
def test_refused_conv_size(config, use_short_conv, conv_size, error, message):
    with pytest.raises(error, match=f"^{message}"):
        build(EVERY[config] | {"use_short_conv": use_short_conv, "conv_size": conv_size})


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (-1, ValueError, "must be at least 0, got -1"),
        ("a", TypeError, "must be an int, got str"),
        (2.0, TypeError, "must be an int, got float"),
    ],
)
@each_layer
def test_refused_batch_size(config, batch_size, error, message):
    with pytest.raises(error, match=f"batch_size {message}"):
        build(config).init_state(batch_size)


@pytest.mark.parametrize("shape", [(2, 0, 16), (0, 5, 16)], ids=str)
@each_layer
def test_empty_dimensions(config, shape):
    message = f"hidden_states must have no empty dimension, got {shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        build(config)(torch.ones(shape))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ((None,), TypeError, "hidden_states must be a tensor, got NoneType"),
        (
            (X, MASK),
            TypeError,
            "state must be a RecurrentState, got Tensor (a mask is the keyword attention_mask)",
        ),
        ((X, (RECURRENT, CONV)), TypeError, "state must be a RecurrentState, got tuple"),
        ((X, RecurrentState(None, CONV)), TypeError, "state.recurrent must be a tensor, got NoneType"),
        (
            (X, RecurrentState(RECURRENT.long(), CONV)),
            TypeError,
            "state.recurrent must be float32, bfloat16, ",
        ),
        (
            (X, RecurrentState(RECURRENT.to("meta"), CONV)),
            ValueError,
            "state.recurrent must be on cpu, got meta",
        ),
        (
            (X, RecurrentState(RECURRENT, None)),
            TypeError,
            "state.conv must be a tuple of tensors, got NoneType",
        ),
        (
            (X, RecurrentState(RECURRENT, (CONV[0], None, CONV[2]))),
            TypeError,
            "state.conv[1] must be a tensor, got NoneType",
        ),
        (
            (X, RecurrentState(RECURRENT, (CONV[0], CONV[1], CONV[2].int()))),
            TypeError,
            "state.conv[2] must be float32, bfloat16, float16 or float64, got int32",
        ),
        (
            (X, RecurrentState(RECURRENT, (CONV[0], CONV[2], CONV[1]))),
            ValueError,
            "state.conv[1] must have shape (2, 8, 4), got (2, 16, 4)",
        ),
    ],
)
def test_refused_calls(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build(CONFIG)(*call)


@pytest.mark.parametrize(
    ("config", "field", "value", "error", "message"),
    [
        (LINEAR | NORMALIZED, "normalizer", (), TypeError, "must be a tensor, got tuple"),
        (
            LINEAR | NORMALIZED,
            "normalizer",
            torch.ones(2, 2, 4),
            ValueError,
            "must have shape (2, 2, 8), got (2, 2, 4)",
        ),
        (LINEAR, "normalizer", torch.ones(2, 2, 8), ValueError, "must be () in this layer, got Tensor"),
        (
            LINEAR | {"feature_map": "hedgehog"},
            "recurrent",
            torch.ones(2, 2, 8, 8),
            ValueError,
            "must have shape (2, 2, 16, 8), got (2, 2, 8, 8)",
        ),
        (RETENTION, "position", (), TypeError, "must be a tensor, got tuple"),
        (RETENTION, "position", torch.zeros(2), TypeError, "must be an integer dtype, got float32"),
        (RETENTION, "position", torch.zeros(2, 1).long(), ValueError, "must have shape (2,), got (2, 1)"),
        (RETENTION, "position", torch.zeros(2, device="meta").long(), ValueError, "must be on cpu, got meta"),
        (LINEAR, "position", torch.zeros(2).long(), ValueError, "must be () in this layer, got Tensor"),
    ],
)
def test_refused_states(config, field, value, error, message):
    layer = build(config | SMALL)
    with pytest.raises(error, match=re.escape(f"state.{field} {message}")):
        layer(X, layer.init_state(2)._replace(**{field: value}))


@every_layer
def test_hidden_states_of_another_dtype(config):
    """PyTorch's own error, since a layer does not know what its projections take."""
    layer = build(config)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.ones(2, 5, 24, dtype=dtype))


@every_layer
def test_nested_hidden_states(config):
    layer = build(config)
    sequences = [torch.randn(n, 24) for n in (3, 1, 5)]
    nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    with pytest.raises(
        TypeError, match="^hidden_states must be a dense tensor, got a nested one: .* cu_seqlens"
    ):
        layer(nested)
    y, _ = layer(nested.values()[None], cu_seqlens=nested.offsets())  # what the message says
    assert_close(y[:, 4:], layer(sequences[2][None])[0], 1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_mask", [[1]], "must be a tensor, got list"),
        ("attention_mask", MASK.float(), "must be bool or an integer dtype, got float32 (nonzero at tokens"),
        ("cu_seqlens", [0, 5], "must be a tensor, got list"),
        ("cu_seqlens", torch.tensor([0, 5], dtype=torch.int16), "must be int32 or int64, got int16"),
    ],
)
def test_refused_layouts(name, value, message):
    with pytest.raises(TypeError, match=re.escape(f"{name} {message}")):
        build(CONFIG)(X[:1] if name == "cu_seqlens" else X, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", None, "must be a tensor, got NoneType"),
        ("x", X.long(), "must be float32, bfloat16, float16 or float64, got int64"),
        ("state", (CONV[2],), "must be a tensor, got tuple"),
        ("state", CONV[2].long(), "must be float32, bfloat16, float16 or float64, got int64"),
        ("lengths", [1, 5], "must be a tensor, got list"),
        ("lengths", torch.ones(2), "must be an integer dtype, got float32"),
        ("lengths", torch.ones(2, dtype=torch.bool), "must be an integer dtype, got bool"),
        ("cu_seqlens", (0, 5), "must be a tensor, got tuple"),
    ],
)
def test_refused_by_the_convolution(name, value, message):
    with pytest.raises(TypeError, match=re.escape(f"{name} {message}")):
        ShortConvolution(16, 4)(**{"x": X} | {name: value})


def test_autocast_takes_any_but_float64(device):
    layer = build(CONFIG, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for call in (layer, compiled):
            assert call(X.to(device, torch.bfloat16))[0].dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            layer(X.to(device, torch.float64))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4), ValueError, "hidden_size must be at least 1, got 0"),
        ((16.0, 4), TypeError, "hidden_size must be an int, got float"),
        ((16, 0), ValueError, "kernel_size must be at least 1, got 0"),
        ((16, "4"), TypeError, "kernel_size must be an int, got str"),
    ],
)
def test_refused_convolutions(arguments, error, message):
    with pytest.raises(error, match=message):
        ShortConvolution(*arguments)


def test_init_state_on_meta():
    with torch.device("meta"):
        state = GatedLinearAttention(**SMALL, use_short_conv=True).init_state(3)
    assert all(t.is_meta for t in tensors(state))
    assert [tuple(c.shape) for c in state.conv] == [(3, 8, 4), (3, 8, 4), (3, 16, 4)]


@pytest.mark.parametrize(
    ("given", "taken"), [([0, 5, 3, 9], [0, 5, 5, 9]), ([-2, 7, 4], [0, 7, 7]), ([0, 99, 1], [0, 9, 9])]
)
@every_layer
def test_bounds_that_do_not_ascend(config, given, taken, device):
    """As in the ops: each at least the one before, within the tokens."""
    layer = build(config, device=device)
    x, state = torch.randn(1, 9, 24, device=device), random_state(layer, len(given) - 1)
    y, new = layer(x, state, cu_seqlens=torch.tensor(given, device=device))
    expected, after = layer(x, state, cu_seqlens=torch.tensor(taken, device=device))
    assert_close(y, expected, 1e-6)
    assert_states_close(new, after, 1e-6)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64], ids=str)
def test_lengths_outside_the_tokens(dtype, device):
    conv = ShortConvolution(16, 4, device=device)
    x, state = torch.randn(2, 200, 16, device=device), torch.randn(2, 16, 4, device=device)
    _, new = conv(x[:, :9], state, lengths=torch.tensor([-3, 99], device=device, dtype=dtype))
    _, expected = conv(x[:, :9], state, lengths=torch.tensor([0, 9], device=device))
    assert torch.equal(new, expected)
    _, new = conv(x, state, lengths=torch.tensor([1, 100], device=device, dtype=dtype))  # T over int8
    _, expected = conv(x, state, lengths=torch.tensor([1, 100], device=device))
    assert torch.equal(new, expected)
