"""What the layer computes, in every configuration, and in every precision."""

from __future__ import annotations

import pytest
import torch

from flacompose.layers import RecurrentState

from .truth import ACTIVATIONS, assert_close, assert_states_close, build, random_state, row, sequence, tensors

BASE = {"hidden_size": 24, "num_heads": 4}
FULL = {"use_short_conv": True, "conv_bias": True, "num_kv_heads": 2, "feature_map": "silu"}
CONFIGS = [
    {},
    {"mode": "fused_recurrent"},
    {"use_short_conv": True},
    {"use_short_conv": True, "conv_bias": True, "conv_size": 3, "num_kv_heads": 2},
    {"use_short_conv": True, "conv_size": 1},
    {"num_kv_heads": 1, "expand_k": 1.0, "expand_v": 2.0, "gate_low_rank_dim": 5},
    {"use_output_gate": False},
    {"fuse_norm": False},
    {"elementwise_affine": False, "norm_eps": 0.1},
    {"clamp_min": -0.02},
    {"gate_logit_normalizer": 3},
    *({"gate_fn": name, "feature_map": name} for name in ACTIVATIONS),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(config, dtype, device):
    config = BASE | config
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
def test_bfloat16(autocast, device):
    config = BASE | FULL
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


@pytest.mark.parametrize("config", [FULL, {"fuse_norm": False, "clamp_min": -0.05}], ids=["full", "plain"])
def test_gradients(config):
    """In float64 against finite differences: the input, every parameter, the state that comes in."""
    layer = build({"hidden_size": 8, "num_heads": 2} | config | {"num_kv_heads": 1}, dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)
    state = random_state(layer, 1)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    leaves = [t.detach().requires_grad_() for t in (x, *tensors(state), *values)]
    count = 1 + len(tensors(state))

    def run(x, *rest):
        given = RecurrentState(rest[0], rest[1 : count - 1])
        y, new = torch.func.functional_call(
            layer, dict(zip(names, rest[count - 1 :], strict=True)), (x, given)
        )
        return y, *tensors(new)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


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
    layer = build(BASE)
    call = {name: x if isinstance(x, torch.Tensor) else torch.ones(x) for name, x in call.items()}
    with pytest.raises(error, match=message):
        layer(call.pop("hidden_states", torch.ones(2, 5, 24)), **call)


def test_refused_states():
    layer, conv = build(BASE), build(BASE | {"use_short_conv": True})
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
