"""The layer of HGRN."""

from __future__ import annotations

import math
import re

import pytest
import torch
from contract.graphs import recorded
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flacompose.layers import HGRN2Attention, HGRNAttention, RecurrentState
from flacompose.layers.forget_gate import forget_gate

from . import laws
from .truth import assert_close, assert_states_close, tensors

BASE = {"hidden_size": 24}
CONV = BASE | {"use_short_conv": True, "conv_bias": True, "conv_size": 3, "expand_ratio": 2}


class Bounded(HGRNAttention):
    """Called with a lower bound, of anything from 0 to nearly 1."""

    def bound(self):
        return torch.linspace(0, 0.99, self.input_dim, dtype=torch.float32, device=self.i_proj.weight.device)

    def forward(self, hidden_states, state=None, *, attention_mask=None, cu_seqlens=None):
        layout = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        return super().forward(hidden_states, state, **layout, lower_bound=self.bound())


LAYERS = {
    "plain": (HGRNAttention, BASE),
    "conv": (HGRNAttention, CONV),
    "bounded": (Bounded, BASE),
    "bounded conv": (Bounded, CONV | {"layer_idx": 2}),
    "recurrent": (Bounded, CONV | {"mode": "fused_recurrent", "elementwise_affine": False, "norm_eps": 0.1}),
    "first": (Bounded, BASE | {"layer_idx": 0}),
}
each_layer = pytest.mark.parametrize("name", LAYERS)
either = pytest.mark.parametrize("name", ["plain", "bounded conv"])


def build(name, device, dtype=None):
    layer, config = LAYERS[name]
    return laws.perturbed(layer(**config), device, dtype)


def truth_of(layer):
    bounded = isinstance(layer, Bounded) and layer.layer_idx != 0
    beta = layer.bound().cpu().double() if bounded else 0

    def truth(p, x, state):
        def sigmoid(z):
            return 1 / (1 + (-z).exp())

        windows = list(state.conv)

        def convolved(i, name, z):
            if not windows:
                return z
            windows[i] = torch.cat([windows[i][:, :, 1:], z[None, :, None]], 2)
            return (windows[i][0] * p[f"{name}_conv1d.weight"][:, 0]).sum(1) + p[f"{name}_conv1d.bias"]

        h, out = state.recurrent[0], []
        for token in x:
            i = convolved(0, "i", p["i_proj.weight"] @ token)
            f = beta + (1 - beta) * sigmoid(convolved(1, "f", p["f_proj.weight"] @ token))
            h = f * h + (1 - f) * i * sigmoid(i)
            o = h / (h.square().mean() + layer.g_norm.eps).sqrt() * p.get("g_norm.weight", 1)
            g = p["g_proj.weight"] @ token
            out.append(p["o_proj.weight"] @ (o * g * sigmoid(g)))
        return torch.stack(out), RecurrentState(h[None], tuple(windows))

    return truth


@each_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(name, dtype, device):
    layer = build(name, device, dtype)
    laws.check_values(layer, truth_of(layer))


@each_layer
def test_split(name, device):
    laws.check_split(build(name, device))


@each_layer
def test_padding(name, device):
    layer = build(name, device)
    laws.check_padding(layer, truth_of(layer))


@either
def test_padding_gradients(name, device):
    laws.check_padding_gradients(build(name, device))


@each_layer
def test_packed(name, device):
    layer = build(name, device)
    laws.check_packed(layer, truth_of(layer))


@each_layer
def test_gradients(name):
    laws.check_gradients(build(name, torch.device("cpu")))


def test_gradients_of_the_lower_bound():
    layer = build("conv", torch.device("cpu"))
    x = laws.tokens_of(layer, 1, 5)
    bound = torch.linspace(1e-3, 0.99, 48, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: layer(x, lower_bound=b)[0], bound, fast_mode=True)


@pytest.mark.parametrize("bound", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("logits", [-1e4, -100.0, 30.0, 1e4])
def test_gates_of_any_strength(logits, bound, device):
    """A gate that forgets all, or nothing, and one that rounding takes for such: no NaN, nor in any gradient."""
    layer = HGRNAttention(hidden_size=8).to(device)
    with torch.no_grad():
        layer.f_proj.weight.fill_(logits)
    x = torch.ones(1, 5, 8, device=device, requires_grad=True)
    for given in (None, torch.full([8], bound, device=device, requires_grad=True)):
        y, state = layer(x, lower_bound=given)
        (y.sum() + state.recurrent.sum()).backward()
        for t in (y, state.recurrent, x.grad, *(p.grad for p in layer.parameters())):
            assert t.isfinite().all()
    assert given.grad.isfinite().all()


STRONG = [-1e4, -200.0, -100.0, -60.0, -20.0, -10.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 10.0, 20.0, 80.0, 1e4]


def strong(device, dtype=torch.float32):
    return torch.tensor(STRONG, device=device, dtype=dtype)[None, None]


def gates_of(logits, bound):
    """``1 - f`` and ``log f``, and by name the gradients of both and of ``f``."""
    logits = logits.requires_grad_()
    leaves = {"logits": logits}
    if bound is not None:
        bound = leaves["bound"] = torch.full_like(logits[0, 0], bound, requires_grad=True)
    forgotten, g = forget_gate(logits, bound)
    results = {"1 - f": forgotten.detach(), "log f": g.detach()}
    for of, y in {"1 - f": forgotten, "log f": g, "f": g.exp()}.items():
        gradients = torch.autograd.grad(y.sum(), leaves.values(), retain_graph=True)
        results |= {f"d({of}) / d{name}": d for name, d in zip(leaves, gradients, strict=True)}
    return results


@pytest.mark.parametrize("bound", [None, 0.0, 1e-30, 1e-6, 0.3, 0.5, 0.999, 1 - 2**-24, 1.0])
def test_forget_gates_against_float64(bound, device):
    """Every digit of gates near 0 and near 1, and of their gradients, with and without a bound."""
    bound = None if bound is None else float(torch.tensor(bound))  # rounded alike
    exact = gates_of(strong("cpu", torch.float64), bound)
    for name, x in gates_of(strong(device), bound).items():
        assert x.dtype == torch.float32 and x.isfinite().all(), name
        x, y = x.flatten().cpu().double(), exact[name].flatten()
        if name.startswith("d(") and bound is not None and bound < 1e-20:
            x, y = x[3:], y[3:]  # neither e^-100 nor its reciprocal is a float32
        torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-37, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_lower_bound_of_zeros_is_none(dtype, device):
    zeros = torch.zeros(len(STRONG), device=device)
    for x, y in zip(
        forget_gate(strong(device, dtype), zeros), forget_gate(strong(device, dtype), None), strict=True
    ):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-37)


class Dtypes(TorchDispatchMode):
    """Those of all tensors that are computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


def test_forget_gates_need_no_float64(device):
    """Not every device has it."""
    logits = strong(device)
    with Dtypes() as dtypes:
        gates_of(logits, 0.5)
    assert torch.float32 in dtypes.seen and torch.float64 not in dtypes.seen


@pytest.mark.parametrize("layer_idx", [None, 0, 1])
@pytest.mark.parametrize("kind", [HGRNAttention, HGRN2Attention])
def test_where_a_lower_bound_is_used(kind, layer_idx, device):
    """Everywhere but in layer 0."""
    config = {"expand_ratio": 8} if kind is HGRN2Attention else {}
    layer = kind(hidden_size=24, layer_idx=layer_idx, **config).to(device)
    x = torch.randn(1, 9, 24, device=device)
    expected = layer(x)[0]
    bound = torch.zeros(24, device=device)
    assert_close(layer(x, lower_bound=bound)[0], expected, 1e-6)
    assert torch.equal(layer(x, lower_bound=bound + 0.5)[0], expected) == (layer_idx == 0)
    with pytest.raises(ValueError, match=r"lower_bound must have shape \(24,\), got \(8,\)"):
        layer(x, lower_bound=bound[:8])


def test_weak_decays_keep_their_digits(device):
    """A gate within 1e-6 of 1, where 1 minus it has but one digit, over a lower bound too."""
    layer = HGRNAttention(hidden_size=8).to(device)
    x = torch.ones(1, 10_000, 8, device=device)
    with torch.no_grad():
        layer.f_proj.weight.fill_(14 / 8)
        for bound in (0.0, 0.9):
            given = torch.full([8], bound, device=device)
            expected, after = layer.double()(x.double(), lower_bound=given)
            y, state = layer.float()(x, lower_bound=given)
            assert_close(y, expected, 2e-5)
            assert_states_close(state, after, 2e-5)


@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
@either
def test_bfloat16(name, autocast, device):
    # Projections, an activation, a norm and a gate on the way, each rounded to 8 bits.
    laws.check_bfloat16(build(name, device, torch.float32), autocast, 2e-2)


@either
def test_compiled_decoding(name, device):
    laws.check_compiled_decoding(build(name, device, torch.float32))


@either
def test_export(name, device, tmp_path):
    laws.check_exported(build(name, device), "scan_chunk", tmp_path / "layer.pt2")


@pytest.mark.parametrize(
    ("mode", "T", "form"),
    [("chunk", 2, "chunk"), ("fused_recurrent", 2, "recurrent"), ("chunk", 1, "recurrent")],
)
def test_form(mode, T, form, device):
    with recorded() as calls:
        HGRNAttention(mode=mode, **BASE).to(device)(torch.randn(1, T, 24, device=device))
    assert [op.name() for op, _, _ in calls] == [f"flacompose::scan_{form}"]


def test_state(device):
    layer = HGRNAttention(**CONV).to(device)
    state = layer.init_state(3)
    assert state.recurrent.shape == (3, 48) and state.recurrent.dtype == torch.float32
    assert [c.shape for c in state.conv] == [(3, 48, 3)] * 2
    assert state.normalizer == state.position == ()
    assert not any(t.any() for t in tensors(state))
    assert layer.double().init_state(1).recurrent.dtype == torch.float64


PROJECTIONS = {"i_proj.weight": (64, 64), "f_proj.weight": (64, 64), "g_proj.weight": (64, 64)}
OUTPUT = {"g_norm.weight": (64,), "o_proj.weight": (64, 64)}


# As HGRNAttention(hidden_size=64, **config).state_dict() of flash-linear-attention 0.6.0 lists them.
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, PROJECTIONS | OUTPUT),
        ({"elementwise_affine": False}, PROJECTIONS | {"o_proj.weight": (64, 64)}),
        (
            {"use_short_conv": True, "conv_bias": True},
            PROJECTIONS
            | {"f_conv1d.weight": (64, 1, 4), "f_conv1d.bias": (64,)}
            | {"i_conv1d.weight": (64, 1, 4), "i_conv1d.bias": (64,)}
            | OUTPUT,
        ),
        (
            {"expand_ratio": 2, "use_short_conv": True, "conv_size": 3},
            dict.fromkeys(PROJECTIONS, (128, 64))
            | {"f_conv1d.weight": (128, 1, 3), "i_conv1d.weight": (128, 1, 3)}
            | {"g_norm.weight": (128,), "o_proj.weight": (64, 128)},
        ),
    ],
    ids=["defaults", "no affine", "conv", "sizes"],
)
def test_names_and_shapes(config, expected):
    with torch.device("meta"):
        layer = HGRNAttention(hidden_size=64, **config)
    laws.check_names_and_shapes(layer, expected)


def test_arguments():
    """Those of the peer."""
    expected = {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_ratio": 1,
        "use_short_conv": False,
        "conv_size": 4,
        "conv_bias": False,
        "elementwise_affine": True,
        "norm_eps": 1e-5,
        "layer_idx": None,
    }
    laws.check_arguments(HGRNAttention, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "fused_chunk"}, ValueError, "mode must be 'chunk' or 'fused_recurrent', got 'fused_chunk'"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": 24.0}, TypeError, "hidden_size must be an int, got float"),
        ({"expand_ratio": 0.3}, ValueError, "hidden_size * expand_ratio must be a positive int, got 7.1"),
        ({"expand_ratio": -1}, ValueError, "hidden_size * expand_ratio must be a positive int, got -24"),
        (
            {"expand_ratio": math.nan},
            ValueError,
            "hidden_size * expand_ratio must be a positive int, got nan",
        ),
        ({"expand_ratio": None}, TypeError, "expand_ratio must be a number, got NoneType"),
        ({"use_short_conv": True, "conv_size": 0}, ValueError, "conv_size must be at least 1, got 0"),
        ({"norm_eps": math.nan}, ValueError, "norm_eps must be at least 0, got nan"),
        ({"layer_idx": 0.5}, TypeError, "layer_idx must be an int, got float"),
        ({"use_cache": True}, TypeError, "use_cache"),
    ],
)
def test_refused_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        HGRNAttention(**BASE | arguments)


X = torch.ones(2, 5, 24)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"lower_bound": 0.5}, TypeError, "lower_bound must be a tensor, got float"),
        ({"lower_bound": X.long()[0, 0]}, TypeError, "lower_bound must be float32, bfloat16, float16 or "),
        ({"lower_bound": X[0]}, ValueError, "lower_bound must have shape (24,), got (5, 24)"),
        ({"lower_bound": X[0, 0].to("meta")}, ValueError, "lower_bound must be on cpu, got meta"),
        ({"hidden_states": X[0]}, ValueError, "hidden_states must have shape (B, T, 24), got (5, 24)"),
        (
            {"state": RecurrentState(torch.zeros(2, 1, 24))},
            ValueError,
            "state.recurrent must have shape (2, 24), got (2, 1, 24)",
        ),
        (
            {"state": RecurrentState(torch.zeros(2, 24), (X,))},
            ValueError,
            "state.conv must hold 0 tensors, got 1",
        ),
    ],
)
def test_refused_calls(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        HGRNAttention(**BASE)(**{"hidden_states": X} | call)
