"""The layers said again slowly: float64, one sequence at a time, token by token, names as in a checkpoint.

A layer is a configuration: its arguments, and under "layer" its class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flacompose.layers import (
    ABCAttention,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    HGRNAttention,
    LightNetAttention,
    LightningAttention,
    LinearAttention,
    Mamba2,
    MultiScaleRetention,
    RecurrentState,
    RWKV6Attention,
    SimpleGatedLinearAttention,
)

# Each layer with what it has to carry, and with its defaults.
GLA = {"layer": GatedLinearAttention, "hidden_size": 24, "num_heads": 4}
SIMPLE_GLA = {"layer": SimpleGatedLinearAttention, "hidden_size": 24, "num_heads": 4}
LINEAR = {"layer": LinearAttention, "hidden_size": 24, "num_heads": 4}
RETENTION = {"layer": MultiScaleRetention, "hidden_size": 24, "num_heads": 4}
CONV = {"num_kv_heads": 2, "use_short_conv": True, "conv_bias": True}
NORMALIZED = {"num_kv_heads": 2, "feature_map": "elu", "norm_k": True, "do_feature_map_norm": True}
LAYERS = {
    "gla": GLA | CONV,
    "simple_gla": SIMPLE_GLA | CONV,
    "linear_attn": LINEAR | NORMALIZED,
    "retention": RETENTION | CONV,
}
# Every layer of the library, so that what holds for all is tested of each.
HEADS = {"hidden_size": 24, "num_heads": 4}
SHORT = {"hidden_size": 24, "use_short_conv": True, "conv_bias": True, "conv_size": 3}
EVERY = LAYERS | {
    "lightning_attn": {"layer": LightningAttention, "layer_idx": 1, "num_layers": 3} | HEADS,
    "mamba2": {"layer": Mamba2, "hidden_size": 24, "head_dim": 8, "state_size": 5, "n_groups": 3},
    "rwkv6": {"layer": RWKV6Attention, "proj_low_rank_dim": 4, "gate_low_rank_dim": 5} | HEADS,
    "hgrn": {"layer": HGRNAttention} | SHORT,
    "hgrn2": {"layer": HGRN2Attention, "expand_ratio": 8} | SHORT,
    "lightnet": {"layer": LightNetAttention, "expand_ratio": 8} | SHORT,
    "gsa": {"layer": GatedSlotAttention, "num_slots": 5, "num_kv_heads": 2} | HEADS | SHORT,
    "abc": {"layer": ABCAttention, "num_heads": 2, "num_slots": 5} | SHORT,
}

ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "logsigmoid": lambda x: -(1 + (-x).exp()).log(),
    "silu": lambda x: x / (1 + (-x).exp()),
    "swish": lambda x: x / (1 + (-x).exp()),
    "sqrelu": lambda x: x * x * (x > 0),
    "gelu": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}

Parameters = dict[str, Tensor]


def sequence(
    config: dict[str, Any], parameters: Parameters, x: Tensor, state: RecurrentState | None = None
) -> tuple[Tensor, RecurrentState]:
    """One sequence ``x [T, hidden]`` from a state of one row: ``[T, hidden]`` and the new state, on the CPU."""
    p = {name: value.detach().cpu().double() for name, value in parameters.items()}
    x = x.detach().cpu().double()
    if state is not None:
        state = pytree.tree_map(lambda t: t.detach().cpu()[0].double(), state)
    truth = {
        GatedLinearAttention: gated_linear_attention,
        SimpleGatedLinearAttention: simple_gated_linear_attention,
        LinearAttention: linear_attention,
        MultiScaleRetention: multi_scale_retention,
    }[config["layer"]]
    y, state = truth(config, p, x, state)
    return y, pytree.tree_map(lambda t: t[None], state)


def gated_linear_attention(
    config: dict[str, Any], p: Parameters, x: Tensor, state: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    q, k, v, conv = projected(config, p, x, state)
    g = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    g = ACTIVATIONS["logsigmoid"](g) / config.get("gate_logit_normalizer", 16)
    if config.get("clamp_min") is not None:
        g = g.clamp(min=config["clamp_min"])
    q, k = activated(config, q), activated(config, k)
    o, S = recurrence(q, k, v, in_heads(config, g, shared=True).exp(), state)
    return gated_output(config, p, x, o), RecurrentState(S, conv)


def simple_gated_linear_attention(
    config: dict[str, Any], p: Parameters, x: Tensor, state: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    q, k, v, conv = projected({"use_short_conv": True} | config, p, x, state)
    g = x @ p["gk_proj.weight"].T + p["gk_proj.bias"]
    g = ACTIVATIONS["logsigmoid"](g) / config.get("gate_logit_normalizer", 16)
    q, k = activated(config, q), activated(config, k)
    o, S = recurrence(q, k, v, g.exp()[:, :, None], state)
    return gated_output(config, p, x, o), RecurrentState(S, conv)


def linear_attention(
    config: dict[str, Any], p: Parameters, x: Tensor, state: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    q, k, v, _ = projected(config, p, x, state)
    q, k = feature_map(config, p, "q", q), feature_map(config, p, "k", k)
    if config.get("norm_q"):
        q = q / (q.sum(-1, keepdim=True) + 1e-4)
    if config.get("norm_k"):
        k = k / (k.sum(-1, keepdim=True) + 1e-4)
    o, S = recurrence(q, k, v, torch.ones(len(x), 1, 1), state)
    z = ()
    if config.get("do_feature_map_norm"):
        z = torch.zeros(k.shape[1:], dtype=k.dtype) if state is None else state.normalizer
        for t in range(len(x)):
            z = z + k[t]
            o[t] /= (q[t] * z).sum(-1, keepdim=True) * k.shape[2] ** -0.5 + 1e-10
    if config.get("output_norm", "rmsnorm") == "rmsnorm":
        o = rms_norm(config, p.get("norm.weight", 1), o)
    return o.flatten(1) @ p["o_proj.weight"].T, RecurrentState(S, normalizer=z)


def multi_scale_retention(
    config: dict[str, Any], p: Parameters, x: Tensor, state: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    q, k, v, conv = projected(config, p, x, state)
    q, k = activated(config, q), activated(config, k)
    start = 0 if state is None else int(state.position)
    q, k = rotated(q, start), rotated(k, start)
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(config["num_heads"])], dtype=q.dtype)
    o, S = recurrence(q, k, v, decay[None, :, None].expand(len(x), -1, -1), state)
    return gated_output(config, p, x, o), RecurrentState(S, conv, position=torch.tensor(start + len(x)))


def projected(
    config: dict[str, Any], p: Parameters, x: Tensor, state: RecurrentState | None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """``q, k [T, H, K]`` and ``v [T, H, V]``, and the windows of the convolutions."""
    outputs, conv = [], []
    for i, name in enumerate("qkv"):
        h = x @ p[f"{name}_proj.weight"].T
        if config.get("use_short_conv"):
            w = p[f"{name}_conv1d.weight"][:, 0]  # [D, W]
            window, out = torch.zeros_like(w) if state is None else state.conv[i], []
            for token in h:
                window = torch.cat([window[:, 1:], token[:, None]], 1)
                y = (window * w).sum(1) + p.get(f"{name}_conv1d.bias", 0)
                out.append(ACTIVATIONS["silu"](y))
            h = torch.stack(out) if out else h
            conv.append(window)
        outputs.append(in_heads(config, h, shared=name != "q"))
    q, k, v = outputs
    return q, k, v, tuple(conv)


def in_heads(config: dict[str, Any], h: Tensor, shared: bool) -> Tensor:
    """``[T, H, D]`` of ``h [T, heads * D]``, neighbours sharing a head of keys and values."""
    heads = config["num_heads"]
    groups = heads // (config.get("num_kv_heads") or heads) if shared else 1
    return torch.stack([h.chunk(heads // groups, 1)[i // groups] for i in range(heads)], 1)


def activated(config: dict[str, Any], h: Tensor) -> Tensor:
    return ACTIVATIONS[config["feature_map"]](h) if config.get("feature_map") else h


def feature_map(config: dict[str, Any], p: Parameters, side: str, h: Tensor) -> Tensor:
    def linear(name: str) -> Tensor:
        name = f"feature_map_{side}.{name}"
        return h @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    name = config.get("feature_map", "elementwise_product")
    if name == "hedgehog":
        e = torch.cat([2 * linear("layer"), -2 * linear("layer")], -1).exp()
        return e / e.sum(-1, keepdim=True)
    if name == "t2r":
        return ACTIVATIONS["relu"](linear("layer"))
    if name == "elementwise_product":
        return linear("layer1") * linear("layer2")
    if name == "dpfp":
        r = torch.cat([ACTIVATIONS["relu"](h), ACTIVATIONS["relu"](-h)], -1)
        n = r.shape[-1]
        return torch.stack([r[..., i] * r[..., i - j] for j in range(1, 5) for i in range(n)], -1)
    if name == "elu":
        return torch.where(h > 0, h + 1, h.exp())
    return {"relu": ACTIVATIONS["relu"], "identity": lambda h: h}[name](h)


def rotated(h: Tensor, start: int) -> Tensor:
    """``h [T, H, K]``, its halves the parts of complex numbers, turned by their positions."""
    T, _, K = h.shape
    angle = torch.arange(start, start + T)[:, None] * 10000.0 ** (-torch.arange(0, K, 2).double() / K)
    z = torch.complex(h[..., : K // 2], h[..., K // 2 :]) * torch.exp(1j * angle)[:, None]
    return torch.cat([z.real, z.imag], -1)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: RecurrentState | None
) -> tuple[Tensor, Tensor]:
    """``S = decay * S + k v^T``, read by ``q K^-1/2``; ``decay`` is ``[T, H or 1, K or 1]``."""
    _, H, K = k.shape
    S = torch.zeros(H, K, v.shape[2], dtype=k.dtype) if state is None else state.recurrent
    o = torch.empty_like(v)
    for t in range(len(k)):
        S = decay[t][:, :, None] * S + k[t][:, :, None] * v[t][:, None]
        o[t] = (q[t][:, :, None] * S).sum(1) * K**-0.5
    return o, S


def rms_norm(config: dict[str, Any], weight: Tensor | int, o: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + config.get("norm_eps", 1e-5)).sqrt() * weight


def gated_output(config: dict[str, Any], p: Parameters, x: Tensor, o: Tensor) -> Tensor:
    o = rms_norm(config, p.get("g_norm_swish_gate.weight", p.get("g_norm.weight", 1)), o).flatten(1)
    if config.get("use_output_gate", True):
        o = o * ACTIVATIONS[config.get("gate_fn", "swish")](x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T


def precision(device: torch.device) -> tuple[torch.dtype, float]:
    """The most precise dtype that the kernels of a device take, and how far layers may be off in it."""
    return (torch.float32, 2e-5) if device.type == "cuda" else (torch.float64, 1e-11)


def described(config: dict[str, Any]) -> str:
    layer = config.get("layer", GatedLinearAttention).__name__
    return " ".join([layer, *(f"{name}={value}" for name, value in config.items() if name != "layer")])


def build(config: dict[str, Any], **to: Any) -> nn.Module:
    """A layer with no parameter at its initial value, none of them small."""
    config = dict(config)
    layer = config.pop("layer")(**config).to(**to)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def random_state(layer: nn.Module, N: int) -> RecurrentState:
    def random(zeros: Tensor) -> Tensor:
        return torch.randn_like(zeros) if zeros.is_floating_point() else torch.randint_like(zeros, 40)

    state = pytree.tree_map(random, layer.init_state(N))
    normalizer = pytree.tree_map(lambda z: z.abs() + 0.1, state.normalizer)  # of positive keys
    return state._replace(normalizer=normalizer)


def row(state: RecurrentState, n: int) -> RecurrentState:
    return pytree.tree_map(lambda t: t[n : n + 1], state)


def tensors(state: RecurrentState) -> list[Tensor]:
    return pytree.tree_leaves(state)


def floats(state: RecurrentState) -> list[Tensor]:
    """What gradients go through: all but positions."""
    return [t for t in tensors(state) if t.is_floating_point()]


def with_floats(state: RecurrentState, values: Iterable[Tensor]) -> RecurrentState:
    values = iter(values)
    return pytree.tree_map(lambda t: next(values) if t.is_floating_point() else t.clone(), state)


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """In norm, ``expected`` wherever and in whatever precision it is."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    off = float((actual.detach().cpu().double() - expected.detach().cpu().double()).norm())
    assert off <= relative * float(expected.detach().double().norm()), f"off by {off:.1e}"


def assert_states_close(actual: RecurrentState, expected: RecurrentState, relative: float) -> None:
    for x, y in zip(tensors(actual), tensors(expected), strict=True):
        assert_close(x, y, relative if x.is_floating_point() else 0)
