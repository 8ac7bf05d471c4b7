"""Heads of more values than the ops take, and in layers of slots of more keys.

The limit is lowered here, so that small heads are wide. Heads of more than 512 values are among the layouts of
test_laws.py, and among the goldens.
"""

from __future__ import annotations

import pytest
import torch
from contract.graphs import recorded
from helpers.truth import (
    EVERY,
    LINEAR,
    assert_close,
    assert_states_close,
    assert_true,
    build,
    floats,
    random_state,
    row,
    tensors,
    tokens_of,
    with_floats,
)

from flacompose.layers import GatedLinearAttention, LinearAttention
from flacompose.ops._arguments import large_heads

# How many calls there are where an op takes three values, or keys of slots. These heads have six, and eight in some.
CALLS = {
    "gla": 2,
    "simple_gla": 2,
    "linear_attn": 4,  # two are of the normaliser
    "linear_attn without a normaliser": 2,
    "retention": 4,
    "mamba2": 3,
    "rwkv6": 2,
    "rwkv7": 2,
    "hgrn2": 3,
    "lightnet": 3,
    "gsa": 4,  # two sums over keys, two parts of the values
    "abc": 6,
    "delta_net": 2,
    "rodimus": 16,
    "based": 12,  # four sums over keys, three parts of the values and of the 1 beside them
}
CASES = EVERY | {"linear_attn without a normaliser": LINEAR}
each_wide_layer = pytest.mark.parametrize("name", CALLS)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_heads, "MAX_HEAD_SIZE", 3)


@each_wide_layer
@torch.no_grad()
def test_values(name: str, three: None) -> None:
    """Outputs and states are the truth's, for one token and for many, in rows and packed, on from any state."""
    config = CASES[name]
    layer = build(config, dtype=torch.float64)
    for T in (1, 67):
        x = tokens_of(layer, 2, T)
        for state in (None, random_state(layer, 2)):
            with recorded() as calls:
                y, new = layer(x, state)
            assert len(calls) == CALLS[name]
            start = layer.init_state(2) if state is None else state
            for b in range(2):
                assert_true(config, layer.state_dict(), x[b], row(start, b), y[b], row(new, b))
    x, state = tokens_of(layer, 1, 70), random_state(layer, 3)
    y, new = layer(x, state, cu_seqlens=torch.tensor([0, 2, 2, 69]))
    for n, (begin, end) in ((0, (0, 2)), (2, (2, 69))):
        one, out = x[0, begin:end], y[0, begin:end]
        assert_true(config, layer.state_dict(), one, row(state, n), out, row(new, n))
    assert_states_close(row(new, 1), row(state, 1), 0)


@each_wide_layer
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of input, state and parameters are those of the same heads where they are not wide."""
    layer = build(CASES[name], dtype=torch.float64)
    x, state = tokens_of(layer, 2, 9), random_state(layer, 2)

    def gradients() -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, *floats(state))]
        y, new = layer(leaves[0], with_floats(state, leaves[1:]))
        loss = sum((t**2).sum() for t in (y, *floats(new)))
        return list(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))

    expected = gradients()
    monkeypatch.setattr(large_heads, "MAX_HEAD_SIZE", 3)
    for actual, whole in zip(gradients(), expected, strict=True):
        assert_close(actual, whole, 1e-11)


# A state of one part of values, and slots with parts of keys.
@pytest.mark.parametrize("name", ["retention", "gsa"])
def test_compiled(name: str, three: None) -> None:
    """There is one graph for segments and one for tokens, and one that trains at every length."""
    layer = build(CASES[name])
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    x = tokens_of(layer, 2, 90)
    with torch.no_grad():
        expected, last = layer(x)
        state, out = layer.init_state(2), []
        for i, piece in enumerate(x.split([70, 1, 18, 1], 1)):
            with torch._dynamo.config.patch(error_on_recompile=i > 1):
                y, state = compiled(piece, state)
            out.append(y)
    assert_close(torch.cat(out, 1), expected, 2e-5)
    assert_states_close(state, last, 2e-5)
    for i, T in enumerate((20, 70)):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            y, _ = compiled(x[:, :T])
        losses = (y.square().sum(), layer(x[:, :T])[0].square().sum())
        gradients = (torch.autograd.grad(loss, list(layer.parameters())) for loss in losses)
        for a, b in zip(*gradients, strict=True):
            assert_close(a, b, 1e-4)


def test_states_are_whole() -> None:
    """A state has all values of a head side by side, and half of a head is a head of half the values."""
    config = {"hidden_size": 24, "num_heads": 2, "expand_v": 50.0}
    layer = build({"layer": GatedLinearAttention} | config, dtype=torch.float64)
    x = tokens_of(layer, 1, 5)
    state = layer(x)[1].recurrent
    assert layer.init_state(1).recurrent.shape == state.shape == (1, 2, 6, 600)
    half = build({"layer": GatedLinearAttention} | config | {"expand_v": 25.0}, dtype=torch.float64)
    for name, value in half.named_parameters():
        whole = layer.get_parameter(name)
        with torch.no_grad():
            if name == "v_proj.weight":
                value.copy_(whole.unflatten(0, (2, 600))[:, :300].flatten(0, 1))
            elif value.shape == whole.shape:
                value.copy_(whole)
    assert_close(half(x)[1].recurrent, state[..., :300], 1e-12)


def test_bfloat16(three: None) -> None:
    """Sums of the parts of keys are not rounded: a wide layer of slots is as accurate as one that is not."""
    layer = build(EVERY["gsa"] | {"expand_k": 8.0})
    x = tokens_of(layer, 2, 40)
    expected = layer.double()(x.double())[0]
    y, state = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16 and {t.dtype for t in tensors(state.recurrent)} == {torch.float32}
    assert_close(y, expected, 3e-2)


def test_linear_attention_keeps_its_limit_of_keys() -> None:
    with pytest.raises(ValueError, match="hidden_size \\* expand_k / num_heads must be at most 512, got 513"):
        LinearAttention(hidden_size=513, num_heads=1)
