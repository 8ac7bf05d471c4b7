"""The layer of RWKV6, and its token shift."""

from __future__ import annotations

import math
import re

import pytest
import torch
from contract.graphs import recorded

from flacompose.layers import RecurrentState, RWKV6Attention
from flacompose.layers.token_shift import token_shift

from . import laws
from .test_compile import arguments, exported
from .truth import ACTIVATIONS, assert_close, assert_states_close, random_state, tensors

BASE = {"hidden_size": 24, "num_heads": 3, "proj_low_rank_dim": 4, "gate_low_rank_dim": 5}
WIDE = BASE | {"expand_k": 1.0, "expand_v": 2.0, "gate_fn": "sigmoid", "norm_eps": 0.1}
CONFIGS = [
    BASE,
    WIDE,
    BASE | {"mode": "fused_recurrent", "elementwise_affine": False, "fuse_norm": False},
    BASE | {"num_heads": 1, "gate_fn": "gelu"},
]


def truth_of(layer, config):
    H, hidden = config["num_heads"], config["hidden_size"]
    act, eps = ACTIVATIONS[config.get("gate_fn", "swish")], config.get("norm_eps", 1e-5)

    def truth(p, x, state):
        S, before, out = state.recurrent[0], state.shift[0], []
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
            out.append(p["o_proj.weight"] @ (o * act(g)))
            before = token
        y = torch.stack(out) if out else x.new_zeros(0, hidden)
        return y, RecurrentState(S[None], shift=before[None])

    return truth


def built(config, device, dtype=None):
    return laws.perturbed(RWKV6Attention(**config), device, dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(config, dtype, device):
    layer = built(config, device, dtype)
    laws.check_values(layer, truth_of(layer, config))


@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_split(config, device):
    laws.check_split(built(config, device))


def test_padding(device):
    layer = built(BASE, device)
    laws.check_padding(layer, truth_of(layer, BASE))


def test_padding_gradients(device):
    laws.check_padding_gradients(built(WIDE, device))


@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_packed(config, device):
    layer = built(config, device)
    laws.check_packed(layer, truth_of(layer, config))


@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_gradients(config):
    laws.check_gradients(built(config, torch.device("cpu")))


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("logits", [-1e4, -100.0, 30.0, 80.0, 88.0, 89.0, 1e4])
def test_gates_of_any_strength(logits, T, device):
    """Decays that forget all, or nothing: no NaN, nor in any gradient."""
    layer = built(BASE, device, torch.float32)
    with torch.no_grad():
        layer.w_proj.linear.lora[2].bias.fill_(logits)
    x = laws.tokens_of(layer, 1, T).requires_grad_()
    state = random_state(layer, 1)
    leaves = [t.requires_grad_() for t in tensors(state)]
    y, new = layer(x, state)
    results = [y, *tensors(new)]
    gradients = torch.autograd.grad(sum(t.sum() for t in results), [x, *leaves, *layer.parameters()])
    assert all(t.isfinite().all() for t in (*results, *gradients))
    if logits > 0 and T > 1:
        _, alone = layer(x[:, -1:], RecurrentState(torch.zeros_like(new.recurrent), shift=x[:, -2]))
        assert_close(new.recurrent, alone.recurrent, 1e-6)


@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_bfloat16(layout, autocast, device):
    cu_seqlens = torch.tensor([0, 15, 40], device=device) if layout == "packed" else None
    # Mixed tokens, two projections for each of five, and a norm on the way, each rounded to 8 bits.
    state = laws.check_bfloat16(built(BASE, device, torch.float32), autocast, 3e-2, cu_seqlens)
    assert [t.dtype for t in tensors(state)] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("layout", ["mask", "packed"])
@torch.no_grad()
def test_compile_padded_and_packed(layout, device):
    """One graph for every length."""
    layer = built(BASE, device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, T in enumerate(laws.LENGTHS):
        given = {"attention_mask": (torch.rand(1, T, device=device) < 0.7).long()}
        if layout == "packed":
            given = {"cu_seqlens": torch.arange(4, device=device) * (T - 1) // 3}
        x, state = laws.tokens_of(layer, 1, T), random_state(layer, 3 if layout == "packed" else 1)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            y, new = compiled(x, state, **given)
        expected, last = layer(x, state, **given)
        assert_close(y, expected, 1e-5)
        assert_states_close(new, last, 1e-5)


def test_compiled_decoding(device):
    laws.check_compiled_decoding(built(BASE, device, torch.float32))


def test_export(device, tmp_path):
    laws.check_exported(built(BASE, device), "vector_decay_chunk", tmp_path / "layer.pt2")


@pytest.mark.parametrize("layout", ["mask", "packed"])
def test_export_padded_and_packed(layout, device):
    """One node, any number of sequences, exact at lengths that were not traced."""
    layer = built(BASE | {"hidden_size": 16, "num_heads": 2}, device, torch.float32)
    program = exported(layer, layout, device)
    ops = [n.target for n in program.graph.nodes if "flacompose" in str(n.target)]
    assert ops == [torch.ops.flacompose.vector_decay_chunk.default]
    for i, T in enumerate(laws.LENGTHS[1:]):
        N, given = arguments(layout, T, device, N=1 + i)
        given = {"attention_mask": None, "cu_seqlens": None} | given
        x, state = laws.tokens_of(layer, 1, T), random_state(layer, N)
        with torch.no_grad():
            y, new = program.module()(x, state, **given)
            expected, last = layer(x, state, **given)
        assert_close(y, expected, 1e-6)
        assert_states_close(new, last, 1e-6)


def test_state(device):
    layer = built(BASE, device, torch.float32)
    state = layer.init_state(3)
    assert state.recurrent.shape == (3, 3, 4, 8) and state.shift.shape == (3, 24)
    assert state.conv == state.normalizer == state.position == ()
    assert {t.dtype for t in tensors(state)} == {torch.float32}
    assert [t.dtype for t in tensors(layer.bfloat16().init_state(1))] == [torch.float32, torch.bfloat16]
    assert {t.dtype for t in tensors(layer.double().init_state(1))} == {torch.float64}


@pytest.mark.parametrize(
    ("mode", "T", "form"),
    [("chunk", 2, "chunk"), ("fused_recurrent", 2, "recurrent"), ("chunk", 1, "recurrent")],
)
def test_form(mode, T, form, device):
    with recorded() as calls:
        built(BASE | {"mode": mode}, device, torch.float32)(torch.randn(1, T, 24, device=device))
    assert [op.name() for op, _, _ in calls] == [f"flacompose::vector_decay_{form}"]


@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from a state"])
def test_token_shift(given, device):
    x = torch.arange(1.0, 13.0, device=device)[None, :, None].expand(1, 12, 2)
    last = torch.tensor([[-1.0], [-2.0], [-3.0], [-4.0]], device=device).expand(4, 2)
    shifted, new = token_shift(x, last[:1] if given else None)
    assert shifted[0, :, 0].tolist() == [-1.0 if given else 0.0, *range(1, 12)]
    assert new.tolist() == [[12, 12]]
    cu_seqlens = torch.tensor([0, 0, 4, 5, 5], device=device)
    shifted, new = token_shift(x, last if given else None, cu_seqlens=cu_seqlens)
    starts = [-2, -3] if given else [0, 0]
    assert shifted[0, :5, 0].tolist() == [starts[0], 1, 2, 3, starts[1]]
    assert new[:, 0].tolist() == ([-1, 4, 5, -4] if given else [0, 4, 5, 0])
    rows = x.expand(3, 12, 2)
    _, new = token_shift(rows, last[:3] if given else None, lengths=torch.tensor([0, 5, 12], device=device))
    assert new[:, 0].tolist() == [-1 if given else 0, 5, 12]


PARAMETERS = {
    "x_bias": (5, 24),
    "bonus": (3, 4),
    "x_proj.0.mu": (24,),
    "x_proj.0.linear.weight": (20, 24),
    "x_proj.2.weight": (24, 20),
    "r_proj.linear.weight": (12, 24),
    "w_proj.linear.lora.0.weight": (5, 24),
    "w_proj.linear.lora.2.weight": (12, 5),
    "w_proj.linear.lora.2.bias": (12,),
    "k_proj.linear.weight": (12, 24),
    "v_proj.linear.weight": (24, 24),
    "g_proj.linear.weight": (24, 24),
    "g_norm.weight": (24,),
    "g_norm.bias": (24,),
    "o_proj.weight": (24, 24),
}


@pytest.mark.parametrize("affine", [True, False])
def test_checkpoint(affine):
    """Names, order and shapes: as RWKV6Attention(**BASE).state_dict() of flash-linear-attention 0.6.0 has them."""
    expected = {name: shape for name, shape in PARAMETERS.items() if affine or "g_norm" not in name}
    with torch.device("meta"):
        layer = RWKV6Attention(**BASE, elementwise_affine=affine)
    laws.check_names_and_shapes(layer, expected)
    checkpoint = {name: torch.randn(shape) for name, shape in expected.items()}
    layer = RWKV6Attention(**BASE, elementwise_affine=affine)
    layer.load_state_dict(checkpoint)
    assert all(torch.equal(x, checkpoint[name]) for name, x in layer.state_dict().items())


def test_arguments():
    """Those of the peer."""
    expected = {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "num_heads": 4,
        "gate_fn": "swish",
        "proj_low_rank_dim": 32,
        "gate_low_rank_dim": 64,
        "fuse_norm": True,
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "layer_idx": None,
    }
    laws.check_arguments(RWKV6Attention, expected)


def assert_first_values(layer):
    p = dict(layer.named_parameters())
    zeros = ("x_bias", "bonus", "x_proj.0.mu", "w_proj.linear.lora.0.weight", "w_proj.linear.lora.2.bias")
    assert not any(p.pop(name).any() for name in (*zeros, "g_norm.bias"))
    assert (p.pop("g_norm.weight") == 1).all()
    up = p.pop("w_proj.linear.lora.2.weight").detach().double()  # [D, R], D < R: orthogonal rows
    D, R = up.shape
    torch.testing.assert_close(up @ up.T, 0.01 * R / D * torch.eye(D).double(), atol=1e-5, rtol=0)
    assert len(p) == 7
    for name, x in p.items():
        bound = 2**-2.5 * math.sqrt(6 / sum(x.shape))
        assert 0.95 * bound < x.detach().abs().max() <= bound, name


def test_first_values():
    layer = RWKV6Attention(hidden_size=64, num_heads=2)
    assert_first_values(layer)
    with torch.no_grad():
        _, state = layer(torch.ones(1, 1, 64))
    assert state.recurrent.any()


def test_first_values_in_bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = RWKV6Attention(hidden_size=64, num_heads=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer.w_proj.linear.lora[2].weight.any()


def test_materialised_from_meta():
    with torch.device("meta"):
        layer = RWKV6Attention(hidden_size=64, num_heads=2)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_first_values(layer)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "parallel"}, ValueError, "mode must be 'chunk' or 'fused_recurrent', got 'parallel'"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": 24.0}, TypeError, "hidden_size must be an int, got float"),
        ({"num_heads": 5}, ValueError, "hidden_size * expand_k must be a positive multiple of num_heads = 5"),
        (
            {"expand_v": 0.3},
            ValueError,
            "hidden_size * expand_v must be a positive multiple of num_heads = 3",
        ),
        (
            {"hidden_size": 1536},
            ValueError,
            "hidden_size * expand_v / num_heads must be at most 256, got 512",
        ),
        ({"gate_fn": "elu"}, ValueError, "gate_fn must be one of relu"),
        ({"proj_low_rank_dim": 0}, ValueError, "proj_low_rank_dim must be at least 1, got 0"),
        ({"proj_low_rank_dim": "4"}, TypeError, "proj_low_rank_dim must be an int, got str"),
        ({"gate_low_rank_dim": 0}, ValueError, "gate_low_rank_dim must be at least 1, got 0"),
        ({"gate_low_rank_dim": 2.0}, TypeError, "gate_low_rank_dim must be an int, got float"),
        ({"norm_eps": math.nan}, ValueError, "norm_eps must be at least 0, got nan"),
        ({"use_cache": True}, TypeError, "use_cache"),
    ],
)
def test_refused_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        RWKV6Attention(**BASE | arguments)


def test_refused_calls():
    layer = RWKV6Attention(**BASE)
    x = torch.ones(2, 5, 24)
    state = random_state(layer, 2)
    with pytest.raises(ValueError, match=r"hidden_states must have shape \(B, T, 24\), got \(2, 24\)"):
        layer(x[:, 0])
    with pytest.raises(TypeError, match="state must be a RecurrentState, got tuple"):
        layer(x, tuple(state))
    with pytest.raises(TypeError, match=r"state.shift must be a tensor, got tuple"):
        layer(x, RecurrentState(state.recurrent))
    with pytest.raises(ValueError, match=r"state.shift must have shape \(2, 24\), got \(2, 1, 24\)"):
        layer(x, state._replace(shift=state.shift[:, None]))
    with pytest.raises(ValueError, match="state.shift must be on cpu, got meta"):
        layer(x, state._replace(shift=state.shift.to("meta")))
    with pytest.raises(
        TypeError, match="state.shift must be float32, bfloat16, float16 or float64, got int64"
    ):
        layer(x, state._replace(shift=state.shift.long()))
    with pytest.raises(ValueError, match=r"state.recurrent must have shape \(3, 3, 4, 8\)"):
        layer(x[:1], state, cu_seqlens=torch.tensor([0, 2, 2, 5]))
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens exclude each other"):
        layer(x[:1], attention_mask=torch.ones(1, 5).long(), cu_seqlens=torch.tensor([0, 5]))
