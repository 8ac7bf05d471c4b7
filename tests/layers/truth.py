"""Gated linear attention as a layer, said again slowly: float64, one sequence at a time, names as in a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flacompose.layers import GatedLinearAttention, RecurrentState
from flacompose.ops.families.vector_decay import reference

ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "logsigmoid": lambda x: -(1 + (-x).exp()).log(),
    "silu": lambda x: x / (1 + (-x).exp()),
    "swish": lambda x: x / (1 + (-x).exp()),
    "sqrelu": lambda x: x * x * (x > 0),
    "gelu": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def sequence(
    config: dict[str, Any], parameters: dict[str, Tensor], x: Tensor, state: RecurrentState | None = None
) -> tuple[Tensor, RecurrentState]:
    """One sequence ``x [T, hidden]`` from a state of one row: ``[T, hidden]`` and the new state, on the CPU."""
    p = {name: value.detach().cpu().double() for name, value in parameters.items()}
    x = x.detach().cpu().double()
    heads = config["num_heads"]
    groups = heads // (config.get("num_kv_heads") or heads)
    eps = config.get("norm_eps", 1e-5)

    projected, conv = [], []
    for i, name in enumerate("qkv"):
        h = x @ p[f"{name}_proj.weight"].T
        if config.get("use_short_conv"):
            w = p[f"{name}_conv1d.weight"][:, 0]  # [D, W]
            past = torch.zeros_like(w) if state is None else state.conv[i][0].detach().cpu().double()
            window, out = past, []
            for token in h:
                window = torch.cat([window[:, 1:], token[:, None]], 1)
                y = (window * w).sum(1) + p.get(f"{name}_conv1d.bias", 0)
                out.append(ACTIVATIONS["silu"](y))
            h = torch.stack(out) if out else h
            conv.append(window[None])
        projected.append(h)
    q, k, v = projected
    gk = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    gk = ACTIVATIONS["logsigmoid"](gk) / config.get("gate_logit_normalizer", 16)
    if config.get("clamp_min") is not None:
        gk = gk.clamp(min=config["clamp_min"])

    T, K = len(x), q.shape[1] // heads
    q = q.reshape(T, heads, K)
    k, gk, v = (
        torch.stack([h.chunk(heads // groups, 1)[i // groups] for i in range(heads)], 1) for h in (k, gk, v)
    )
    if config.get("feature_map"):
        q, k = ACTIVATIONS[config["feature_map"]](q), ACTIVATIONS[config["feature_map"]](k)
    S = torch.zeros(1, heads, K, v.shape[2], dtype=torch.float64)
    if state is not None:
        S = state.recurrent.detach().cpu().double()
    if T:
        o, S = reference.vector_decay(q[None], k[None], v[None], gk[None], None, S, K**-0.5)
        o = o[0]
    else:
        o = v

    o = o / (o.square().mean(-1, keepdim=True) + eps).sqrt()
    o = o * p.get("g_norm_swish_gate.weight", p.get("g_norm.weight", 1))
    o = o.flatten(1)
    if config.get("use_output_gate", True):
        o = o * ACTIVATIONS[config.get("gate_fn", "swish")](x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T, RecurrentState(S, tuple(conv))


def precision(device: torch.device) -> tuple[torch.dtype, float]:
    """The most precise dtype that the kernels of a device take, and how far layers may be off in it."""
    return (torch.float32, 2e-5) if device.type == "cuda" else (torch.float64, 1e-11)


def build(config: dict[str, Any], **to: Any) -> GatedLinearAttention:
    """A layer with no parameter at its initial value, none of them small."""
    layer = GatedLinearAttention(**config).to(**to)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def random_state(layer: GatedLinearAttention, N: int) -> RecurrentState:
    zeros = layer.init_state(N)
    return RecurrentState(torch.randn_like(zeros.recurrent), tuple(torch.randn_like(c) for c in zeros.conv))


def row(state: RecurrentState, n: int) -> RecurrentState:
    return RecurrentState(state.recurrent[n : n + 1], tuple(c[n : n + 1] for c in state.conv))


def tensors(state: RecurrentState) -> list[Tensor]:
    return [state.recurrent, *state.conv]


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """In norm, ``expected`` wherever and in whatever precision it is."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    off = float((actual.detach().cpu().double() - expected.detach().cpu().double()).norm())
    assert off <= relative * float(expected.detach().double().norm()), f"off by {off:.1e}"


def assert_states_close(actual: RecurrentState, expected: RecurrentState, relative: float) -> None:
    for x, y in zip(tensors(actual), tensors(expected), strict=True):
        assert_close(x, y, relative)
