"""The forget gates of HGRN and of HGRN2, and their lower bounds."""

from __future__ import annotations

import pytest
import torch
from helpers.truth import (
    EVERY,
    assert_close,
    assert_states_close,
    assert_true,
    build,
    precision,
    random_state,
    row,
    tokens_of,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flacompose.layers import HGRN2Attention, HGRNAttention
from flacompose.layers.forget_gate import forget_gate

each_of_both = pytest.mark.parametrize("name", ["hgrn", "hgrn2"])


@pytest.mark.parametrize("bound", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("logits", [-1e4, -100.0, 30.0, 1e4])
@each_of_both
def test_gates_of_any_strength(name, logits, bound, device):
    """A gate that forgets all, or nothing, or that rounding takes for such, makes no NaN, nor in any gradient."""
    layer = build(EVERY[name] | {"use_short_conv": False}, device=device)
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


@pytest.mark.parametrize("bound", [0.0, 1e-30, 0.3, 0.999])
@each_of_both
def test_lower_bound(name, bound, device):
    """A layer has the lower bound that it is given, beside gates of any strength, and gives it a gradient."""
    layer = build(EVERY[name] | {"layer_idx": 3}, device=device, dtype=precision(device)[0])
    with torch.no_grad():
        layer.f_proj.weight[::2] *= 1000
    x, state = tokens_of(layer, 1, 9), random_state(layer, 1)
    lower_bound = torch.full_like(x[0, 0], bound, requires_grad=True)
    y, new = layer(x, state, lower_bound=lower_bound)
    logits = torch.full([24], bound, dtype=torch.float64).logit()
    parameters = layer.state_dict() | {"bound": logits}
    assert_true(EVERY[name], parameters, x[0], row(state, 0), y[0], row(new, 0))
    gradients = torch.autograd.grad(y.sum(), [lower_bound, *layer.parameters()])
    assert all(g.isfinite().all() for g in gradients) and gradients[0].any()


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
    """Gates near 0 and near 1 have all their digits, and so have their gradients, with and without a bound."""
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
    """Forget gates over a lower bound of 0 are those without one."""
    zeros = torch.zeros(len(STRONG), device=device)
    for x, y in zip(
        forget_gate(strong(device, dtype), zeros), forget_gate(strong(device, dtype), None), strict=True
    ):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-37)


class Dtypes(TorchDispatchMode):
    """A mode that notes the dtypes of all tensors that are computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


def test_forget_gates_need_no_float64(device):
    """Forget gates are computed without float64, which not every device has."""
    logits = strong(device)
    with Dtypes() as dtypes:
        gates_of(logits, 0.5)
    assert torch.float32 in dtypes.seen and torch.float64 not in dtypes.seen


@pytest.mark.parametrize("layer_idx", [None, 0, 1])
@pytest.mark.parametrize("kind", [HGRNAttention, HGRN2Attention])
def test_where_a_lower_bound_is_used(kind, layer_idx, device):
    """A lower bound is used everywhere but in layer 0."""
    config = {"expand_ratio": 8} if kind is HGRN2Attention else {}
    layer = kind(hidden_size=24, layer_idx=layer_idx, **config).to(device)
    x = torch.randn(1, 9, 24, device=device)
    expected = layer(x)[0]
    bound = torch.zeros(24, device=device)
    assert_close(layer(x, lower_bound=bound)[0], expected, 1e-6)
    assert torch.equal(layer(x, lower_bound=bound + 0.5)[0], expected) == (layer_idx == 0)


def test_weak_decays_keep_their_digits(device):
    """Gates within 1e-6 of 1, where 1 minus them has but one digit, are exact, over a lower bound too."""
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
