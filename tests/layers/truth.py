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
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    HGRNAttention,
    KimiDeltaAttention,
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
VALUE_HEADS = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6}
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
    "delta_net": {"layer": DeltaNet, "use_gate": True, "allow_neg_eigval": True} | HEADS | SHORT,
    "gated_deltanet": {"layer": GatedDeltaNet} | VALUE_HEADS | SHORT,
    "gated_deltaproduct": {"layer": GatedDeltaProduct} | VALUE_HEADS | SHORT,
    "kda": {"layer": KimiDeltaAttention, "expand_v": 0.5} | VALUE_HEADS | SHORT,
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
    x = x.detach().cpu().double()
    state = pytree.tree_map(lambda t: t.detach().cpu()[0].double(), state)
    truth = {
        GatedLinearAttention: gated_linear_attention,
        SimpleGatedLinearAttention: simple_gated_linear_attention,
        LinearAttention: linear_attention,
        MultiScaleRetention: multi_scale_retention,
        LightningAttention: lightning_attention,
        Mamba2: mamba2,
        RWKV6Attention: rwkv6,
        HGRNAttention: hgrn,
        BoundedHGRN: hgrn,
        HGRN2Attention: hgrn2_or_lightnet,
        BoundedHGRN2: hgrn2_or_lightnet,
        LightNetAttention: hgrn2_or_lightnet,
        GatedSlotAttention: slot_attention,
        ABCAttention: slot_attention,
        DeltaNet: delta_rule,
        GatedDeltaNet: delta_rule,
        GatedDeltaProduct: delta_rule,
        KimiDeltaAttention: delta_rule,
    }[config["layer"]]
    y, state = truth(config, p, x, state)
    return y, pytree.tree_map(lambda t: t[None], state)


def gated_linear_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, conv = projected(config, p, x, state)
    g = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    g = ACTIVATIONS["logsigmoid"](g) / config.get("gate_logit_normalizer", 16)
    if config.get("clamp_min") is not None:
        g = g.clamp(min=config["clamp_min"])
    q, k = activated(config, q), activated(config, k)
    o, S = recurrence(q, k, v, in_heads(config, g, repeat=True).exp(), state)
    return gated_output(config, p, x, o), RecurrentState(S, conv)


def simple_gated_linear_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, conv = projected({"use_short_conv": True} | config, p, x, state)
    g = x @ p["gk_proj.weight"].T + p["gk_proj.bias"]
    g = ACTIVATIONS["logsigmoid"](g) / config.get("gate_logit_normalizer", 16)
    q, k = activated(config, q), activated(config, k)
    o, S = recurrence(q, k, v, g.exp()[:, :, None], state)
    return gated_output(config, p, x, o), RecurrentState(S, conv)


def linear_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, _ = projected(config, p, x, state)
    q, k = feature_map(config, p, "q", q), feature_map(config, p, "k", k)
    if config.get("norm_q"):
        q = q / (q.sum(-1, keepdim=True) + 1e-4)
    if config.get("norm_k"):
        k = k / (k.sum(-1, keepdim=True) + 1e-4)
    o, S = recurrence(q, k, v, torch.ones(len(x), 1, 1), state)
    z = ()
    if config.get("do_feature_map_norm"):
        z = state.normalizer
        for t in range(len(x)):
            z = z + k[t]
            o[t] /= (q[t] * z).sum(-1, keepdim=True) * k.shape[2] ** -0.5 + 1e-10
    if config.get("output_norm", "rmsnorm") == "rmsnorm":
        o = rms_norm(config, p.get("norm.weight", 1), o)
    return o.flatten(1) @ p["o_proj.weight"].T, RecurrentState(S, normalizer=z)


def multi_scale_retention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    q, k, v, conv = projected(config, p, x, state)
    q, k = activated(config, q), activated(config, k)
    start = int(state.position)
    q, k = rotated(q, start), rotated(k, start)
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(config["num_heads"])], dtype=q.dtype)
    o, S = recurrence(q, k, v, decay[None, :, None].expand(len(x), -1, -1), state)
    return gated_output(config, p, x, o), RecurrentState(S, conv, position=torch.tensor(start + len(x)))


def lightning_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, depth, L = config["num_heads"], config["layer_idx"], config["num_layers"]
    D = len(p["norm.weight"]) // H
    if config.get("decay", "minimax") == "tnl":
        rates = [8 * h / H * (1 - depth / L) for h in range(H)]
    else:
        rates = [2 ** (-8 * (h + 1) / H) * (1 - depth / (L - 1 + 1e-5) + 1e-5) for h in range(H)]
    decay = (-torch.tensor(rates, dtype=torch.float64)).exp()[:, None, None]
    S, out = state.recurrent, []
    for token in x:
        qkv = ACTIVATIONS[config.get("hidden_act", "silu")](p["qkv_proj.weight"] @ token)
        q, k, v = (qkv[i * D :].unfold(0, D, 3 * D) for i in range(3))  # [H, D], a head's side by side
        S = decay * S + k[:, :, None] * v[:, None]
        o = rms_norm({"norm_eps": 1e-6} | config, p["norm.weight"], (S * q[:, :, None]).sum(1).flatten())
        o = o / (1 + (-p["output_gate.weight"] @ token).exp())
        out.append(p["out_proj.weight"] @ o)
    return torch.stack(out), RecurrentState(S)


def mamba2(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, P, S, G = len(p["A_log"]), config["head_dim"], config["state_size"], config.get("n_groups", 1)
    low, high = config.get("dt_limit", (0, math.inf))
    act, silu = ACTIVATIONS[config.get("hidden_act", "silu")], ACTIVATIONS["silu"]
    D = p["D"].reshape(H, -1)

    def norm(y: Tensor) -> Tensor:
        return torch.cat([rms_norm(config, 1, part) for part in y.chunk(G)]) * p["norm.weight"]

    h, window, out = state.recurrent, state.conv[0], []
    for token in x:
        z, xBC, dt = (p["in_proj.weight"] @ token + p.get("in_proj.bias", 0)).split(
            [H * P, H * P + 2 * G * S, H]
        )
        window = torch.cat([window[:, 1:], xBC[:, None]], 1)
        xBC = act((window * p["conv1d.weight"][:, 0]).sum(1) + p.get("conv1d.bias", 0))
        X, B, C = xBC.split([H * P, G * S, G * S])
        X = X.reshape(H, P)
        B, C = (torch.stack([y.chunk(G)[i * G // H] for i in range(H)]) for y in (B, C))  # [H, S]
        dt = (1 + (dt + p["dt_bias"]).exp()).log().clamp(low, high)
        decay = (-dt * p["A_log"].exp()).exp()
        h = decay[:, None, None] * h + dt[:, None, None] * B[:, :, None] * X[:, None]
        y = ((h * C[:, :, None]).sum(1) + D * X).flatten()
        if not config.get("rmsnorm", True):
            y = y * silu(z)
        elif config.get("norm_before_gate"):
            y = norm(y) * silu(z)
        else:
            y = norm(y * silu(z))
        out.append(p["out_proj.weight"] @ y + p.get("out_proj.bias", 0))
    return torch.stack(out), RecurrentState(h, (window,))


def rwkv6(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, eps = config["num_heads"], config.get("norm_eps", 1e-5)
    S, before, out = state.recurrent, state.shift, []
    for token in x:
        delta = before - token
        low = torch.tanh(p["x_proj.0.linear.weight"] @ (token + delta * p["x_proj.0.mu"])).chunk(5)
        up = p["x_proj.2.weight"].chunk(5, 1)
        mixed = [token + delta * (W @ z + b) for W, z, b in zip(up, low, p["x_bias"], strict=True)]
        r, _, k, v, g = (
            p[f"{name}_proj.linear.weight"] @ y if name != "w" else None
            for name, y in zip("rwkvg", mixed, strict=True)
        )
        w = p["w_proj.linear.lora.2.weight"] @ torch.tanh(p["w_proj.linear.lora.0.weight"] @ mixed[1])
        w = -(w + p["w_proj.linear.lora.2.bias"]).exp()
        o = []
        for h in range(H):
            r_, k_, v_, w_ = (y.chunk(H)[h] for y in (r, k, v, w))
            kv = k_[:, None] * v_
            o.append(r_ @ (S[h] + p["bonus"][h][:, None] * kv))
            S = S.index_put((torch.tensor(h),), w_.exp()[:, None] * S[h] + kv)
        o = torch.cat([(y - y.mean()) / (y.var(correction=0) + eps).sqrt() for y in o])
        o = o * p.get("g_norm.weight", 1) + p.get("g_norm.bias", 0)
        out.append(p["o_proj.weight"] @ (o * ACTIVATIONS[config.get("gate_fn", "swish")](g)))
        before = token
    return torch.stack(out), RecurrentState(S, shift=before)


def hgrn(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    bound, silu = lower_bound(config, p), ACTIVATIONS["silu"]
    h, windows, out = state.recurrent, list(state.conv), []
    for token in x:
        i, f = step(p, "if", token, windows)
        f = bound + (1 - bound) / (1 + (-f).exp())
        h = f * h + (1 - f) * silu(i)
        o = rms_norm(config, p.get("g_norm.weight", 1), h)
        out.append(p["o_proj.weight"] @ (o * silu(p["g_proj.weight"] @ token)))
    return torch.stack(out), RecurrentState(h, tuple(windows))


def hgrn2_or_lightnet(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, silu = config.get("num_heads") or config["hidden_size"] // config["expand_ratio"], ACTIVATIONS["silu"]
    lightnet = "k_proj.weight" in p
    h, z, windows, out = state.recurrent, state.normalizer, list(state.conv), []
    for token in x:
        q, k, v = (y.reshape(H, -1) for y in step(p, "qkv" if lightnet else "qfi", token, windows))
        if lightnet:
            before, z = z, (z.exp() + k.exp()).log()
            decay, k = (before - z).exp(), (k - z).exp()
        else:
            bound = lower_bound(config, p).reshape(-1, k.shape[1])
            decay = bound + (1 - bound) / (1 + (-k).exp())
            k = 1 - decay
        h = decay[:, :, None] * h + k[:, :, None] * v[:, None]
        o = (h * silu(q)[:, :, None]).sum(1) * q.shape[1] ** -0.5
        o = rms_norm(config, p.get("g_norm.weight", 1), o.flatten())
        if lightnet:
            o = o * silu(p["g_proj.1.weight"] @ p["g_proj.0.weight"] @ token)
        out.append(p["o_proj.weight"] @ o)
    return torch.stack(out), RecurrentState(h, tuple(windows), z)


def slot_attention(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    H, M, silu = config["num_heads"], state.recurrent[1].shape[1], ACTIVATIONS["silu"]
    gated = "f_proj.weight" in p
    low, high = config.get("clamp_min", -32), config.get("clamp_max", 32)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    (Hk, Hv), z, position = state.recurrent, state.normalizer, state.position
    groups = H // len(Hk)
    windows, out = list(state.conv), []
    for token in x:
        q, k, v = (silu(y) if windows else y for y in step(p, "qkv", token, windows))
        if not gated and config.get("use_input_gate"):
            q, k, v = silu(q), silu(k), silu(v)
        q, k, v = q.reshape(H, -1), k.reshape(len(Hk), -1), v.reshape(len(Hk), -1)
        scale = q.shape[1] ** -0.5
        if gated:
            v = silu(v)
            name = config.get("feature_map", "swish")
            if name == "t2r":
                q, k = (h @ p["feature_map.layer.weight"].T for h in (q, k))
            q, k = (ACTIVATIONS["relu" if name == "t2r" else name](h) for h in (q, k))
            f = ACTIVATIONS["logsigmoid"](p["f_proj.weight"] @ token).reshape(-1, M)
            decay = (f / config.get("gate_logit_normalizer", 8)).exp()
            weight = 1 - decay
            scale = scale if config.get("scale", 1.0) is None else 1.0
        else:
            if config.get("use_rope", True):
                q, k = (rotated(y[None], int(position))[0] for y in (q, k))
                position = position + 1
            s = (p["s_proj.weight"] @ token).clamp(low, high).reshape(H, -1)
            before, z = z, (z.exp() + s.exp()).log()
            decay, weight = (before - z).exp(), (s - z).exp()
        Hk = Hk * decay[:, None] + k[:, :, None] * weight[:, None]
        Hv = decay[:, :, None] * Hv + weight[:, :, None] * v[:, None]
        logits = torch.stack([Hk[h // groups].T @ q[h] for h in range(H)]) * scale
        probability = logits.exp() / logits.exp().sum(1, keepdim=True)
        o = torch.stack([Hv[h // groups].T @ probability[h] for h in range(H)])
        if gated:
            o = rms_norm(config, p.get("g_norm.weight", 1), silu(o).flatten())
        else:
            o = rms_norm(config, p.get("g_norm.weight", 1), o) if config.get("use_norm", True) else o
            if config.get("use_output_gate", True):
                o = o * silu(p["g_proj.weight"] @ token).reshape(H, -1)
        out.append(p["o_proj.weight"] @ o.flatten())
    return torch.stack(out), RecurrentState((Hk, Hv), tuple(windows), z, position)


def delta_rule(config: Config, p: Parameters, x: Tensor, state: RecurrentState) -> Result:
    """Without a decay DeltaNet, with one per head Gated DeltaNet, with one per channel of the keys KDA.

    Gated DeltaProduct has several steps a token, of which the first decays.
    """
    H, HV = config["num_heads"], config.get("num_v_heads") or config["num_heads"]
    product = config["layer"] is GatedDeltaProduct
    n = config.get("num_householder", 2) if product else 1
    act, sigmoid, silu = config.get("qk_activation", "silu"), ACTIVATIONS["sigmoid"], ACTIVATIONS["silu"]
    parts = len(state.recurrent) // HV  # of the values of a head
    S = torch.cat(state.recurrent.unflatten(0, (HV, parts)).unbind(1), -1)  # [HV, K, V]
    windows, out = list(state.conv), []

    def prepared(y: Tensor) -> Tensor:
        y = feature_map({"feature_map": act}, p, "", y) if act in ("elu", "identity") else ACTIVATIONS[act](y)
        y = y.reshape(-1, H, S.shape[1])
        if config.get("qk_norm") == "sum":
            y = y / y.abs().sum(-1, keepdim=True).clamp(min=1e-6)
        else:
            y = y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return y.repeat_interleave(HV // H, 1)

    for token in x:
        q, k, v = step(p, "qkv", token, windows)
        q, k, v = prepared(q)[0], prepared(k), silu(v).reshape(n, HV, -1)
        beta = torch.ones(n, HV, dtype=x.dtype)
        if "b_proj.weight" in p:
            beta = sigmoid(p["b_proj.weight"] @ token).reshape(n, HV)
        if config.get("allow_neg_eigval", product):
            beta = 2 * beta
        S = delta_decay(config, p, token, HV)[:, :, None] * S
        for i in range(n):
            wanted = v[i] - (S * k[i, :, :, None]).sum(1)
            S = S + beta[i, :, None, None] * k[i, :, :, None] * wanted[:, None]
        o = rms_norm(config, p["o_norm.weight"], (S * q[:, :, None]).sum(1) * q.shape[1] ** -0.5).flatten()
        if "g_proj.weight" in p:
            o = o * ACTIVATIONS[config.get("output_gate_activation", "silu")](p["g_proj.weight"] @ token)
        if "g_proj.0.weight" in p:
            o = o * sigmoid(p["g_proj.1.weight"] @ p["g_proj.0.weight"] @ token + p["g_proj.1.bias"])
        out.append(p["o_proj.weight"] @ o)
    S = torch.stack(S.chunk(parts, -1), 1).flatten(0, 1)
    return torch.stack(out), RecurrentState(S, tuple(windows))


def delta_decay(config: Config, p: Parameters, token: Tensor, HV: int) -> Tensor:
    """By what a token multiplies the state that it finds, ``[HV, 1]`` or ``[HV, K]``."""
    if "f_proj.0.weight" in p:
        a = p["f_proj.1.weight"] @ p["f_proj.0.weight"] @ token
    elif "a_proj.weight" in p:
        a = p["a_proj.weight"] @ token
    else:
        return torch.ones(HV, 1, dtype=token.dtype)
    a, rate = (a + p["dt_bias"]).reshape(HV, -1), p["A_log"].exp()[:, None]
    if config.get("lower_bound") is not None:
        return (config["lower_bound"] * ACTIVATIONS["sigmoid"](rate * a)).exp()
    return (1 + a.exp()) ** -rate


def step(p: Parameters, names: str, token: Tensor, windows: list[Tensor]) -> list[Tensor]:
    """The projections of one token, after convolutions where there are windows, which move on in their list."""
    outputs = []
    for i, name in enumerate(names):
        y = p[f"{name}_proj.weight"] @ token
        if windows:
            windows[i] = torch.cat([windows[i][:, 1:], y[:, None]], 1)
            y = (windows[i] * p[f"{name}_conv1d.weight"][:, 0]).sum(1) + p.get(f"{name}_conv1d.bias", 0)
        outputs.append(y)
    return outputs


def lower_bound(config: Config, p: Parameters) -> Tensor:
    """The lower bound of the forget gates of every channel: none in layer 0."""
    none = torch.full([len(p["f_proj.weight"])], -torch.inf, dtype=torch.float64)
    return ACTIVATIONS["sigmoid"](none if config.get("layer_idx") == 0 else p.get("bound", none))


def projected(
    config: Config, p: Parameters, x: Tensor, state: RecurrentState
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """``q, k [T, H, K]`` and ``v [T, H, V]``, and the windows of the convolutions."""
    outputs, conv = [], []
    for i, name in enumerate("qkv"):
        h = x @ p[f"{name}_proj.weight"].T
        if config.get("use_short_conv"):
            w = p[f"{name}_conv1d.weight"][:, 0]  # [D, W]
            window, out = state.conv[i], []
            for token in h:
                window = torch.cat([window[:, 1:], token[:, None]], 1)
                y = (window * w).sum(1) + p.get(f"{name}_conv1d.bias", 0)
                out.append(ACTIVATIONS["silu"](y))
            h = torch.stack(out)
            conv.append(window)
        outputs.append(in_heads(config, h, repeat=name != "q"))
    q, k, v = outputs
    return q, k, v, tuple(conv)


def in_heads(config: Config, h: Tensor, repeat: bool) -> Tensor:
    """``[T, H, D]`` of ``h [T, heads * D]``, neighbours sharing a head of keys and values."""
    heads = config["num_heads"]
    groups = heads // (config.get("num_kv_heads") or heads) if repeat else 1
    return torch.stack([h.chunk(heads // groups, 1)[i // groups] for i in range(heads)], 1)


def activated(config: Config, h: Tensor) -> Tensor:
    return ACTIVATIONS[config["feature_map"]](h) if config.get("feature_map") else h


def feature_map(config: Config, p: Parameters, side: str, h: Tensor) -> Tensor:
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
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: RecurrentState
) -> tuple[Tensor, Tensor]:
    """``S = decay * S + k v^T``, read by ``q K^-1/2``; ``decay`` is ``[T, H or 1, K or 1]``."""
    K = k.shape[2]
    S = state.recurrent
    o = torch.empty_like(v)
    for t in range(len(k)):
        S = decay[t][:, :, None] * S + k[t][:, :, None] * v[t][:, None]
        o[t] = (q[t][:, :, None] * S).sum(1) * K**-0.5
    return o, S


def rms_norm(config: Config, weight: Tensor | int, o: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + config.get("norm_eps", 1e-5)).sqrt() * weight


def gated_output(config: Config, p: Parameters, x: Tensor, o: Tensor) -> Tensor:
    o = rms_norm(config, p.get("g_norm_swish_gate.weight", p.get("g_norm.weight", 1)), o).flatten(1)
    if config.get("use_output_gate", True):
        o = o * ACTIVATIONS[config.get("gate_fn", "swish")](x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T


def precision(device: torch.device) -> tuple[torch.dtype, float]:
    """The most precise dtype that the kernels of a device take, and how far layers may be off in it."""
    return (torch.float32, 2e-5) if device.type == "cuda" else (torch.float64, 1e-11)


def assert_true(
    config: Config,
    parameters: Parameters,
    x: Tensor,
    state: RecurrentState,
    y: Tensor,
    new: RecurrentState,
) -> None:
    """One sequence ``x [T, hidden]`` from a state of one row gave `y` and `new`."""
    expected, after = sequence(config, parameters, x, state)
    relative = 1e-11 if x.dtype == torch.float64 else 2e-5
    assert_close(y, expected, relative)
    assert_states_close(new, after, relative)


def described(config: Config) -> str:
    layer = config.get("layer", GatedLinearAttention).__name__
    return " ".join([layer, *(f"{name}={value}" for name, value in config.items() if name != "layer")])


def build(config: Config, **to: Any) -> nn.Module:
    """A layer with no parameter at its initial value, none of them small: the same on every device."""
    config = dict(config)
    layer = config.pop("layer")(**config).to(**to)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter, device="cpu").to(parameter.device), alpha=0.3)
    return layer


def tokens_of(layer: nn.Module, B: int, T: int) -> Tensor:
    like = next(layer.parameters())
    return torch.randn(B, T, layer.hidden_size, dtype=like.dtype).to(like.device)


def random_state(layer: nn.Module, N: int) -> RecurrentState:
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
