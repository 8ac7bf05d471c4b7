"""The layers of gated slot attention and of ABC, of HGRN2 and of LightNet."""

from __future__ import annotations

import math
import re

import pytest
import torch

from flacompose.layers import (
    ABCAttention,
    GatedSlotAttention,
    HGRN2Attention,
    LightNetAttention,
    RecurrentState,
)

from . import laws
from .truth import (
    ACTIVATIONS,
    assert_close,
    assert_states_close,
    floats,
    random_state,
    rotated,
    row,
    tensors,
)

silu = ACTIVATIONS["silu"]
GSA = {"layer": GatedSlotAttention, "hidden_size": 24, "num_heads": 4, "num_slots": 5}
ABC = {"layer": ABCAttention, "hidden_size": 24, "num_heads": 2, "num_slots": 5}
HGRN2 = {"layer": HGRN2Attention, "hidden_size": 24, "expand_ratio": 8}
LIGHTNET = {"layer": LightNetAttention, "hidden_size": 24, "expand_ratio": 8}
CONV = {"use_short_conv": True, "conv_bias": True, "conv_size": 3}
LAYERS = {
    "gsa": GSA | CONV | {"num_kv_heads": 2, "feature_map": "t2r"},
    "abc": ABC | CONV,
    "hgrn2": HGRN2 | CONV,
    "lightnet": LIGHTNET | CONV,
}
CONFIGS = [
    *LAYERS.values(),
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
]
each_layer = pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)


def described(config):
    return " ".join(str(getattr(value, "__name__", value)) for value in config.values())


each_config = pytest.mark.parametrize("config", CONFIGS, ids=described)


def build(config, device, dtype=None):
    config = dict(config)
    return laws.perturbed(config.pop("layer")(**config), device, dtype)


def truth_of(layer, config, bound=0.0):
    """Token by token, heads apart, in float64: what the papers write."""
    kind, eps = config["layer"], config.get("norm_eps", 1e-5)
    names = "qfi" if kind is HGRN2Attention else "qkv"
    H, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    low, high = config.get("clamp_min", -32), config.get("clamp_max", 32)
    low, high = -math.inf if low is None else low, math.inf if high is None else high

    def heads(y, D):
        y = y.reshape(-1, D)
        return y.repeat_interleave(H // len(y), 0)

    def norm(y, weight):
        return y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def truth(p, x, state):
        conv = [c[0] for c in state.conv]
        z = state.normalizer[0] if len(state.normalizer) else None
        position = int(state.position[0]) if len(state.position) else None
        H_k = state.recurrent[0] if kind in (HGRN2Attention, LightNetAttention) else state.recurrent[0][0]
        H_v = None if kind in (HGRN2Attention, LightNetAttention) else state.recurrent[1][0]
        out = []
        for token in x:
            made = []
            for i, name in enumerate(names):
                y = p[f"{name}_proj.weight"] @ token
                if conv:
                    conv[i] = torch.cat([conv[i][:, 1:], y[:, None]], 1)
                    y = (conv[i] * p[f"{name}_conv1d.weight"][:, 0]).sum(1) + p[f"{name}_conv1d.bias"]
                    if kind in (GatedSlotAttention, ABCAttention):
                        y = silu(y)
                made.append(y)
            q, k, v = made
            if kind is GatedSlotAttention:
                groups = layer.num_kv_groups
                q, k, v = q.reshape(-1, K), k.reshape(-1, K), silu(v).reshape(-1, V)
                if config.get("feature_map") == "t2r":
                    q, k = (ACTIVATIONS["relu"](h @ p["feature_map.layer.weight"].T) for h in (q, k))
                else:
                    q, k = (ACTIVATIONS[config.get("feature_map", "swish")](h) for h in (q, k))
                f = ACTIVATIONS["logsigmoid"](p["f_proj.weight"] @ token).reshape(layer.num_kv_heads, -1)
                decay = (f / config.get("gate_logit_normalizer", 8)).exp()
                weight = 1 - decay
                scale = K**-0.5 if config.get("scale", 1.0) is None else 1.0
            elif kind is ABCAttention:
                if config.get("use_input_gate"):
                    q, k, v = silu(q), silu(k), silu(v)
                q, k, v = q.reshape(H, K), k.reshape(H, K), v.reshape(H, V)
                if position is not None:
                    q, k = rotated(q[None], position)[0], rotated(k[None], position)[0]
                    position += 1
                groups, scale = 1, K**-0.5
                s = (p["s_proj.weight"] @ token).clamp(low, high).reshape(H, -1)
            else:
                q, k, v = silu(q).reshape(H, K), k.reshape(H, K), v.reshape(H, V)
                s = k
            if kind is HGRN2Attention:
                decay = bound + (1 - bound) / (1 + (-k).exp())
                k = 1 - decay
            elif kind is not GatedSlotAttention:
                before, z = z, (z.exp() + s.exp()).log()
                decay, weight = (before - z).exp(), (s - z).exp()
            if H_v is None:
                k = k if kind is HGRN2Attention else weight
                H_k = decay[:, :, None] * H_k + k[:, :, None] * v[:, None]
                o = (H_k * q[:, :, None]).sum(1) * K**-0.5
            else:
                H_k = H_k * decay[:, None] + k[:, :, None] * weight[:, None]
                H_v = decay[:, :, None] * H_v + weight[:, :, None] * v[:, None]
                logits = torch.stack([H_k[h // groups].T @ q[h] for h in range(H)]) * scale
                probability = logits.exp() / logits.exp().sum(1, keepdim=True)
                o = torch.stack([H_v[h // groups].T @ probability[h] for h in range(H)])
            weight = p.get("g_norm.weight", 1)
            if kind is GatedSlotAttention:
                o = norm(silu(o).flatten(), weight)
            elif kind is HGRN2Attention:
                o = norm(o.flatten(), weight)
            elif kind is LightNetAttention:
                gate = p["g_proj.1.weight"] @ p["g_proj.0.weight"] @ token
                o = norm(o.flatten(), weight) * silu(gate)
            else:
                o = norm(o, weight) if config.get("use_norm", True) else o
                if config.get("use_output_gate", True):
                    o = o * silu(p["g_proj.weight"] @ token).reshape(H, V)
            out.append(p["o_proj.weight"] @ o.flatten())
        recurrent = H_k[None] if H_v is None else (H_k[None], H_v[None])
        return torch.stack(out), RecurrentState(
            recurrent,
            tuple(c[None] for c in conv),
            () if z is None else z[None],
            () if position is None else torch.tensor([position]),
        )

    return truth


@each_config
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(config, dtype, device):
    layer = build(config, device, dtype)
    laws.check_values(layer, truth_of(layer, config))


@each_layer
def test_split(config, device):
    laws.check_split(build(config, device))


@each_layer
def test_padding(config, device):
    layer = build(config, device)
    laws.check_padding(layer, truth_of(layer, config))


@each_layer
def test_padding_gradients(config, device):
    laws.check_padding_gradients(build(config, device))


@each_layer
def test_packed(config, device):
    layer = build(config, device)
    laws.check_packed(layer, truth_of(layer, config))


@each_layer
def test_packed_and_padded_from_nothing(config, device):
    """Rows of pads and empty sequences keep the state of nothing, and their gradients are finite."""
    layer = build(config, device, torch.float64)
    x = laws.tokens_of(layer, 1, 6)
    mask = torch.zeros(1, 6, dtype=torch.long, device=device)
    cu_seqlens = torch.tensor([0, 0, 5, 5], device=device)
    for given, empty in (({"attention_mask": mask}, [0]), ({"cu_seqlens": cu_seqlens}, [0, 2])):
        y, state = layer(x, **given)
        zeros = tensors(layer.init_state(1))
        for n in empty:
            assert all(torch.equal(a[n : n + 1], b) for a, b in zip(tensors(state), zeros, strict=True))
        loss = y.square().sum() + sum((t.isfinite() * t).nan_to_num().sum() for t in floats(state))
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        assert all(g.isfinite().all() for g in gradients)


@each_layer
def test_gradients(config):
    laws.check_gradients(build(config, torch.device("cpu")))


@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
@each_layer
def test_bfloat16(config, autocast, device):
    # Projections, activations, a softmax, a norm and a gate on the way, each rounded to 8 bits.
    laws.check_bfloat16(build(config, device, torch.float32), autocast, 3e-2)


@each_layer
def test_compiled_decoding(config, device, few_levels):
    laws.check_compiled_decoding(build(config, device, torch.float32))


@pytest.mark.parametrize("layout", ["mask", "packed"])
@each_layer
@torch.no_grad()
def test_compiled_layouts(config, layout, device, few_levels):
    """One graph for every length, padded or packed."""
    layer = build(config, device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, T in enumerate((70, 2, 9, 65)):
        x = laws.tokens_of(layer, 1, T)
        if layout == "mask":
            given, state = (
                {"attention_mask": (torch.rand(1, T, device=device) < 0.7).long()},
                random_state(layer, 1),
            )
        else:
            bounds = torch.arange(4, device=device) * (T - 1) // 3
            given, state = {"cu_seqlens": bounds}, random_state(layer, 3)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            y, new = compiled(x, state, **given)
        expected, after = layer(x, state, **given)
        assert_close(y, expected, 1e-5)
        assert_states_close(new, after, 1e-5)


@each_layer
def test_export(config, device, tmp_path):
    slots = config["layer"] in (GatedSlotAttention, ABCAttention)
    laws.check_exported(build(config, device), "vector_decay_chunk", tmp_path / "layer.pt2", nodes=1 + slots)


def test_init_state(device):
    """Groups of queries share a state; a running logsumexp starts at -inf."""
    Hk, Hv = build(LAYERS["gsa"], device, torch.bfloat16).init_state(3).recurrent
    assert (Hk.shape, Hv.shape) == ((3, 2, 6, 5), (3, 2, 5, 6))
    assert Hk.dtype == Hv.dtype == torch.float32
    assert not Hk.any() and not Hv.any()
    state = build(ABC, device).init_state(3)
    assert state.normalizer.shape == (3, 2, 5) and (state.normalizer == -torch.inf).all()
    assert state.position.tolist() == [0, 0, 0]
    state = build(LIGHTNET, device).init_state(3)
    assert state.recurrent.shape == (3, 3, 8, 8)
    assert state.normalizer.shape == (3, 3, 8) and (state.normalizer == -torch.inf).all()
    assert build(HGRN2, device).init_state(3)[1:] == ((), (), (), ())


@pytest.mark.parametrize("bound", [0.0, 1e-30, 0.3, 0.999])
def test_lower_bound(bound, device):
    """Of forget gates of any strength; in layer 0 there is none."""
    config = HGRN2 | {"layer_idx": 3}
    layer = build(config, device)
    with torch.no_grad():
        layer.f_proj.weight[::2] *= 1000
    x, state = laws.tokens_of(layer, 1, 9), random_state(layer, 1)
    lower_bound = torch.full_like(x[0, 0], bound, requires_grad=True)
    y, new = layer(x, state, lower_bound=lower_bound)
    laws.assert_true(layer, truth_of(layer, config, bound), x[0], row(state, 0), y[0], row(new, 0))
    gradients = torch.autograd.grad(y.sum(), [lower_bound, *layer.parameters()])
    assert all(g.isfinite().all() for g in gradients) and gradients[0].any()
    layer.layer_idx = 0
    assert torch.equal(layer(x, state, lower_bound=lower_bound)[0], layer(x, state)[0])


@pytest.mark.parametrize("bound", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("logits", [-1e4, -100.0, 30.0, 1e4])
def test_forget_gates_of_any_strength(logits, bound, device):
    """One that forgets all, or nothing, and one that rounding takes for such: no NaN, nor in any gradient."""
    layer = HGRN2Attention(hidden_size=24, expand_ratio=8).to(device)
    with torch.no_grad():
        layer.f_proj.weight.fill_(logits)
    x = torch.ones(1, 5, 24, device=device, requires_grad=True)
    leaves = [x, *layer.parameters()]
    if bound is not None:
        bound = torch.full([24], bound, device=device, requires_grad=True)
        leaves.append(bound)
    y, state = layer(x, lower_bound=bound)
    gradients = torch.autograd.grad(y.sum() + state.recurrent.sum(), leaves)
    assert all(t.isfinite().all() for t in (y, state.recurrent, *gradients))


def test_lower_bounds_differ_by_channel(device):
    layer = build(HGRN2 | {"layer_idx": 1}, device)
    bound = torch.rand(24, device=device, dtype=layer.q_proj.weight.dtype)
    x = laws.tokens_of(layer, 1, 9)
    y, new = layer(x, lower_bound=bound)
    truth = truth_of(layer, HGRN2, bound.reshape(3, 8).cpu().double())
    laws.assert_true(layer, truth, x[0], layer.init_state(1), y[0], new)


def test_refused_lower_bounds():
    layer, x = HGRN2Attention(hidden_size=24, expand_ratio=8), torch.ones(1, 3, 24)
    with pytest.raises(ValueError, match=r"lower_bound must have shape \(24,\), got \(8,\)"):
        layer(x, lower_bound=torch.zeros(8))
    with pytest.raises(TypeError, match="lower_bound must be a tensor, got float"):
        layer(x, lower_bound=0.5)


# As Layer(hidden_size=64, **config).state_dict() of the peer lists them.
CHECKPOINTS = [
    (
        GatedSlotAttention,
        {"num_heads": 4, "num_kv_heads": 2, "feature_map": "t2r", "use_short_conv": True, "num_slots": 8},
        {
            "feature_map.layer.weight": (16, 16),
            "q_proj.weight": (64, 64),
            "k_proj.weight": (32, 64),
            "v_proj.weight": (32, 64),
            "f_proj.weight": (16, 64),
            "q_conv1d.weight": (64, 1, 4),
            "k_conv1d.weight": (32, 1, 4),
            "v_conv1d.weight": (32, 1, 4),
            "g_norm.weight": (64,),
            "o_proj.weight": (64, 64),
        },
    ),
    (
        ABCAttention,
        {"num_heads": 4, "use_short_conv": True, "conv_bias": True, "num_slots": 3},
        {
            "q_proj.weight": (32, 64),
            "k_proj.weight": (32, 64),
            "v_proj.weight": (64, 64),
            "g_proj.weight": (64, 64),
            "s_proj.weight": (12, 64),
            "o_proj.weight": (64, 64),
            "q_conv1d.weight": (32, 1, 4),
            "q_conv1d.bias": (32,),
            "k_conv1d.weight": (32, 1, 4),
            "k_conv1d.bias": (32,),
            "v_conv1d.weight": (64, 1, 4),
            "v_conv1d.bias": (64,),
            "g_norm.weight": (16,),
        },
    ),
    (
        ABCAttention,
        {"num_heads": 4, "use_output_gate": False, "use_norm": False},
        {
            "q_proj.weight": (32, 64),
            "k_proj.weight": (32, 64),
            "v_proj.weight": (64, 64),
            "s_proj.weight": (32, 64),
            "o_proj.weight": (64, 64),
        },
    ),
    (
        HGRN2Attention,
        {"expand_ratio": 16, "use_short_conv": True},
        {
            "q_proj.weight": (64, 64),
            "f_proj.weight": (64, 64),
            "i_proj.weight": (64, 64),
            "q_conv1d.weight": (64, 1, 4),
            "f_conv1d.weight": (64, 1, 4),
            "i_conv1d.weight": (64, 1, 4),
            "g_norm.weight": (64,),
            "o_proj.weight": (64, 64),
        },
    ),
    (
        LightNetAttention,
        {"expand_ratio": 8, "num_heads": 4, "use_short_conv": True},
        {
            "q_proj.weight": (32, 64),
            "k_proj.weight": (32, 64),
            "v_proj.weight": (64, 64),
            "q_conv1d.weight": (32, 1, 4),
            "k_conv1d.weight": (32, 1, 4),
            "v_conv1d.weight": (64, 1, 4),
            "g_proj.0.weight": (128, 64),
            "g_proj.1.weight": (64, 128),
            "g_norm.weight": (64,),
            "o_proj.weight": (64, 64),
        },
    ),
]


@pytest.mark.parametrize(("layer_type", "config", "expected"), CHECKPOINTS)
def test_names_and_shapes(layer_type, config, expected):
    with torch.device("meta"):
        layer = layer_type(hidden_size=64, **config)
    laws.check_names_and_shapes(layer, expected)
    layer.to_empty(device="cpu")
    layer.load_state_dict({name: torch.randn(shape) for name, shape in expected.items()})
    assert layer(torch.randn(1, 3, 64))[0].shape == (1, 3, 64)


ARGUMENTS = {
    GatedSlotAttention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_heads": 4,
        "num_kv_heads": None,
        "use_short_conv": False,
        "conv_size": 4,
        "conv_bias": False,
        "num_slots": None,
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "gate_logit_normalizer": 8,
        "feature_map": "swish",
        "use_output_gate": False,
        "use_norm": True,
        "layer_idx": None,
        "scale": 1.0,
    },
    ABCAttention: {
        "hidden_size": 1024,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "num_heads": 4,
        "use_short_conv": False,
        "conv_size": 4,
        "conv_bias": False,
        "num_slots": None,
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "gate_low_rank_dim": 16,
        "gate_logit_normalizer": 16,
        "use_rope": True,
        "use_input_gate": False,
        "use_output_gate": True,
        "use_norm": True,
        "clamp_min": -32,
        "clamp_max": 32,
        "layer_idx": None,
    },
    HGRN2Attention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "num_heads": None,
        "expand_ratio": 128,
        "use_short_conv": False,
        "conv_size": 4,
        "conv_bias": False,
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "layer_idx": None,
    },
    LightNetAttention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "num_heads": None,
        "expand_ratio": 128,
        "use_short_conv": False,
        "conv_size": 4,
        "conv_bias": False,
        "gate_low_rank_dim": 128,
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "layer_idx": None,
    },
}


@pytest.mark.parametrize("layer_type", ARGUMENTS)
def test_arguments(layer_type):
    """Those of the peer."""
    laws.check_arguments(layer_type, ARGUMENTS[layer_type])


@pytest.mark.parametrize(
    ("config", "arguments", "error", "message"),
    [
        (GSA, {"mode": "fused_chunk"}, ValueError, "mode 'fused_chunk' is no op of its own"),
        (
            GSA,
            {"expand_v": 2.0},
            ValueError,
            "hidden_size * expand_v must be hidden_size, as the norm is, got 48",
        ),
        (GSA, {"num_slots": 257}, ValueError, "num_slots must be from 1 to 256, got 257"),
        (GSA, {"num_slots": 5.0}, TypeError, "num_slots must be an int, got float"),
        (GSA, {"feature_map": "elu"}, ValueError, "feature_map must be 'swish', 'relu' or 't2r', got 'elu'"),
        (GSA, {"gate_logit_normalizer": 0}, ValueError, "gate_logit_normalizer must be positive, got 0"),
        (GSA, {"scale": "1"}, TypeError, "scale must be a number, got str"),
        (GSA, {"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads = 4, got 3"),
        (ABC, {"num_slots": 0}, ValueError, "num_slots must be from 1 to 256, got 0"),
        (ABC, {"num_heads": 4}, ValueError, "must be even, for rotary positions, got 3"),
        (ABC, {"clamp_min": 33}, ValueError, "clamp_min must be at most clamp_max = 32, got 33"),
        (ABC, {"clamp_min": math.nan}, ValueError, "clamp_min must be finite or -inf, got nan"),
        (ABC, {"clamp_max": "1"}, TypeError, "clamp_max must be a number, got str"),
        (ABC, {"mode": "chunk"}, TypeError, "mode"),
        (HGRN2, {"mode": "fused_chunk"}, ValueError, "mode 'fused_chunk' is no op of its own"),
        (HGRN2, {"num_heads": 4}, ValueError, "num_heads must be hidden_size // expand_ratio = 3, got 4"),
        (HGRN2, {"layer_idx": "0"}, TypeError, "layer_idx must be an int, got str"),
        (LIGHTNET, {"mode": "fused_chunk"}, ValueError, "mode must be 'chunk' or 'fused_recurrent'"),
        (LIGHTNET, {"gate_low_rank_dim": 0}, ValueError, "gate_low_rank_dim must be at least 1, got 0"),
        *(
            (config, *case)
            for config in (HGRN2, LIGHTNET)
            for case in (
                (
                    {"expand_ratio": None},
                    ValueError,
                    "num_heads or expand_ratio must be given, got None for both",
                ),
                ({"expand_ratio": 128}, ValueError, "expand_ratio must be at most hidden_size = 24, got 128"),
                ({"expand_ratio": 10}, None, None),
                ({"expand_ratio": 5}, None, None),
                (
                    {"expand_ratio": 257, "hidden_size": 514},
                    ValueError,
                    "expand_ratio must be from 1 to 256, got 257",
                ),
                ({"expand_ratio": 2.0}, TypeError, "expand_ratio must be an int, got float"),
                (
                    {"expand_ratio": None, "num_heads": 5},
                    ValueError,
                    "hidden_size must be a multiple of num_heads = 5",
                ),
                ({"expand_ratio": None, "num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
                ({"hidden_size": 24.0}, TypeError, "hidden_size must be an int, got float"),
            )
        ),
    ],
    ids=str,
)
def test_refused_arguments(config, arguments, error, message):
    config = config | arguments
    if error is None:  # 24 are 2 heads of 10 keys, and 4 of 5
        build(config, torch.device("cpu"))
        return
    with pytest.raises(error, match=re.escape(message)):
        build(config, torch.device("cpu"))


def test_refused_states():
    layer, x = build(ABC, torch.device("cpu"), torch.float32), torch.ones(2, 5, 24)
    state = layer.init_state(2)
    Hk, Hv = state.recurrent
    for change, error, message in (
        ({"recurrent": Hk}, TypeError, "state.recurrent must be a tuple of tensors, got Tensor"),
        ({"recurrent": (Hk,)}, ValueError, "state.recurrent must hold 2 tensors, got 1"),
        (
            {"recurrent": (Hv, Hv)},
            ValueError,
            "state.recurrent[0] must have shape (2, 2, 6, 5), got (2, 2, 5, 12)",
        ),
        ({"normalizer": ()}, TypeError, "state.normalizer must be a tensor, got tuple"),
        ({"normalizer": Hk}, ValueError, "state.normalizer must have shape (2, 2, 5), got (2, 2, 6, 5)"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            layer(x, state._replace(**change))
