"""What the layer computes, in every configuration, and in every precision."""

from __future__ import annotations

import pytest
import torch
from contract.graphs import recorded

from flacompose.layers.rotary import rotary

from .truth import (
    ACTIVATIONS,
    CONV,
    GLA,
    LAYERS,
    LINEAR,
    NORMALIZED,
    RETENTION,
    SIMPLE_GLA,
    assert_close,
    assert_states_close,
    build,
    described,
    floats,
    random_state,
    row,
    sequence,
    tensors,
    with_floats,
)

FULL = CONV | {"feature_map": "silu"}
CONFIGS = [
    GLA,
    GLA | {"mode": "fused_recurrent"},
    GLA | {"use_short_conv": True},
    GLA | {"use_short_conv": True, "conv_bias": True, "conv_size": 3, "num_kv_heads": 2},
    GLA | {"use_short_conv": True, "conv_size": 1},
    GLA | {"num_kv_heads": 1, "expand_k": 1.0, "expand_v": 2.0, "gate_low_rank_dim": 5},
    GLA | {"use_output_gate": False},
    GLA | {"fuse_norm": False},
    GLA | {"elementwise_affine": False, "norm_eps": 0.1},
    GLA | {"clamp_min": -0.02},
    GLA | {"gate_logit_normalizer": 3},
    *(GLA | {"gate_fn": name, "feature_map": name} for name in ACTIVATIONS),
    SIMPLE_GLA,
    SIMPLE_GLA | CONV,
    SIMPLE_GLA
    | {"mode": "fused_recurrent", "use_short_conv": False, "num_kv_heads": 1, "feature_map": "relu"},
    SIMPLE_GLA | {"expand_k": 0.5, "expand_v": 2.0, "gate_logit_normalizer": 3, "fuse_norm": False},
    SIMPLE_GLA | {"gate_fn": "sigmoid", "elementwise_affine": False, "norm_eps": 0.1},
    LINEAR,
    LINEAR | NORMALIZED,
    LINEAR | {"mode": "fused_recurrent", "feature_map": "hedgehog", "do_feature_map_norm": True},
    LINEAR | {"feature_map": "hedgehog", "tie_feature_map_qk": True, "norm_q": True, "num_kv_heads": 1},
    LINEAR | {"feature_map": "t2r", "expand_v": 2.0, "elementwise_affine": False, "norm_eps": 0.1},
    LINEAR | {"feature_map": "dpfp", "do_feature_map_norm": True, "norm_q": True, "norm_k": True},
    LINEAR | {"feature_map": "relu", "expand_k": 0.5},
    LINEAR | {"feature_map": "identity", "output_norm": "identity"},
    RETENTION,
    RETENTION | CONV,
    RETENTION
    | {"mode": "fused_recurrent", "num_kv_heads": 1, "feature_map": "relu", "use_output_gate": False},
    RETENTION | {"expand_k": 1 / 3, "expand_v": 1.0, "fuse_norm": False, "gate_fn": "gelu"},
    RETENTION | {"elementwise_affine": False, "norm_eps": 0.1},
]


@pytest.mark.parametrize("config", CONFIGS, ids=described)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(config, dtype, device):
    layer = build(config, device=device, dtype=dtype)
    for T in (1, 67):
        x = torch.randn(2, T, 24, device=device, dtype=dtype)
        state = random_state(layer, 2)
        y, new = layer(x, state)
        relative = 1e-11 if dtype == torch.float64 else 2e-5
        assert y.dtype == x.dtype
        assert new.recurrent.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for b in range(2):
            expected, after = sequence(config, layer.state_dict(), x[b], row(state, b))
            assert_close(y[b], expected, relative)
            assert_states_close(row(new, b), after, relative)


@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
@pytest.mark.parametrize(
    "config", [GLA | FULL, SIMPLE_GLA | FULL, LINEAR | NORMALIZED, RETENTION | FULL], ids=LAYERS
)
def test_bfloat16(config, autocast, device):
    layer = build(config, device=device)
    if not autocast:
        layer = layer.to(torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        zeros = layer.init_state(2)
        assert zeros.recurrent.dtype == torch.float32
        x = torch.randn(2, 40, 24, device=device, dtype=torch.float32 if autocast else torch.bfloat16)
        y, state = layer(x, zeros)
        assert [t.dtype for t in tensors(state)] == [t.dtype for t in tensors(zeros)]
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.parameters())
    for b in range(2):
        # Eight projections and activations on the way, each rounded to 8 bits.
        expected, after = sequence(config, layer.state_dict(), x[b])
        assert_close(y[b], expected, 2e-2)
        assert_states_close(row(state, b), after, 2e-2)


@pytest.mark.parametrize(
    "config", [*LAYERS.values(), GLA | {"fuse_norm": False, "clamp_min": -0.05}], ids=[*LAYERS, "plain"]
)
def test_gradients(config):
    """In float64 against finite differences: the input, every parameter, the state that comes in."""
    layer = build(config | {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1}, dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)
    state = random_state(layer, 1)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    leaves = [t.detach().requires_grad_() for t in (x, *floats(state), *values)]
    count = 1 + len(floats(state))

    def run(x, *rest):
        given = with_floats(state, rest[: count - 1])
        parameters = dict(zip(names, rest[count - 1 :], strict=True))
        y, new = torch.func.functional_call(layer, parameters, (x, given))
        return y, *floats(new)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(
    ("mode", "T", "form"),
    [("chunk", 2, "chunk"), ("fused_recurrent", 2, "recurrent"), ("chunk", 1, "recurrent")],
)
def test_form(mode, T, form, config, device):
    """Of the op: that of the mode, and the recurrent one for a single token."""
    with recorded() as calls:
        build(config | {"mode": mode}, device=device)(torch.randn(1, T, 24, device=device))
    assert {op.name().rsplit("_", 1)[1] for op, _, _ in calls} == {form}


def test_one_map_of_features_for_both():
    layer = build(LINEAR | {"tie_feature_map_qk": True})
    assert layer.feature_map_q is layer.feature_map_k
    assert layer.feature_map_q is not build(LINEAR).feature_map_k


@pytest.mark.parametrize("start", [0, 10_000])
def test_rotary_scores_depend_on_distance_alone(start):
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    T = 50
    position = start + torch.arange(T)[None]
    turned_q, turned_k = rotary(q.expand(1, T, 1, 32), k.expand(1, T, 1, 32), position)
    scores = turned_q[0, :, 0] @ turned_k[0, :, 0].T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
    torch.testing.assert_close(scores[0, 0], (q * k).sum())
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"hidden_states": (2, 5)}, ValueError, r"hidden_states must have shape \(B, T, 24\), got \(2, 5\)"),
        (
            {"hidden_states": (2, 5, 8)},
            ValueError,
            r"hidden_states must have shape \(B, T, 24\), got \(2, 5, 8\)",
        ),
        (
            {"hidden_states": torch.ones(2, 5, 24, dtype=torch.long)},
            TypeError,
            "hidden_states must be float32, bfloat16, float16 or float64, got int64",
        ),
        (
            {"attention_mask": torch.ones(2, 4).bool()},
            ValueError,
            r"attention_mask must have shape \(2, 5\), .* got \(2, 4\)",
        ),
        (
            {"attention_mask": torch.ones(2, 1, 5, 5).bool()},
            ValueError,
            r"attention_mask must have .* got \(2, 1, 5, 5\)",
        ),
        (
            {"attention_mask": torch.ones(3, 5).bool()},
            ValueError,
            r"attention_mask must have .* got \(3, 5\)",
        ),
        (
            {"attention_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")},
            ValueError,
            "attention_mask must be on cpu, got meta",
        ),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"cu_seqlens needs hidden_states .* got B = 2"),
        (
            {"hidden_states": (1, 5, 24), "cu_seqlens": torch.tensor(5)},
            ValueError,
            r"cu_seqlens must have shape \[N \+ 1\] with N >= 1, got \(\)",
        ),
        (
            {"hidden_states": (1, 5, 24), "cu_seqlens": (2,)},
            TypeError,
            "cu_seqlens must be int32 or int64, got float32",
        ),
        (
            {"hidden_states": (1, 5, 24), "cu_seqlens": torch.tensor([0, 5]), "attention_mask": (1, 5)},
            ValueError,
            "attention_mask and cu_seqlens exclude each other",
        ),
    ],
)
def test_refused_inputs(call, error, message):
    layer = build(GLA)
    call = {name: x if isinstance(x, torch.Tensor) else torch.ones(x) for name, x in call.items()}
    with pytest.raises(error, match=message):
        layer(call.pop("hidden_states", torch.ones(2, 5, 24)), **call)


def test_refused_states():
    layer, conv = build(GLA), build(GLA | {"use_short_conv": True})
    x = torch.randn(2, 5, 24)
    with pytest.raises(
        ValueError, match=r"state.recurrent must have shape \(2, 4, 3, 6\), got \(3, 4, 3, 6\)"
    ):
        layer(x, layer.init_state(3))
    with pytest.raises(ValueError, match="state.conv must hold 3 tensors, got 0"):
        conv(x, layer.init_state(2))
    with pytest.raises(ValueError, match="state.conv must hold 0 tensors, got 3"):
        layer(x, conv.init_state(2))
    with pytest.raises(
        ValueError, match=r"state.recurrent must have shape \(3, 4, 3, 6\), got \(2, 4, 3, 6\)"
    ):
        layer(x[:1], layer.init_state(2), cu_seqlens=torch.tensor([0, 1, 1, 5]))
