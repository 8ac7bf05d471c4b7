"""The layers said again slowly: float64, one sequence at a time, over the references, names as in a checkpoint.

A layer is a configuration: its arguments, and under "layer" its class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from contract.recurrences import delta_product, mamba3_mimo
from contract.recurrences import mlstm as mlstm_recurrence
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flacompose.layers import (
    MLSTM,
    ABCAttention,
    BasedLinearAttention,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    GriffinRecurrentBlock,
    HGRN2Attention,
    HGRNAttention,
    KimiDeltaAttention,
    LightNetAttention,
    LightningAttention,
    LinearAttention,
    Mamba,
    Mamba2,
    Mamba3,
    MultiScaleRetention,
    ReBasedLinearAttention,
    RecurrentState,
    RodimusAttention,
    RWKV6Attention,
    RWKV7Attention,
    SimpleGatedLinearAttention,
)
from flacompose.ops._recurrences.elementwise.scan.reference import scan
from flacompose.ops._recurrences.elementwise.selective_scan.reference import selective_scan
from flacompose.ops._recurrences.fused.slot_attention.reference import slot_attention
from flacompose.ops._recurrences.matrix.reference import matrix_recurrence
from flacompose.ops._recurrences.short_conv.reference import short_conv

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
RANKS = {"decay_low_rank_dim": 5, "gate_low_rank_dim": 7, "a_low_rank_dim": 4, "v_low_rank_dim": 3}
VALUE_HEADS = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6}
SHORT = {"hidden_size": 24, "use_short_conv": True, "conv_bias": True, "conv_size": 3}
MAMBA3 = {
    "layer": Mamba3,
    "hidden_size": 24,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 3,
    "rope_fraction": 1,
}
EVERY = LAYERS | {
    "lightning_attn": {"layer": LightningAttention, "layer_idx": 1, "num_layers": 3} | HEADS,
    "mamba": {"layer": Mamba, "hidden_size": 24, "intermediate_size": 36, "state_size": 5, "dt_rank": 3},
    "mamba2": {"layer": Mamba2, "hidden_size": 24, "head_dim": 8, "state_size": 5, "n_groups": 3},
    "mamba3": MAMBA3,
    "mamba3 mimo": MAMBA3 | {"rope_fraction": 0.5, "is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
    "rwkv6": {"layer": RWKV6Attention, "proj_low_rank_dim": 4, "gate_low_rank_dim": 5} | HEADS,
    "rwkv7": {"layer": RWKV7Attention, "head_dim": None, "layer_idx": 1, "num_hidden_layers": 3}
    | HEADS
    | RANKS,
    "mlstm": {"layer": MLSTM, "gate_soft_cap": 5.0, "use_bias": True} | HEADS,
    "griffin": {"layer": GriffinRecurrentBlock, "lru_width": 36, "conv_size": 3} | HEADS,
    "hgrn": {"layer": HGRNAttention} | SHORT,
    "hgrn2": {"layer": HGRN2Attention, "expand_ratio": 8} | SHORT,
    "lightnet": {"layer": LightNetAttention, "expand_ratio": 8} | SHORT,
    "gsa": {"layer": GatedSlotAttention, "num_slots": 5, "num_kv_heads": 2} | HEADS | SHORT,
    "abc": {"layer": ABCAttention, "num_heads": 2, "num_slots": 5} | SHORT,
    "delta_net": {"layer": DeltaNet, "use_gate": True, "allow_neg_eigval": True} | HEADS | SHORT,
    "gated_deltanet": {"layer": GatedDeltaNet} | VALUE_HEADS | SHORT,
    "gated_deltaproduct": {"layer": GatedDeltaProduct} | VALUE_HEADS | SHORT,
    "kda": {"layer": KimiDeltaAttention, "expand_v": 0.5} | VALUE_HEADS | SHORT,
    "gdn2": {"layer": GatedDeltaNet2, "expand_v": 0.5} | VALUE_HEADS | SHORT,
    "comba": {"layer": Comba} | VALUE_HEADS | SHORT,
    "rodimus": {"layer": RodimusAttention, "expand_ratio": 6, "input_gate_low_rank": 5} | SHORT,
    "based": {"layer": BasedLinearAttention, "feature_dim": 3, "num_key_value_heads": 4} | HEADS,
    "rebased": {"layer": ReBasedLinearAttention, "feature_dim": 4, "num_key_value_heads": 4} | HEADS,
}
# These differ from KDA, Gated DeltaNet and Based in formulas of one token.
ALIKE = ("gdn2", "comba", "rebased")
# What takes seconds for each layer, compiling, exporting and training in segments, is tested of these alone: cheaper
# tests see all that the others have of their own. Rodimus has the operators and the states of GLA, Based those of
# linear attention, and Mamba-3 with several keys a token those of Mamba-3 with one.
DISTINCT = {
    name: config for name, config in EVERY.items() if name not in (*ALIKE, "rodimus", "based", "mamba3 mimo")
}
# One of each kind of state and of code that reads a size, for graphs of what the layers share.
OF_EACH_KIND = {
    name: DISTINCT[name]
    for name in ("gla", "retention", "rwkv6", "rwkv7", "mamba", "mamba2", "mamba3", "mlstm", "gsa", "abc")
    + ("hgrn", "griffin", "gated_deltaproduct")
}


class Bounded:
    """A layer of forget gates with a lower bound for them, which is a parameter like its others."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.bound = nn.Parameter(torch.linspace(-8, 4.6, self.f_proj.out_features))  # from 0.0003 to 0.99

    def forward(
        self, hidden_states: Tensor, state: RecurrentState | None = None, **layout: Tensor | None
    ) -> tuple[Tensor, RecurrentState]:
        return super().forward(hidden_states, state, **layout, lower_bound=self.bound.sigmoid())


class BoundedHGRN(Bounded, HGRNAttention):
    pass


class BoundedHGRN2(Bounded, HGRN2Attention):
    pass


BOUNDED = {
    "bounded hgrn": EVERY["hgrn"] | {"layer": BoundedHGRN, "expand_ratio": 2, "layer_idx": 2},
    "bounded hgrn2": EVERY["hgrn2"] | {"layer": BoundedHGRN2, "layer_idx": 1},
}


class RWKV7WithFirst(RWKV7Attention):
    """A layer of RWKV7 that takes and returns what the others do: its input stands for the first layer's values."""

    def forward(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_states: int | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        layout = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "num_states": num_states}
        v_first = first_values(hidden_states, self.value_dim)
        y, new, shared = super().forward(hidden_states, state, v_first=v_first, **layout)
        assert (shared is v_first) == (self.layer_idx != 0)
        return y, new


def first_values(x: Tensor, value_dim: int) -> Tensor:
    return torch.cat([x] * (value_dim // x.shape[-1]), -1)


ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "logsigmoid": lambda x: -(1 + (-x).exp()).log(),
    "silu": lambda x: x / (1 + (-x).exp()),
    "swish": lambda x: x / (1 + (-x).exp()),
    "sqrelu": lambda x: x * x * (x > 0),
    "gelu": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}

Config, Parameters = dict[str, Any], dict[str, Tensor]
Result = tuple[Tensor, RecurrentState]


def sequence(config: Config, parameters: Parameters, x: Tensor, state: RecurrentState) -> Result:
    """One sequence ``x [T, hidden]`` from a state of one row: ``[T, hidden]`` and the new state, on the CPU."""
    p = {name: value.detach().cpu().double() for name, value in parameters.items()}
    state = pytree.tree_map(lambda t: t.detach().cpu().double(), state)
    truth = {
        GatedLinearAttention: gated_linear_attention,
        SimpleGatedLinearAttention: simple_gated_linear_attention,
        LinearAttention: linear_attention,
        MultiScaleRetention: multi_scale_retention,
        LightningAttention: lightning_attention,
        Mamba: mamba,
        Mamba2: mamba2,
        Mamba3: mamba3,
        RWKV6Attention: rwkv6,
        RWKV7Attention: rwkv7,
        MLSTM: mlstm,
        GriffinRecurrentBlock: griffin,
        HGRNAttention: hgrn,
        BoundedHGRN: hgrn,
        HGRN2Attention: hgrn2_or_lightnet,
        BoundedHGRN2: hgrn2_or_lightnet,
        LightNetAttention: hgrn2_or_lightnet,
        GatedSlotAttention: gated_slot_attention,
        ABCAttention: abc,
        DeltaNet: delta_net,
        GatedDeltaNet: delta_net,
        GatedDeltaProduct: delta_net,
        KimiDeltaAttention: delta_net,
        GatedDeltaNet2: gdn2_or_comba,
        Comba: gdn2_or_comba,
        RodimusAttention: rodimus,
        BasedLinearAttention: based_or_rebased,
        ReBasedLinearAttention: based_or_rebased,
    }[config["layer"]]
    y, new = truth(config, p, x.detach().cpu().double()[None], state)
    return y[0], new


def gated_linear_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, conv = qkv(config, p, x, state)
    g = ACTIVATIONS["logsigmoid"](linear(p, "gk_proj.1", linear(p, "gk_proj.0", x)))
    g = g / config.get("gate_logit_normalizer", 16)
    if config.get("clamp_min") is not None:
        g = g.clamp(min=config["clamp_min"])
    o, S = matrix_recurrence(q, k, v, gk=in_heads(config, g, repeat=True), **from_state(state, k))
    return gated_output(config, p, x, o), RecurrentState(S, conv)


def simple_gated_linear_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, conv = qkv(config, p, x, state)
    g = ACTIVATIONS["logsigmoid"](linear(p, "gk_proj", x)) / config.get("gate_logit_normalizer", 16)
    o, S = matrix_recurrence(q, k, v, g, **from_state(state, k))
    return gated_output(config, p, x, o), RecurrentState(S, conv)


def linear_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, _ = qkv(config | {"feature_map": None}, p, x, state)
    q, k = feature_map(config, p, "q", q), feature_map(config, p, "k", k)
    if config.get("norm_q"):
        q = q / (q.sum(-1, keepdim=True) + 1e-4)
    if config.get("norm_k"):
        k = k / (k.sum(-1, keepdim=True) + 1e-4)
    o, S = matrix_recurrence(q, k, v, **from_state(state, k))
    z = ()
    if config.get("do_feature_map_norm"):
        sums = state.normalizer[:, None] + k.cumsum(1)
        o, z = o / ((q * sums).sum(-1, keepdim=True) * k.shape[3] ** -0.5 + 1e-10), sums[:, -1]
    if config.get("output_norm", "rmsnorm") == "rmsnorm":
        o = rms_norm(config, p.get("norm.weight", 1), o)
    return linear(p, "o_proj", o.flatten(2)), RecurrentState(S, normalizer=z)


def multi_scale_retention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, conv = qkv(config, p, x, state)
    q, k = rotated(q, state.position), rotated(k, state.position)
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(config["num_heads"])], dtype=q.dtype)
    o, S = matrix_recurrence(q, k, v, g_gamma=decay.log(), **from_state(state, k))
    return gated_output(config, p, x, o), RecurrentState(S, conv, position=state.position + x.shape[1])


def lightning_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, depth, L = config["num_heads"], config["layer_idx"], config["num_layers"]
    if config.get("decay", "minimax") == "tnl":
        rates = [8 * h / H * (1 - depth / L) for h in range(H)]
    else:
        rates = [2 ** (-8 * (h + 1) / H) * (1 - depth / (L - 1 + 1e-5) + 1e-5) for h in range(H)]
    q, k, v = (
        ACTIVATIONS[config.get("hidden_act", "silu")](linear(p, "qkv_proj", x))
        .unflatten(-1, (H, 3, -1))
        .unbind(-2)
    )
    o, S = matrix_recurrence(q, k, v, g_gamma=-q.new_tensor(rates), initial_state=state.recurrent)
    o = rms_norm({"norm_eps": 1e-6} | config, p["norm.weight"], o.flatten(2))
    return linear(p, "out_proj", o * ACTIVATIONS["sigmoid"](linear(p, "output_gate", x))), RecurrentState(S)


def mamba(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    S = p["A_log"].shape[1]
    x, z = linear(p, "in_proj", x).chunk(2, -1)
    x, window = convolved(p, "conv1d", x, state.conv[0])
    x = ACTIVATIONS[config.get("hidden_act", "silu")](x)
    dt, B, C = linear(p, "x_proj", x).split([p["dt_proj.weight"].shape[1], S, S], -1)
    dt = (1 + linear(p, "dt_proj", dt).exp()).log()
    y, h = selective_scan(x, dt, -p["A_log"].exp(), B.unsqueeze(2), C.unsqueeze(2), state.recurrent)
    y = (y + p["D"] * x) * ACTIVATIONS["silu"](z)
    return linear(p, "out_proj", y), RecurrentState(h, (window,))


def mamba2(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, P, S, G = len(p["A_log"]), config["head_dim"], config["state_size"], config.get("n_groups", 1)
    act, silu = ACTIVATIONS[config.get("hidden_act", "silu")], ACTIVATIONS["silu"]

    def norm(y: Tensor) -> Tensor:
        return torch.cat([rms_norm(config, 1, part) for part in y.chunk(G, -1)], -1) * p["norm.weight"]

    z, xBC, dt = linear(p, "in_proj", x).split([H * P, H * P + 2 * G * S, H], -1)
    xBC, window = convolved(p, "conv1d", xBC, state.conv[0])
    X, B, C = act(xBC).split([H * P, G * S, G * S], -1)
    X, B, C = (y.unflatten(-1, (n, -1)) for y, n in ((X, H), (B, G), (C, G)))
    dt = (1 + (dt + p["dt_bias"]).exp()).log().clamp(*config.get("dt_limit", (0, math.inf)))
    y, h = matrix_recurrence(C, B, dt[..., None] * X, -dt * p["A_log"].exp(), initial_state=state.recurrent)
    y = (y + p["D"].reshape(H, -1) * X).flatten(2)
    if not config.get("rmsnorm", True):
        y = y * silu(z)
    elif config.get("norm_before_gate"):
        y = norm(y) * silu(z)
    else:
        y = norm(y * silu(z))
    return linear(p, "out_proj", y), RecurrentState(h, (window,))


def rwkv6(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H = config["num_heads"]
    delta = torch.cat([state.shift[:, None], x[:, :-1]], 1) - x
    low = torch.tanh(linear(p, "x_proj.0.linear", x + delta * p["x_proj.0.mu"])).chunk(5, -1)
    up = p["x_proj.2.weight"].chunk(5, 1)
    mixed = [x + delta * (z @ W.T + b) for W, z, b in zip(up, low, p["x_bias"], strict=True)]
    r, k, v, g = (linear(p, f"{name}_proj.linear", mixed["rwkvg".index(name)]) for name in "rkvg")
    w = linear(p, "w_proj.linear.lora.2", torch.tanh(linear(p, "w_proj.linear.lora.0", mixed[1])))
    r, k, v, w = (y.unflatten(-1, (H, -1)) for y in (r, k, v, -w.exp()))
    o, S = matrix_recurrence(r, k, v, gk=w, u=p["bonus"], initial_state=state.recurrent)
    o = o - o.mean(-1, keepdim=True)
    o = rms_norm(config, 1, o).flatten(2) * p.get("g_norm.weight", 1) + p.get("g_norm.bias", 0)
    o = o * ACTIVATIONS[config.get("gate_fn", "swish")](g)
    return linear(p, "o_proj", o), RecurrentState(S, shift=x[:, -1])


def mamba3(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    (H, R, S), P, G = p["B_bias"].shape, config["head_dim"], config.get("n_groups", 1)
    sizes = [H * P, H * P, R * G * S, R * G * S, H, H, H]
    y = linear(p, "in_proj", x)
    z, v, k, q, dt, A, trap, angles = y.split([*sizes, y.shape[-1] - sum(sizes)], -1)
    z, v = (y.unflatten(-1, (H, P)) for y in (z, v))
    q, k = (
        rms_norm(config, p[f"{name}_norm.weight"], y.unflatten(-1, (R, G, S)))
        for name, y in (("C", q), ("B", k))
    )
    dt = (1 + (dt + p["dt_bias"]).exp()).log()
    heavy = config.get("A_activation") == "heavy_tail"
    A = torch.where(A > 0, 1 + A, 1 / (1 - A)) if heavy else (1 + A.exp()).log()
    A = -A.clamp(min=config.get("A_floor", 1e-4))
    ones = torch.ones(H, 1, P, dtype=x.dtype)
    up, gates, down = (p.get(f"mimo_{name}", ones) for name in "xzo")
    normed = config.get("is_outproj_norm", False)
    if normed:
        down = down * p["norm.weight"].view(H, 1, P)
    o, new = mamba3_mimo(
        q, k, v, A * dt, dt, trap, p["C_bias"], p["B_bias"], angles.unsqueeze(2).expand(-1, -1, H, -1), p["D"], z,
        up, gates, down, (state.recurrent[0], state.recurrent[1].mT, *state.recurrent[2:]),
        config.get("is_mimo", False), config.get("norm_eps", 1e-5) if normed else None,
    )  # fmt: skip
    return linear(p, "out_proj", o.flatten(2)), RecurrentState((new[0], new[1].mT, *new[2:]))


def rwkv7(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, sigmoid = (
        config.get("num_heads") or config["hidden_size"] // config["head_dim"],
        ACTIVATIONS["sigmoid"],
    )
    delta = torch.cat([state.shift[:, None], x[:, :-1]], 1) - x
    xr, xw, xk, xv, xa, xg = (x + delta * p[f"x_{name}"] for name in "rwkvag")
    r, k, v = linear(p, "r_proj", xr), linear(p, "k_proj", xk), linear(p, "v_proj", xv)
    w = -math.exp(-0.5) * sigmoid(linear(p, "w_lora.lora.2", torch.tanh(linear(p, "w_lora.lora.0", xw))))
    if config.get("layer_idx") != 0:
        share = sigmoid(linear(p, "v_lora.lora.2", linear(p, "v_lora.lora.0", xv)))
        v = (1 - share) * v + share * first_values(x, v.shape[-1])
    a = sigmoid(linear(p, "a_lora.lora.2", linear(p, "a_lora.lora.0", xa)))
    g = linear(p, "g_lora.lora.2", sigmoid(linear(p, "g_lora.lora.0", xg)))
    kk, k = k * p["k_k"], k * (1 + (a - 1) * p["k_a"])
    r, w, kk, k, v, a = (y.unflatten(-1, (H, -1)) for y in (r, w, kk, k, v, a))
    square = kk.square().sum(-1, keepdim=True)
    kk = kk / ((square + 1e-6).sqrt() if config.get("fuse_norm") else square.sqrt().clamp(min=1e-12))
    erased = kk * a * (1 + w.exp() if config.get("allow_neg_eigval") else 1)
    o, S = matrix_recurrence(r, k, v, gk=w, a=-kk, b=erased, initial_state=state.recurrent, read_before=True)
    eps = config.get("norm_eps", 1e-5) * k.shape[-1]
    o = rms_norm({"norm_eps": eps}, 1, o - o.mean(-1, keepdim=True)).flatten(2)
    o = o * p.get("g_norm.weight", 1) + p.get("g_norm.bias", 0)
    o = o + ((r * k * p["r_k"]).sum(-1, keepdim=True) * v).flatten(2)
    return linear(p, "o_proj", o * g), RecurrentState(S, shift=x[:, -1])


def mlstm(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    cap, H = config.get("gate_soft_cap", 15.0), config["num_heads"]
    q, k, v = (linear(p, name, x).unflatten(-1, (H, -1)) for name in "qkv")
    i, f = (linear(p, f"{name}gate_preact", x) for name in "if")
    if cap is not None:
        i, f = (cap * torch.tanh(y / cap) for y in (i, f))
    o, recurrent = mlstm_recurrence(q, k, v, i, f, state.recurrent, q.shape[-1] ** -0.5)
    o = rms_norm({"norm_eps": 1e-6} | config, 1, o - o.mean(-1, keepdim=True)).flatten(2)
    o = o * p["multihead_norm.weight"] + p.get("multihead_norm.bias", 0)
    o = o * ACTIVATIONS["sigmoid"](linear(p, "ogate_preact", x))
    return linear(p, "out_proj", o), RecurrentState(recurrent)


def griffin(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    act, sigmoid = ACTIVATIONS[config.get("hidden_act", "gelu")], ACTIVATIONS["sigmoid"]
    gate, T = act(linear(p, "linear_y", x)), x.shape[1]
    x, window = convolved(p, "conv_1d", linear(p, "linear_x", x), state.conv[0])
    blocks = x.unflatten(-1, (config["num_heads"], 1, -1))
    r, i = (
        sigmoid(
            ((blocks @ p[f"rg_lru.{name}_gate_weight"])[..., 0, :] + p[f"rg_lru.{name}_gate_bias"]).flatten(2)
        )
        for name in ("recurrent", "input")
    )
    a = (-8 * (1 + p["rg_lru.recurrent_param"].exp()).log() * r).exp()
    first = (state.position + torch.arange(T))[:, None] == 0
    a, strength = torch.where(first, 0, a), torch.where(first, 1, (1 - a * a).sqrt())
    h, end = scan(strength * i * x, a.log(), state.recurrent)
    return linear(p, "linear_out", h * gate), RecurrentState(end, (window,), position=state.position + T)


def hgrn(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    bound, silu = lower_bound(config, p), ACTIVATIONS["silu"]
    (i, f), conv = projected(p, "if", x, state)
    f = bound + (1 - bound) * ACTIVATIONS["sigmoid"](f)
    o, h = scan((1 - f) * silu(i), f.log(), state.recurrent)
    o = rms_norm(config, p.get("g_norm.weight", 1), o) * silu(linear(p, "g_proj", x))
    return linear(p, "o_proj", o), RecurrentState(h, conv)


def hgrn2_or_lightnet(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, silu = config.get("num_heads") or config["hidden_size"] // config["expand_ratio"], ACTIVATIONS["silu"]
    lightnet, z = "k_proj.weight" in p, state.normalizer
    (q, k, v), conv = projected(p, "qkv" if lightnet else "qfi", x, state)
    q, k, v = (y.unflatten(-1, (H, -1)) for y in (q, k, v))
    if lightnet:
        sums = torch.cat([z[:, None], k], 1).logcumsumexp(1)
        g, k, z = sums[:, :-1] - sums[:, 1:], (k - sums[:, 1:]).exp(), sums[:, -1]
    else:
        bound = lower_bound(config, p).reshape(H, -1)
        decay = bound + (1 - bound) * ACTIVATIONS["sigmoid"](k)
        g, k = decay.log(), 1 - decay
    o, S = matrix_recurrence(silu(q), k, v, gk=g, **from_state(state, k))
    o = rms_norm(config, p.get("g_norm.weight", 1), o.flatten(2))
    if lightnet:
        o = o * silu(linear(p, "g_proj.1", linear(p, "g_proj.0", x)))
    return linear(p, "o_proj", o), RecurrentState(S, conv, z)


def gated_slot_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, (Hk, Hv), silu = config["num_heads"], state.recurrent, ACTIVATIONS["silu"]
    outputs, conv = projected(p, "qkv", x, state)
    q, k, v = (silu(y) if conv else y for y in outputs)
    q, k, v = (y.unflatten(-1, (n, -1)) for y, n in ((q, H), (k, Hk.shape[1]), (silu(v), Hk.shape[1])))
    name = config.get("feature_map", "swish")
    if name == "t2r":
        q, k = (linear(p, "feature_map.layer", h) for h in (q, k))
    q, k = (ACTIVATIONS["relu" if name == "t2r" else name](h) for h in (q, k))
    g = ACTIVATIONS["logsigmoid"](linear(p, "f_proj", x)).unflatten(-1, (Hk.shape[1], -1))
    g = g / config.get("gate_logit_normalizer", 8)
    scale = q.shape[-1] ** -0.5 if config.get("scale", 1.0) is None else 1.0
    o, S = slot_attention(q, k, v, 1 - g.exp(), g, (Hk, Hv), scale)
    o = rms_norm(config, p.get("g_norm.weight", 1), silu(o).flatten(2))
    return linear(p, "o_proj", o), RecurrentState(S, conv)


def abc(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, silu, position = config["num_heads"], ACTIVATIONS["silu"], state.position
    outputs, conv = projected(p, "qkv", x, state)
    if conv:
        outputs = [silu(y) for y in outputs]
    if config.get("use_input_gate"):
        outputs = [silu(y) for y in outputs]
    q, k, v, s = (y.unflatten(-1, (H, -1)) for y in (*outputs, linear(p, "s_proj", x)))
    if config.get("use_rope", True):
        q, k = rotated(q, position), rotated(k, position)
        position = position + x.shape[1]
    low, high = config.get("clamp_min", -32), config.get("clamp_max", 32)
    s = s if low is None and high is None else s.clamp(low, high)
    initial = (*state.recurrent, state.normalizer)
    o, (*S, z) = slot_attention(q, k, v, s, None, initial, q.shape[-1] ** -0.5)
    o = rms_norm(config, p.get("g_norm.weight", 1), o) if config.get("use_norm", True) else o
    if config.get("use_output_gate", True):
        o = o * silu(linear(p, "g_proj", x)).unflatten(-1, (H, -1))
    return linear(p, "o_proj", o.flatten(2)), RecurrentState(tuple(S), conv, z, position)


def delta_net(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    """Without a decay DeltaNet, with one per head Gated DeltaNet, with one per channel of the keys KDA.

    Gated DeltaProduct has several steps a token, of which the first decays.
    """
    H, HV = config["num_heads"], config.get("num_v_heads") or config["num_heads"]
    product = config["layer"] is GatedDeltaProduct
    n = config.get("num_householder", 2) if product else 1
    act, sigmoid = config.get("qk_activation", "silu"), ACTIVATIONS["sigmoid"]
    S, parts = whole_heads(state.recurrent, HV)

    def prepared(y: Tensor, steps: int) -> Tensor:
        y = feature_map({"feature_map": act}, p, "", y) if act in ("elu", "identity") else ACTIVATIONS[act](y)
        y = y.unflatten(-1, (steps, H, -1))
        if config.get("qk_norm") == "sum":
            return y / y.abs().sum(-1, keepdim=True).clamp(min=1e-6)
        return unit(y)

    (q, k, v), conv = projected(p, "qkv", x, state)
    q, k, v = prepared(q, 1)[:, :, 0], prepared(k, n), ACTIVATIONS["silu"](v).unflatten(-1, (n, HV, -1))
    beta = torch.ones(*v.shape[:-1], dtype=x.dtype)
    if "b_proj.weight" in p:
        beta = sigmoid(linear(p, "b_proj", x)).unflatten(-1, (n, HV))
    if config.get("allow_neg_eigval", product):
        beta = 2 * beta
    g, given = delta_decay(config, p, x, HV), from_state(state._replace(recurrent=S), k)
    if g.shape[-1] > 1:  # of channels
        o, S = matrix_recurrence(
            q, k[:, :, 0], v[:, :, 0], beta=beta[:, :, 0], gk=g, delta_rule=True, **given
        )
    else:
        o, S = delta_product(q, k, v, beta, g[..., 0], **given)
    gate = config.get("output_gate_activation", "silu")
    return delta_output(config, p, x, o, gate), RecurrentState(in_parts(S, parts), conv)


def gdn2_or_comba(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    """The delta rules in which another vector than the key reads what is replaced."""
    H, HV = config["num_heads"], config.get("num_v_heads") or config["num_heads"]
    sigmoid, silu = ACTIVATIONS["sigmoid"], ACTIVATIONS["silu"]
    S, parts = whole_heads(state.recurrent, HV)
    (q, k, v), conv = projected(p, "qkv", x, state)
    q, k, v = (silu(y).unflatten(-1, (n, -1)) for y, n in ((q, H), (k, H), (v, HV)))
    given = from_state(state._replace(recurrent=S), k)
    if config["layer"] is GatedDeltaNet2:
        b, w = (sigmoid(linear(p, f"{name}_proj", x)) for name in "bw")
        b, w = (
            b.unflatten(-1, (H, -1)) * (2 if config.get("allow_neg_eigval") else 1),
            w.unflatten(-1, (HV, -1)),
        )
        g = delta_decay(config, p, x, H).repeat_interleave(HV // H, 2)
        o, S = matrix_recurrence(
            unit(q),
            unit(k),
            w * v,
            gk=g,
            beta=torch.ones_like(v[..., 0]),
            a=b * unit(k),
            delta_rule=True,
            **given,
        )
    else:
        r = k * sigmoid(p["decay"])[:, None] if "decay" in p else k
        q = q - p["D"][:, None] * r if "D" in p else q
        q, k, r = (unit(y).repeat_interleave(HV // H, 2) for y in (q, k, r))
        written = sigmoid(linear(p, "b_proj", x))[..., None] * k
        g = delta_decay(config, p, x, HV).expand(k.shape)
        o, S = matrix_recurrence(q, written, v, gk=g, a=r, b=-written, read_before=True, **given)
    return delta_output(config, p, x, o, "sigmoid"), RecurrentState(in_parts(S, parts), conv)


def rodimus(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    sigmoid, silu = ACTIVATIONS["sigmoid"], ACTIVATIONS["silu"]
    u, conv = linear(p, "up_proj", x), ()
    s = u
    if state.conv:
        s, window = convolved(p, "short_conv", u, state.conv[0])
        s, conv = silu(s), (window,)
    f = (1 + linear(p, "g_gate_proj", s).exp()).log()
    tau = sigmoid(linear(p, "tau_gate_proj", s))
    q, k = linear(p, "q_proj", s), linear(p, "k_proj", s)
    k = k / k.norm(dim=-1, keepdim=True).clamp(min=config.get("k_norm_eps") or 1e-12) * f**tau
    v = u * sigmoid(linear(p, "i_gate_proj.1", linear(p, "i_gate_proj.0", u)))
    q, k, v, g = (y.unsqueeze(2) for y in (q, k, v, -f * tau))
    o, S = matrix_recurrence(q, k, v, gk=g, **from_state(state, k))
    o = (o[:, :, 0] + s * p["residual_weight"]) * silu(linear(p, "gate_proj", x))
    o = rms_norm(config, p["activation_norm.weight"], o)
    return linear(p, "down_proj", o), RecurrentState(S, conv)


def based_or_rebased(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    """Weights of features, of all pairs one after the other; of no state also as the papers have them, of products."""
    H = config["num_heads"]
    q, k, v = (linear(p, f"{name}_proj", x).unflatten(-1, (H, -1)) for name in "qkv")
    based, n = config["layer"] is BasedLinearAttention, q.shape[-1]
    if not based:
        if config.get("normalize", True):
            q, k = (rms_norm({}, 1, y - y.mean(-1, keepdim=True)) for y in (q, k))
        gamma, beta = p.get("feature_map.gamma", 1), p.get("feature_map.beta", 0)
        q, k = q * gamma + beta, k * gamma + beta

    def features(y: Tensor) -> Tensor:
        constant = [torch.ones_like(y[..., 0]), *(y[..., i] / n**0.25 for i in range(n))] if based else []
        squares = [y[..., i] ** 2 / (2 * n if based else n) ** 0.5 for i in range(n)]
        pairs = [y[..., i] * y[..., j] / n**0.5 for i in range(n) for j in range(i + 1, n)]
        return torch.stack([*constant, *squares, *(z if based else 2**0.5 * z for z in pairs)], -1)

    eps = config.get("eps", 1e-12 if based else 1e-5)
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o, S = matrix_recurrence(features(q), features(k), v, initial_state=state.recurrent)
    if not state.recurrent.any():
        s = torch.einsum("bthk,bshk->bhts", q, k) / n**0.5
        weights = (1 + s + s**2 / 2 if based else s**2).tril()
        assert_close(o, torch.einsum("bhts,bshv->bthv", weights, v), 1e-12)
    o = o[..., :-1] / (o[..., -1:] + eps)
    return linear(p, "o_proj", o.flatten(2)), RecurrentState(S)


def unit(y: Tensor) -> Tensor:
    return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def whole_heads(S: Tensor, HV: int) -> tuple[Tensor, int]:
    """The state as ``[1, HV, K, V]``, and how many parts the values of a head have."""
    parts = S.shape[1] // HV
    return torch.cat(S.unflatten(1, (HV, parts)).unbind(2), -1), parts


def in_parts(S: Tensor, parts: int) -> Tensor:
    return torch.stack(S.chunk(parts, -1), 2).flatten(1, 2)


def delta_output(config: Config, p: Parameters, x: Tensor, o: Tensor, gate: str) -> Tensor:
    o = rms_norm(config, p["o_norm.weight"], o).flatten(2)
    if "g_proj.weight" in p:
        o = o * ACTIVATIONS[gate](linear(p, "g_proj", x))
    if "g_proj.0.weight" in p:
        o = o * ACTIVATIONS["sigmoid"](linear(p, "g_proj.1", linear(p, "g_proj.0", x)))
    return linear(p, "o_proj", o)


def delta_decay(config: Config, p: Parameters, x: Tensor, HV: int) -> Tensor:
    """The log decays of tokens, ``[1, T, HV, 1]`` or ``[1, T, HV, K]``."""
    if "f_proj.0.weight" in p:
        a = linear(p, "f_proj.1", linear(p, "f_proj.0", x))
    elif "a_proj.weight" in p:
        a = linear(p, "a_proj", x)
    else:
        return x.new_zeros(*x.shape[:2], HV, 1)
    a, rate = (a + p["dt_bias"]).unflatten(-1, (HV, -1)), p["A_log"].exp()[:, None]
    if config.get("lower_bound") is not None:
        return config["lower_bound"] * ACTIVATIONS["sigmoid"](rate * a)
    return -rate * (1 + a.exp()).log()


def lower_bound(config: Config, p: Parameters) -> Tensor:
    """The lower bound of the forget gates of every channel: none in layer 0."""
    none = torch.full([len(p["f_proj.weight"])], -torch.inf, dtype=torch.float64)
    return ACTIVATIONS["sigmoid"](none if config.get("layer_idx") == 0 else p.get("bound", none))


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)


def convolved(p: Parameters, name: str, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    return short_conv(x, p[f"{name}.weight"][:, 0], p.get(f"{name}.bias"), window)


def projected(
    p: Parameters, names: str, x: Tensor, state: RecurrentState
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The projections of these names, after convolutions where the state has windows, and the new windows."""
    outputs = [linear(p, f"{name}_proj", x) for name in names]
    if not state.conv:
        return outputs, ()
    pairs = zip(names, outputs, state.conv, strict=True)
    outputs, conv = zip(*(convolved(p, f"{name}_conv1d", y, window) for name, y, window in pairs))
    return outputs, conv


def qkv(
    config: Config, p: Parameters, x: Tensor, state: RecurrentState
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """``q, k [1, T, H, K]``, mapped, and ``v [1, T, H, V]``, and the windows of the convolutions."""
    outputs, conv = projected(p, "qkv", x, state)
    q, k, v = (ACTIVATIONS["silu"](y) if conv else y for y in outputs)
    if config.get("feature_map"):
        q, k = (ACTIVATIONS[config["feature_map"]](y) for y in (q, k))
    return in_heads(config, q, repeat=False), *(in_heads(config, y, repeat=True) for y in (k, v)), conv


def in_heads(config: Config, h: Tensor, repeat: bool) -> Tensor:
    """``[1, T, H, D]`` of ``h [1, T, heads * D]``, neighbours sharing a head of keys and values."""
    heads = config["num_heads"]
    groups = heads // (config.get("num_kv_heads") or heads) if repeat else 1
    return h.unflatten(-1, (heads // groups, -1)).repeat_interleave(groups, 2)


def from_state(state: RecurrentState, k: Tensor) -> dict[str, Any]:
    """What the recurrences get: the state, and the scale of queries of the keys' width."""
    return {"initial_state": state.recurrent, "scale": k.shape[-1] ** -0.5}


def feature_map(config: Config, p: Parameters, side: str, h: Tensor) -> Tensor:
    maps, name = f"feature_map_{side}", config.get("feature_map", "elementwise_product")
    if name == "hedgehog":
        mapped = linear(p, f"{maps}.layer", h)
        e = torch.cat([2 * mapped, -2 * mapped], -1).exp()
        return e / e.sum(-1, keepdim=True)
    if name == "t2r":
        return ACTIVATIONS["relu"](linear(p, f"{maps}.layer", h))
    if name == "elementwise_product":
        return linear(p, f"{maps}.layer1", h) * linear(p, f"{maps}.layer2", h)
    if name == "dpfp":
        r = torch.cat([ACTIVATIONS["relu"](h), ACTIVATIONS["relu"](-h)], -1)
        n = r.shape[-1]
        return torch.stack([r[..., i] * r[..., i - j] for j in range(1, 5) for i in range(n)], -1)
    if name == "elu":
        return torch.where(h > 0, h + 1, h.exp())
    return {"relu": ACTIVATIONS["relu"], "identity": lambda h: h}[name](h)


def rotated(h: Tensor, start: Tensor) -> Tensor:
    """``h [1, T, H, K]``, its halves the parts of complex numbers, turned by their positions from `start` on."""
    T, K = h.shape[1], h.shape[3]
    angle = (start + torch.arange(T))[:, None] * 10000.0 ** (-torch.arange(0, K, 2).double() / K)
    z = torch.complex(h[..., : K // 2], h[..., K // 2 :]) * torch.exp(1j * angle)[:, None]
    return torch.cat([z.real, z.imag], -1)


def rms_norm(config: Config, weight: Tensor | int, o: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + config.get("norm_eps", 1e-5)).sqrt() * weight


def gated_output(config: Config, p: Parameters, x: Tensor, o: Tensor) -> Tensor:
    o = rms_norm(config, p.get("g_norm_swish_gate.weight", p.get("g_norm.weight", 1)), o).flatten(2)
    if config.get("use_output_gate", True):
        o = o * ACTIVATIONS[config.get("gate_fn", "swish")](linear(p, "g_proj", x))
    return linear(p, "o_proj", o)


def precision(device: torch.device) -> tuple[torch.dtype, float]:
    """The most precise dtype that the kernels of a device take, and how far layers may be off in it."""
    return (torch.float32, 2e-5) if device.type == "cuda" else (torch.float64, 1e-11)


def assert_true(
    config: Config, parameters: Parameters, x: Tensor, state: RecurrentState, y: Tensor, new: RecurrentState
) -> None:
    """One sequence ``x [T, hidden]`` from a state of one row gave `y` and `new`."""
    expected, after = sequence(config, parameters, x, state)
    relative = 1e-11 if x.dtype == torch.float64 else 2e-5
    assert_close(y, expected, relative)
    assert_states_close(new, after, relative)


def described(config: Config) -> str:
    layer = config.get("layer", GatedLinearAttention).__name__
    return " ".join([layer, *(f"{name}={value}" for name, value in config.items() if name != "layer")])


def made(config: Config, **factory: Any) -> nn.Module:
    """The layer of a configuration, of RWKV7 one that takes and returns what the others do."""
    config = dict(config)
    layer = config.pop("layer")
    return (RWKV7WithFirst if layer is RWKV7Attention else layer)(**config, **factory)


def build(config: Config, **to: Any) -> nn.Module:
    """A layer with no parameter at its initial value, none of them small: the same on every device."""
    layer = made(config).to(**to)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter, device="cpu").to(parameter.device), alpha=0.3)
    return layer


def tokens_of(layer: nn.Module, B: int, T: int) -> Tensor:
    like = next(layer.parameters())
    return torch.randn(B, T, layer.hidden_size, dtype=like.dtype).to(like.device)


def random_state(layer: nn.Module, N: int) -> RecurrentState:
    if isinstance(layer, (BasedLinearAttention, ReBasedLinearAttention)):
        # One that tokens have made: of others the weights of values may add up to almost nothing.
        with torch.no_grad():
            return layer(tokens_of(layer, N, 9))[1]

    def random(zeros: Tensor) -> Tensor:
        on_cpu = zeros.cpu()
        x = torch.randn_like(on_cpu) if zeros.is_floating_point() else torch.randint_like(on_cpu, 40)
        return x.to(zeros.device)

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
