"""What every layer keeps, whatever it computes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.graphs import recorded
from helpers.backend_calls import compiled
from helpers.operators import operator
from helpers.truth import (
    ACTIVATIONS,
    BOUNDED,
    CONV,
    DISTINCT,
    EVERY,
    GLA,
    LINEAR,
    RETENTION,
    SHORT,
    SIMPLE_GLA,
    BoundedHGRN,
    assert_close,
    assert_states_close,
    assert_true,
    build,
    described,
    floats,
    precision,
    random_state,
    row,
    tensors,
    tokens_of,
    with_floats,
)
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

import flacompose
from flacompose.layers import MLSTM, DeltaNet, RecurrentState
from flacompose.ops._composed import logsumexp

# Mamba-3 with several keys a token differs from that with one in values, gradients and layouts, which name it below.
CASES = {name: config for name, config in EVERY.items() if name != "mamba3 mimo"} | BOUNDED
LIGHTNING, MAMBA2 = (
    EVERY["lightning_attn"],
    {name: EVERY["mamba2"][name] for name in list(EVERY["mamba2"])[:4]},
)
RWKV6 = EVERY["rwkv6"] | {"num_heads": 3}
RWKV7 = EVERY["rwkv7"]
HGRN, HGRN2, LIGHTNET, GSA, ABC, DELTA_NET, GATED_DELTANET, KDA, PRODUCT, GDN2, COMBA, RODIMUS = (
    {
        name: value
        for name, value in EVERY[layer].items()
        if name not in {*SHORT, "num_kv_heads", "num_v_heads"}
    }
    | {"hidden_size": 24}
    for layer in (
        "hgrn",
        "hgrn2",
        "lightnet",
        "gsa",
        "abc",
        "delta_net",
        "gated_deltanet",
        "kda",
        "gated_deltaproduct",
        "gdn2",
        "comba",
        "rodimus",
    )
)
NO_CONV = {"use_short_conv": False}
# What changes how tokens meet pads, bounds of sequences and states.
LAYOUTS = CASES | {
    "mamba3 mimo": EVERY["mamba3 mimo"],
    "no conv": GLA | {"fuse_norm": False},
    "conv of 1": GLA | CONV | {"mode": "fused_recurrent", "conv_size": 1},
    "lightning recurrent": LIGHTNING | {"mode": "fused_recurrent"},
    "lightning of another decay": LIGHTNING
    | {"decay": "tnl", "head_dim": 5, "hidden_act": "gelu", "norm_eps": 0.1},
    "mamba2 of one group": MAMBA2,
    # A least time step is none of a pad's.
    "mamba2 of bounded steps": MAMBA2
    | {"n_groups": 3, "conv_kernel": 3, "use_bias": True, "dt_limit": (0.4, 0.9)},
    "wide rwkv6": RWKV6 | {"expand_k": 1.0, "expand_v": 2.0, "gate_fn": "sigmoid", "norm_eps": 0.1},
    "rwkv7 of layer 0": RWKV7
    | {"layer_idx": 0, "num_hidden_layers": None, "value_dim": 48, "mode": "fused_recurrent"},
    "griffin recurrent": EVERY["griffin"] | {"mode": "fused_recurrent", "hidden_act": "silu", "conv_size": 1},
    "hgrn without conv": HGRN,
    "hgrn recurrent": BOUNDED["bounded hgrn"]
    | {"mode": "fused_recurrent", "elementwise_affine": False, "norm_eps": 0.1},
    "hgrn of layer 0": HGRN | {"layer": BoundedHGRN, "layer_idx": 0},
    "gsa of a feature map": EVERY["gsa"] | {"feature_map": "t2r"},
    # Pads have queries and keys that are not 0, and a beta of 1.
    "delta_net without beta": DELTA_NET
    | NO_CONV
    | {"use_beta": False, "qk_activation": "elu", "qk_norm": "sum", "mode": "fused_recurrent"},
    "kda of a lower bound": KDA | NO_CONV | {"lower_bound": -5, "safe_gate": True, "allow_neg_eigval": True},
    "gated_deltaproduct without decay": PRODUCT
    | NO_CONV
    | {
        "use_forget_gate": False,
        "num_householder": 3,
        "head_dim": 2,
        "expand_v": 150,
        "use_output_gate": False,
    },
    "gla of large heads": GLA | {"expand_v": 50.0, "num_kv_heads": 2},
    "gsa of large heads": EVERY["gsa"] | {"expand_k": 50.0},
    "gated_deltanet of large heads": GATED_DELTANET | {"head_dim": 2, "expand_v": 150, "use_gate": False},
}
VARIANTS = [
    *LAYOUTS.values(),
    GLA,
    GLA | {"mode": "fused_recurrent"},
    GLA | {"use_short_conv": True},
    GLA | {"use_short_conv": True, "conv_bias": True, "conv_size": 3, "num_kv_heads": 2},
    GLA | {"use_short_conv": True, "conv_size": 1},
    GLA | {"num_kv_heads": 1, "expand_k": 1.0, "expand_v": 2.0, "gate_low_rank_dim": 5},
    GLA | {"use_output_gate": False},
    GLA | {"elementwise_affine": False, "norm_eps": 0.1},
    GLA | {"clamp_min": -0.02},
    GLA | {"gate_logit_normalizer": 3},
    *(GLA | {"gate_fn": name, "feature_map": name} for name in ACTIVATIONS),
    SIMPLE_GLA,
    SIMPLE_GLA
    | {"mode": "fused_recurrent", "use_short_conv": False, "num_kv_heads": 1, "feature_map": "relu"},
    SIMPLE_GLA | {"expand_k": 0.5, "expand_v": 2.0, "gate_logit_normalizer": 3, "fuse_norm": False},
    SIMPLE_GLA | {"gate_fn": "sigmoid", "elementwise_affine": False, "norm_eps": 0.1},
    LINEAR,
    LINEAR | {"mode": "fused_recurrent", "feature_map": "hedgehog", "do_feature_map_norm": True},
    LINEAR | {"feature_map": "hedgehog", "tie_feature_map_qk": True, "norm_q": True, "num_kv_heads": 1},
    LINEAR | {"feature_map": "t2r", "expand_v": 2.0, "elementwise_affine": False, "norm_eps": 0.1},
    LINEAR | {"feature_map": "dpfp", "do_feature_map_norm": True, "norm_q": True, "norm_k": True},
    LINEAR | {"feature_map": "relu", "expand_k": 0.5},
    LINEAR | {"feature_map": "identity", "output_norm": "identity"},
    RETENTION,
    RETENTION
    | {"mode": "fused_recurrent", "num_kv_heads": 1, "feature_map": "relu", "use_output_gate": False},
    RETENTION | {"expand_k": 1 / 3, "expand_v": 1.0, "fuse_norm": False, "gate_fn": "gelu"},
    RETENTION | {"elementwise_affine": False, "norm_eps": 0.1},
    LIGHTNING | {"layer_idx": 0, "num_layers": 1},
    MAMBA2 | {"norm_before_gate": True, "D_has_hdim": True, "n_groups": 2, "norm_eps": 0.1},
    MAMBA2 | {"rmsnorm": False, "use_conv_bias": False, "conv_kernel": 1, "expand": 1},
    EVERY["mamba"] | {"use_bias": True, "use_conv_bias": False, "conv_kernel": 1, "hidden_act": "gelu"},
    MAMBA2 | {"dt_limit": (0.4, 0.9)},
    MAMBA2 | {"hidden_act": "gelu"},
    EVERY["mamba3"]
    | {"A_activation": "heavy_tail", "A_floor": 0.7, "is_outproj_norm": True, "use_bias": True},
    EVERY["mamba3 mimo"] | {"is_outproj_norm": False, "n_groups": 1, "mimo_rank": 3},
    MAMBA2 | {"n_groups": 3, "conv_kernel": 3, "use_bias": True},
    RWKV6 | {"mode": "fused_recurrent", "elementwise_affine": False, "fuse_norm": False},
    RWKV6 | {"num_heads": 1, "gate_fn": "gelu"},
    RWKV7 | {"fuse_norm": True, "value_dim": 48, "norm_eps": 0.1, "mode": "fused_recurrent"},
    RWKV7 | {"allow_neg_eigval": True},
    RWKV7
    | {
        "num_heads": None,
        "head_dim": 8,
        "elementwise_affine": False,
        "layer_idx": None,
        "v_low_rank_dim": None,
    },
    HGRN | {"layer": BoundedHGRN},
    GSA,
    GSA
    | {"mode": "fused_recurrent", "feature_map": "relu", "scale": None, "num_kv_heads": 1, "expand_k": 0.5},
    GSA | {"elementwise_affine": False, "norm_eps": 0.1, "gate_logit_normalizer": 3, "num_slots": None},
    ABC,
    ABC | {"use_rope": False, "use_input_gate": True, "expand_k": 1.0, "expand_v": 2.0, "num_slots": None},
    ABC | {"use_norm": False, "clamp_min": None, "clamp_max": 0.5},
    ABC | {"use_output_gate": False, "clamp_min": -0.5, "clamp_max": None, "norm_eps": 0.1},
    ABC | {"use_norm": False, "use_output_gate": False, "clamp_min": None, "clamp_max": None},
    HGRN2,
    HGRN2 | {"mode": "fused_recurrent", "expand_ratio": None, "num_heads": 2, "norm_eps": 0.1},
    HGRN2 | {"expand_ratio": 12, "num_heads": 2, "elementwise_affine": False},
    LIGHTNET,
    LIGHTNET | {"mode": "fused_recurrent", "num_heads": 4, "gate_low_rank_dim": 3, "norm_eps": 0.1},
    LIGHTNET | {"expand_ratio": None, "num_heads": 2, "elementwise_affine": False},
    {"layer": DeltaNet, "d_model": 24, "hidden_size": 7, "num_heads": 3},
    *(
        DELTA_NET | {"qk_activation": name, "qk_norm": norm} | conv
        for name, norm, conv in (
            ("silu", "sum", NO_CONV),
            ("relu", "l2", {}),
            ("elu", "sum", {}),
            ("identity", "sum", NO_CONV),
        )
    ),
    DELTA_NET
    | {"expand_k": 0.5, "expand_v": 2.0, "allow_neg_eigval": False, "use_beta": False, "norm_eps": 0.1},
    GATED_DELTANET,
    GATED_DELTANET | NO_CONV | {"allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    GATED_DELTANET | {"mode": "fused_recurrent", "num_v_heads": 6, "expand_v": 1.5, "norm_eps": 0.1},
    PRODUCT,
    PRODUCT | {"mode": "fused_recurrent", "num_householder": 1, "allow_neg_eigval": False, "norm_eps": 0.1},
    PRODUCT | {"num_householder": 3, "num_v_heads": 6, "expand_v": 0.5, "conv_size": 1},
    KDA,
    KDA | {"mode": "fused_recurrent", "num_v_heads": 6, "lower_bound": -0.5, "norm_eps": 0.1},
    KDA | {"head_dim": 2, "expand_v": 150, "conv_size": 1},
    GDN2 | NO_CONV | {"allow_neg_eigval": True, "norm_eps": 0.1},
    GDN2 | {"mode": "fused_recurrent", "num_v_heads": 6, "head_dim": 2, "expand_v": 150, "conv_size": 1},
    COMBA | NO_CONV | {"use_inner_decay": False, "use_output_gate": False, "norm_eps": 0.1},
    COMBA | {"mode": "fused_recurrent", "num_v_heads": 6, "use_output_correction": False},
    COMBA | {"head_dim": 2, "expand_v": 150, "conv_size": 1},
    RODIMUS | NO_CONV | {"input_gate_low_rank": "auto", "k_norm_eps": 5.0, "norm_eps": 0.1},
    RODIMUS | {"mode": "fused_recurrent", "hidden_size": 25, "residual_in_fp32": False},
    EVERY["based"] | {"mode": "fused_recurrent", "num_heads": 5, "num_key_value_heads": 5, "eps": 0.1},
    EVERY["rebased"] | {"mode": "fused_recurrent", "use_gamma": False, "feature_dim": 1, "eps": 0.1},
    EVERY["rebased"] | {"normalize": False, "use_beta": False},
]
LENGTHS = [70, 2, 65, 165]

each_case = pytest.mark.parametrize("config", CASES.values(), ids=CASES)
each_of_layouts = pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
padded_or_packed = pytest.mark.parametrize("layout", ["mask", "packed"])


def unchanged(new: RecurrentState, state: RecurrentState, n: int) -> bool:
    """Whether sequence `n` still has its state, to the last bit."""
    return all(torch.equal(a[n], b[n]) for a, b in zip(tensors(new), tensors(state), strict=True))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(x, torch.float64) for x in VARIANTS] + [(x, torch.float32) for x in LAYOUTS.values()],
    ids=lambda x: described(x) if isinstance(x, dict) else str(x),
)
@torch.no_grad()
def test_values(config, dtype, device):
    """A layer computes what its truth does: one token, a few and more than a chunk, from zeros and from a state."""
    layer = build(config, device=device, dtype=dtype)
    for T in (1, 3, 67):
        x = tokens_of(layer, 2, T)
        for state in (None, random_state(layer, 2)):
            y, new = layer(x, state)
            assert y.dtype == x.dtype
            start = layer.init_state(2) if state is None else state
            assert [t.dtype for t in tensors(new)] == [t.dtype for t in tensors(layer.init_state(2))]
            for b in range(2):
                assert_true(config, layer.state_dict(), x[b], row(start, b), y[b], row(new, b))


@pytest.mark.parametrize("name", DISTINCT)
@torch.no_grad()
def test_hooks_see_tokens(name, device):
    """Outside a graph, a hook or an adapter of a projection is given ``[B, T, width]``, and gives as much.

    But in RWKV6 the second product of the token shift is one of five copies.
    """
    layer, seen = build(DISTINCT[name], device=device), set()
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear) and not path.startswith("x_proj.2"):
            module.register_forward_hook(lambda _, args, y: seen.update({args[0].shape[:-1], y.shape[:-1]}))
    layer(tokens_of(layer, 2, 5))
    assert seen == {(2, 5)}


@each_of_layouts
@torch.no_grad()
def test_padding(config, device):
    """Pads anywhere in a row, whatever they hold, change nothing; a row of none but pads keeps its state."""
    T = 70
    layer = build(config, device=device, dtype=precision(device)[0])
    t = torch.arange(T, device=device)
    some = [t >= 30, t >= T - 2, t < 30, t < 2, (t >= 3) & (t < 64), t == 60, t % 3 > 0, (t < 5) | (t > 66)]
    mask = torch.stack([t >= 0, *some, t >= T])
    B = len(mask)
    x = tokens_of(layer, B, T)
    x[~mask] = torch.nan
    for attention_mask, state in ((mask, None), (mask.long(), random_state(layer, B))):
        y, new = layer(x, state, attention_mask=attention_mask)
        start = layer.init_state(B) if state is None else state
        assert not y[~mask].any()
        for b in range(B - 1):
            tokens = x[b, mask[b]]
            assert_true(config, layer.state_dict(), tokens, row(start, b), y[b, mask[b]], row(new, b))
        assert unchanged(new, start, -1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
@each_case
@torch.no_grad()
def test_generation(config, dtype, device):
    """A left-padded prompt and then one token at a time, under the mask of the whole history, as models give it."""
    layer = build(config, device=device)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1]], device=device).to(dtype)
    x = tokens_of(layer, 2, 8)
    y, state = layer(x[:, :5], attention_mask=mask[:, :5])
    out = [y]
    for t in range(5, 8):
        y, state = layer(x[:, t : t + 1], state, attention_mask=mask[:, : t + 1])
        out.append(y)
    for b in range(2):
        tokens, start = mask[b].bool(), layer.init_state(1)
        y = torch.cat(out, 1)[b, tokens]
        assert_true(config, layer.state_dict(), x[b, tokens], start, y, row(state, b))


# Empty ones at either end and together, ones shorter than the convolution, one token, more than a chunk, a tail.
PACKED = [([0, 0, 70, 71, 73, 73, 73, 76, 80, 80], 83), ([0, 9], 9), ([0, 0, 0], 3), ([0, 1], 1)]


@each_of_layouts
@torch.no_grad()
def test_packed(config, device):
    """Packed sequences are computed as if each were alone, and what comes after the last of them is not read."""
    layer = build(config, device=device, dtype=precision(device)[0])
    for bounds, T in PACKED:
        N = len(bounds) - 1
        x = tokens_of(layer, 1, T)
        x[:, bounds[-1] :] = torch.nan
        for dtype, state in ((torch.int64, None), (torch.int32, random_state(layer, N))):
            y, new = layer(x, state, cu_seqlens=torch.tensor(bounds, dtype=dtype, device=device))
            start = layer.init_state(N) if state is None else state
            assert not y[:, bounds[-1] :].any()
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
                if begin == end:
                    assert unchanged(new, start, n)
                else:
                    one, out = x[0, begin:end], y[0, begin:end]
                    assert_true(config, layer.state_dict(), one, row(start, n), out, row(new, n))


@padded_or_packed
@each_case
def test_gradients_of_layouts(config, layout, device):
    """Gradients are those of the sequences one by one; no pad and no tail has one, whatever it holds."""
    layer = build(config, device=device, dtype=torch.float64)
    if layout == "packed":
        bounds, T = [0, 2, 2, 3, 12], 14
        x = tokens_of(layer, 1, T)
        places = [(0, slice(begin, end)) for begin, end in zip(bounds, bounds[1:], strict=False)]
        given = {"cu_seqlens": torch.tensor(bounds, device=device)}
    else:
        T = 70
        x, t = tokens_of(layer, 3, T), torch.arange(T, device=device)
        mask = torch.stack([(t >= 3) & (t < T - 3), t == 60, t % 3 > 0])
        places = [(b, mask[b]) for b in range(3)]
        given = {"attention_mask": mask}
    is_token = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
    for place in places:
        is_token[place] = True
    x[~is_token] = torch.inf
    x.requires_grad_()
    state = random_state(layer, len(places))
    leaves = [x, *(t.requires_grad_() for t in floats(state)), *layer.parameters()]

    def loss(y: Tensor, new: RecurrentState) -> Tensor:
        return sum((t**2).sum() for t in (y, *floats(new)))

    dx, *rest = torch.autograd.grad(loss(*layer(x, state, **given)), leaves)
    alone = torch.zeros((), device=device, dtype=torch.float64)
    for n, place in enumerate(places):
        one, start = x[place][None], row(state, n)
        alone = alone + (loss(*layer(one, start)) if one.shape[1] else loss(one, start))
    dx_alone, *rest_alone = torch.autograd.grad(alone, leaves)
    assert not dx[~is_token].any()
    for a, b in zip([dx[is_token], *rest], [dx_alone[is_token], *rest_alone], strict=True):
        assert_close(a, b, 1e-10)


@each_case
def test_from_nothing(config, device):
    """Rows of pads and empty sequences keep the state of nothing, and their gradients are finite."""
    layer = build(config, device=device, dtype=torch.float64)
    x = tokens_of(layer, 1, 6)
    mask = torch.zeros(1, 6, dtype=torch.long, device=device)
    cu_seqlens = torch.tensor([0, 0, 5, 5], device=device)
    for given, empty in (({"attention_mask": mask}, [0]), ({"cu_seqlens": cu_seqlens}, [0, 2])):
        y, state = layer(x, **given)
        assert all(unchanged(row(state, n), layer.init_state(1), 0) for n in empty)
        loss = y.square().sum() + sum((t.isfinite() * t).nan_to_num().sum() for t in floats(state))
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(
    "config",
    [
        *CASES.values(),
        *(LAYOUTS[name] for name in ("lightning of another decay", "wide rwkv6", "hgrn without conv")),
        *(
            LAYOUTS[name]
            for name in ("delta_net without beta", "gated_deltanet of large heads", "kda of a lower bound")
        ),
        *(LAYOUTS[name] for name in ("gsa of a feature map", "mamba3 mimo")),
        GLA | {"fuse_norm": False, "clamp_min": -0.05},
        MAMBA2 | {"norm_before_gate": True, "D_has_hdim": True},
    ],
    ids=described,
)
def test_gradients(config):
    """Gradients are finite differences in float64: of the input, the state that comes in and every parameter."""
    layer = build(config, dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)
    state = random_state(layer, 1)
    count, fixed = 1 + len(floats(state)), state.clone()
    leaves = [t.detach().requires_grad_() for t in (tokens_of(layer, 1, 5), *floats(state), *values)]

    def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        parameters = dict(zip(names, rest[count - 1 :], strict=True))
        given = with_floats(state, rest[: count - 1])
        if (
            config["layer"] is MLSTM
        ):  # its stabiliser is a constant in derivatives, which outputs alone do not depend on
            given = RecurrentState((*given.recurrent[:2], fixed.recurrent[2]))
        y, new = torch.func.functional_call(layer, parameters, (x, given))
        return (y,) if config["layer"] is MLSTM else (y, *floats(new))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


# Projections, activations, a norm and a gate on the way, each rounded to 8 bits; and in these a softmax, two
# projections for each of five, gates that sums of logits make, or a first token whose few weights are all near 0.
ROUNDED_MORE = {"rebased", "gsa", "abc", "hgrn2", "bounded hgrn2", "lightnet", "rwkv6", "rwkv7"}


@pytest.mark.parametrize("layout", ["rows", "packed"])
@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name, autocast, layout, device):
    """A module in bfloat16, or a float32 one under autocast, is near float64, and sums are kept in float32."""
    activated = {"feature_map": "silu"} if name in ("gla", "simple_gla", "retention") else {}
    layer = build(CASES[name] | activated, device=device, dtype=None if autocast else torch.bfloat16)
    x = tokens_of(layer, 1 if layout == "packed" else 2, 40)
    given = {"cu_seqlens": torch.tensor([0, 15, 40], device=device)} if layout == "packed" else {}
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        zeros = layer.init_state(2)
        y, state = layer(x, zeros, **given)
    assert y.dtype == torch.bfloat16
    assert [t.dtype for t in tensors(state)] == [t.dtype for t in tensors(zeros)]
    assert {t.dtype for t in tensors((state.recurrent, state.normalizer))} == {torch.float32}
    assert {t.dtype for t in tensors((state.conv, state.shift))} <= {torch.bfloat16}
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.parameters())
    layer = layer.double()
    if name == "mamba3" and not autocast:
        # Its angles are sums of projections over all tokens. The rounding of the projections alone, whatever follows,
        # makes a hundredth of the outputs, and in some draws two, so float64 begins with the rounded ones.
        layer.in_proj.register_forward_hook(lambda module, args, projected: projected.bfloat16().double())
    expected, after = layer(x.double(), **given)
    bound = 3e-2 if name in ROUNDED_MORE else 2e-2
    assert_close(y, expected, bound)
    assert_states_close(state, after, bound)


RECURRENCES = {
    "gla": "channel_decay",
    "rwkv6": "channel_decay",
    "rwkv7": "low_rank",
    "griffin": "rg_lru",
    "hgrn": "scan",
    "hgrn2": "channel_decay",
    "lightnet": "channel_decay",
    "gsa": "channel_decay",
    "abc": "channel_decay",
    "delta_net": "delta_rule",
    "gated_deltanet": "delta_rule",
    "gated_deltaproduct": "delta_rule",
    "kda": "delta_rule",
    "mlstm": "normalizer",
    "gdn2": "delta_rule",
    "comba": "delta_rule",
    "rodimus": "channel_decay",
}


def op_of(name: str, form: str) -> torch._ops.OpOverload:
    if name == "mamba":  # whose op has one form
        return torch.ops.flacompose.selective_scan_forward.default
    if form == "token":
        recurrence = name if name in ("mlstm", "mamba3") else "slot_attention"
        return getattr(torch.ops.flacompose, f"{recurrence}_token").default
    return getattr(torch.ops.flacompose, f"{operator(RECURRENCES.get(name, 'head_decay'))}_{form}").default


@pytest.mark.parametrize(
    ("name", "mode", "T", "form"),
    [
        (name, mode, T, form)
        for name, config in EVERY.items()
        for mode, T, form in (
            (None, 2, "chunk"),
            ("fused_recurrent", 2, "recurrent"),
            (None, 1, "token" if name in ("gsa", "abc", "mlstm", "mamba3") else "recurrent"),
        )
        if mode is None or "mode" in inspect.signature(config["layer"]).parameters
    ],
)
def test_form(name, mode, T, form, device):
    """A layer calls the form of its op that its mode names, and for a single token the recurrent one."""
    layer = build(EVERY[name] | ({} if mode is None else {"mode": mode}), device=device)
    with recorded() as calls:
        layer(tokens_of(layer, 1, T))
    namespace = torch.ops.flacompose
    before = (
        {namespace.stabilizer_forward, getattr(namespace, f"matrix_recurrence_{form}")}
        if name == "mlstm" and form != "token"
        else {namespace.cumulative_angle_forward, namespace.rotary_forward}
        | ({namespace.gated_skip_forward} if name == "mamba3" and device.type == "cuda" else set())
        if name.startswith("mamba3") and form != "token"
        else set()
    )
    assert {op for op, _, _ in calls} == {op_of(name, form)} | {op.default for op in before}


WITH_TOKENS = ("rwkv7", "mamba", "mamba3", "mlstm", "abc", "griffin", "gated_deltaproduct")


@pytest.mark.parametrize("name", [name for name in DISTINCT if name not in ("retention", "gsa")])
@torch.no_grad()
def test_compiled_decoding(name, device, few_levels):
    """There is one graph for segments and one for tokens, whatever their order. Each goes to the backend once.

    test_wide.py has retention and slots, and test_segments.py tokens of HGRN.
    """
    layer = build(EVERY[name], device=device)
    run, graphs = compiled(layer)
    # Tokens of the others take the operators and states of these.
    pieces = [70, 1, 5, 1, 12, 1] if name in WITH_TOKENS else [70, 5, 15]
    x = tokens_of(layer, 2, 90)
    state, out = layer.init_state(2), []
    count = len({T == 1 for T in pieces})
    for i, piece in enumerate(x.split(pieces, 1)):
        with torch._dynamo.config.patch(error_on_recompile=i >= count):
            y, state = run(piece, state)
        out.append(y)
    assert len(graphs) == count
    expected, last = layer(x)
    assert_close(torch.cat(out, 1), expected, 2e-5)
    assert_states_close(state, last, 2e-5)


def placed(layout: str, T: int, device: torch.device, N: int = 3) -> tuple[int, dict[str, Tensor]]:
    """The number of sequences in one row of `T` tokens, and what tells the layer."""
    if layout == "mask":
        return 1, {"attention_mask": (torch.rand(1, T, device=device) < 0.7).long()}
    if layout == "packed":
        # There is a tail, and in short rows there are empty sequences.
        return N, {"cu_seqlens": torch.arange(N + 1, device=device) * (T - 1) // N}
    return 1, {}


def results(
    call: nn.Module, layer: nn.Module, x: Tensor, state: RecurrentState, given: dict[str, Any], trained: bool
) -> list[Tensor]:
    """The output, the state and, if trained, the gradients of everything."""
    leaves = [t.detach().requires_grad_(trained) for t in (x, *floats(state))]
    with torch.set_grad_enabled(trained):
        y, new = call(leaves[0], with_floats(state, leaves[1:]), **given)
    if not trained:
        return [y, *tensors(new)]
    loss = sum((t.float() ** 2).sum() for t in (y, *floats(new)))
    return [y, *tensors(new), *torch.autograd.grad(loss, [*leaves, *layer.parameters()])]


# Layers with a normaliser, positions, angles, several tokens in the place of one, and a scan; with convolutions.
PACKED_GRAPHS = ("linear_attn", "retention", "mamba3", "gated_deltaproduct", "hgrn")
# A mask is the same to all layers but those whose pads are more than tokens left out.
PADDED_GRAPHS = ("gla", "rwkv6", "abc")


@pytest.mark.parametrize(
    ("name", "layout"),
    [(x, "packed") for x in PACKED_GRAPHS] + [(x, "mask") for x in PADDED_GRAPHS],
)
def test_compiled_layouts(name, layout, device, few_levels):
    """One graph does for every length, padded or packed, at batch 1, and some layers are trained in it too.

    Packed sequences of others are trained by `test_exact_packed_compiled`, and all are packed by the export of
    test_sizes.py.
    """
    layer = build(EVERY[name], device=device)
    trained = (name, layout) in (("linear_attn", "packed"), ("gla", "mask"))
    # What follows Dynamo sees the graph of others in `test_export`.
    backend = "aot_eager" if trained else "eager"
    one_graph = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for i, T in enumerate(LENGTHS):
        N, given = placed(layout, T, device)
        x, state = tokens_of(layer, 1, T), random_state(layer, N)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = results(one_graph, layer, x, state, given, trained)
        for a, b in zip(actual, results(layer, layer, x, state, given, trained), strict=True):
            assert_close(a, b, 1e-4 if trained else 1e-5)


def exported(layer: nn.Module, layout: str, device: torch.device) -> ExportedProgram:
    """A program for any number of sequences of any lengths that running logsumexps take."""
    T = Dim("T", min=2, max=2**logsumexp.LEVELS)
    B, sequences = Dim("B", max=2**10), Dim("sequences", max=2**10)
    N, given = placed(layout, 37, device)
    rows = 1 if layout == "packed" else 2
    batch = {} if layout == "packed" else {0: B}
    if layout == "mask":
        given = {"attention_mask": torch.ones(2, 37, dtype=torch.long, device=device)}
    states = {0: sequences} if layout == "packed" else batch
    state = random_state(layer, N if layout == "packed" else rows)
    shapes = {
        "hidden_states": {**batch, 1: T},
        "state": pytree.tree_map(lambda _: states, state),
        "attention_mask": {0: B, 1: T} if layout == "mask" else None,
        "cu_seqlens": {0: sequences + 1} if layout == "packed" else None,
    }
    given = {"attention_mask": None, "cu_seqlens": None} | given
    return torch.export.export(layer, (tokens_of(layer, rows, 37), state), given, dynamic_shapes=shapes)


# Others are exported as rows.
EXPORTED = dict.fromkeys(("gla", "retention", "gsa", "rwkv7", "griffin"), "packed") | dict.fromkeys(
    ("rwkv6", "mamba2", "hgrn"), "mask"
)


@pytest.mark.parametrize(("name", "layout"), [(name, EXPORTED.get(name, "rows")) for name in DISTINCT])
@torch.no_grad()
def test_export(name, layout, device, tmp_path, request):
    """A program has a node for each recurrence, and is exact at other lengths. Those of rows are saved and loaded."""
    lengths = [*LENGTHS[1:], 2048]
    if layout != "rows" or name == "lightnet":
        request.getfixturevalue("few_levels")
        lengths.pop()
    layer = build(EVERY[name], device=device, dtype=precision(device)[0])
    program = exported(layer, layout, device)
    # Linear attention sums keys beside values, and slots are written and read.
    nodes = 2 if name in ("linear_attn", "gsa", "abc") else 1
    namespace = torch.ops.flacompose
    before = (
        [namespace.stabilizer_forward.default, namespace.matrix_recurrence_chunk.default]
        if name == "mlstm"
        else [namespace.cumulative_angle_forward.default, namespace.rotary_forward.default]
        if name.startswith("mamba3")
        else []
    )
    ops = [n.target for n in program.graph.nodes if "flacompose" in str(n.target)]
    if layout == "packed":  # on a CPU, what reads bounds in plain PyTorch has them checked
        ops = [op for op in ops if op is not namespace.checked_bounds.default]
    assert ops == before + [op_of(name, "chunk")] * nodes
    if layout == "rows":
        torch.export.save(program, tmp_path / "layer.pt2")
        program = torch.export.load(tmp_path / "layer.pt2")
    module = program.module()
    for i, T in enumerate(lengths):
        N, given = placed(layout, T, device, N=1 + i)
        given = {"attention_mask": None, "cu_seqlens": None} | given
        x, state = tokens_of(layer, 1, T), random_state(layer, N)
        y, new = module(x, state, **given)
        expected, last = layer(x, state, **given)
        assert isinstance(new, RecurrentState)
        assert_close(y, expected, 1e-6)
        assert_states_close(new, last, 1e-6)


LOAD = """
import sys
import torch
import flacompose
from flacompose.layers import DeltaNet, RecurrentState

for case in sys.argv[1:]:
    module = torch.export.load(f"{case}.pt2").module()
    x, *state = torch.load(f"{case}.pt")
    y, state = module(x, RecurrentState(*state), attention_mask=None, cu_seqlens=None)
    assert isinstance(state, RecurrentState), type(state)
    torch.save([y, *state], f"{case}.pt")
"""


@torch.no_grad()
def test_load_in_another_process(tmp_path, device, few_levels):
    """A program that was saved is loaded where nothing but the library is imported, with states of every kind."""
    expected = {}
    for name in ("linear_attn", "rwkv6", "abc"):
        layer = build(EVERY[name], device=device)
        torch.export.save(exported(layer, "rows", device), tmp_path / f"{name}.pt2")
        x, state = tokens_of(layer, 3, 165), random_state(layer, 3)
        torch.save((x, *state), tmp_path / f"{name}.pt")
        expected[name] = layer(x, state)
    package = str(Path(flacompose.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", LOAD, *(str(tmp_path / name) for name in expected)],
        check=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])},
    )
    for name, (y, new) in expected.items():
        loaded, *state = torch.load(tmp_path / f"{name}.pt")
        assert_close(loaded, y, 1e-6)
        assert_states_close(RecurrentState(*state), new, 1e-6)
