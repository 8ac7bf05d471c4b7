"""Padded rows: every token as in a row of its own, without its pads."""

from __future__ import annotations

import pytest
import torch

from .truth import (
    GLA,
    LAYERS,
    assert_close,
    assert_states_close,
    build,
    floats,
    precision,
    random_state,
    row,
    sequence,
    tensors,
)

each_layer = pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
CONFIGS = {"recurrent": GLA | {"fuse_norm": False}} | LAYERS
T = 70
MASKS = {
    "left": lambda t: torch.stack([t >= 0, t >= 1, t >= 30, t >= T - 2, t >= T]),
    "right": lambda t: torch.stack([t < T, t < T - 1, t < 30, t < 2, t < 0]),
    "both": lambda t: torch.stack([(t >= 3) & (t < T - 3), (t >= 60) & (t < 61), t >= 0]),
    "holes": lambda t: torch.stack([t % 2 == 0, t % 7 > 3, (t < 5) | (t > 66)]),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("pads", MASKS)
def test_as_without_pads(pads, given, config, device):
    dtype, relative = precision(device)
    layer = build(config, device=device, dtype=dtype)
    mask = MASKS[pads](torch.arange(T)).to(device)
    B = len(mask)
    x = torch.randn(B, T, 24, device=device, dtype=dtype)
    x[~mask] = torch.nan  # whatever a pad holds
    state = random_state(layer, B) if given else None
    y, new = layer(x, state, attention_mask=mask.long())
    assert not y[~mask].any()
    for b in range(B):
        tokens = x[b, mask[b]]
        start = row(state, b) if given else None
        expected, after = sequence(config, layer.state_dict(), tokens, start)
        assert_close(y[b, mask[b]], expected, relative)
        assert_states_close(row(new, b), after, relative)
        if len(tokens):
            alone, after = layer(tokens[None], start)
            assert_close(y[b, mask[b]], alone[0], relative)
            assert_states_close(row(new, b), after, relative)
        elif given:
            assert all(torch.equal(a, b) for a, b in zip(tensors(row(new, b)), tensors(start), strict=True))


@each_layer
def test_gradients(config, device):
    """Of tokens as without pads, of pads none, of parameters finite whatever a pad holds."""
    layer = build(config, device=device, dtype=torch.float64)
    mask = MASKS["both"](torch.arange(T)).to(device)
    x = torch.randn(3, T, 24, device=device, dtype=torch.float64)
    x[~mask] = torch.inf
    x.requires_grad_()
    state = random_state(layer, 3)
    leaves = [t.requires_grad_() for t in floats(state)]
    parameters = list(layer.parameters())

    def loss(y, new):
        return sum((t**2).sum() for t in (y, *floats(new)))

    dx, *rest = torch.autograd.grad(loss(*layer(x, state, attention_mask=mask)), [x, *leaves, *parameters])
    alone = sum(loss(*layer(x[b : b + 1, mask[b]], row(state, b))) for b in range(3))
    dx_alone, *rest_alone = torch.autograd.grad(alone, [x, *leaves, *parameters])
    assert not dx[~mask].any()
    assert_close(dx[mask], dx_alone[mask], 1e-10)
    for a, b in zip(rest, rest_alone, strict=True):
        assert_close(a, b, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
@each_layer
def test_generation(config, dtype, device):
    """A left-padded prompt and then one token at a time, under the mask of the whole history, as models give it."""
    layer = build(config, device=device)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1]], device=device).to(dtype)
    x = torch.randn(2, 8, 24, device=device)
    y, state = layer(x[:, :5], attention_mask=mask[:, :5])
    out = [y]
    for t in range(5, 8):
        y, state = layer(x[:, t : t + 1], state, attention_mask=mask[:, : t + 1])
        out.append(y)
    for b in range(2):
        tokens = mask[b].bool()
        expected, after = sequence(config, layer.state_dict(), x[b, tokens])
        assert_close(torch.cat(out, 1)[b, tokens], expected, 2e-5)
        assert_states_close(row(state, b), after, 2e-5)
