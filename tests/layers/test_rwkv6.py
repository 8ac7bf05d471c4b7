"""The layer of RWKV6, and its token shift."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.truth import EVERY, assert_close, build, random_state, tensors, tokens_of

from flacompose.layers import RecurrentState, RWKV6Attention
from flacompose.layers.token_shift import token_shift


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("logits", [-1e4, -100.0, 30.0, 80.0, 88.0, 89.0, 1e4])
def test_gates_of_any_strength(logits, T, device):
    """Decays that forget all, or nothing, make no NaN, nor in any gradient."""
    layer = build(EVERY["rwkv6"], device=device)
    with torch.no_grad():
        layer.w_proj.linear.lora[2].bias.fill_(logits)
    x = tokens_of(layer, 1, T).requires_grad_()
    state = random_state(layer, 1)
    leaves = [t.requires_grad_() for t in tensors(state)]
    y, new = layer(x, state)
    results = [y, *tensors(new)]
    gradients = torch.autograd.grad(sum(t.sum() for t in results), [x, *leaves, *layer.parameters()])
    assert all(t.isfinite().all() for t in (*results, *gradients))
    if logits > 0 and T > 1:
        _, alone = layer(x[:, -1:], RecurrentState(torch.zeros_like(new.recurrent), shift=x[:, -2]))
        assert_close(new.recurrent, alone.recurrent, 1e-6)


@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from a state"])
def test_token_shift(given, device):
    """Every token meets the one before it in its sequence; the last one of each sequence is the new state."""
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


def test_first_values():
    """First values are those of the peer, and give a first token a state."""
    layer = RWKV6Attention(hidden_size=64, num_heads=2)
    with torch.no_grad():
        _, state = layer(torch.ones(1, 1, 64))
    assert state.recurrent.any()
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


def test_first_values_in_bfloat16():
    """First values that need a decomposition, which bfloat16 has none of, are made in bfloat16 layers too."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = RWKV6Attention(hidden_size=64, num_heads=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer.w_proj.linear.lora[2].weight.any()
