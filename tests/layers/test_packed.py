"""Packed sequences: each as if it were alone."""

from __future__ import annotations

import pytest
import torch

from .truth import (
    CONV,
    EVERY,
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

CONFIGS = {
    "recurrent": GLA,
    "conv of 1": GLA | CONV | {"mode": "fused_recurrent", "conv_size": 1},
} | LAYERS
# Empty ones at either end and together, ones shorter than the convolution, one token, more than a chunk, a tail.
BOUNDS = {
    "five": ([0, 70, 71, 73, 76, 80], 80),
    "one": ([0, 9], 9),
    "empty": ([0, 0, 2, 2, 2, 7, 7], 7),
    "all empty": ([0, 0, 0], 3),
    "tail": ([0, 1, 3, 66], 80),
    "a token": ([0, 1], 1),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from states"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_as_alone(bounds, given, config, device):
    dtype, relative = precision(device)
    layer = build(config, device=device, dtype=dtype)
    bounds, T = BOUNDS[bounds]
    N = len(bounds) - 1
    cu_seqlens = torch.tensor(bounds, device=device, dtype=torch.int32 if given else torch.int64)
    x = torch.randn(1, T, 24, device=device, dtype=dtype)
    x[:, bounds[-1] :] = torch.nan
    state = random_state(layer, N) if given else None
    y, new = layer(x, state, cu_seqlens=cu_seqlens)
    assert not y[:, bounds[-1] :].any()
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        start = row(state, n) if given else None
        expected, after = sequence(config, layer.state_dict(), x[0, begin:end], start)
        assert_close(y[0, begin:end], expected, relative)
        assert_states_close(row(new, n), after, relative)
        if begin == end and given:
            assert all(torch.equal(a, b) for a, b in zip(tensors(row(new, n)), tensors(start), strict=True))


@pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
def test_gradients(config, device):
    """As from the sequences one by one; a tail has none, whatever it holds."""
    layer = build(config, device=device, dtype=torch.float64)
    bounds = [0, 2, 2, 3, 12]
    x = torch.randn(1, 14, 24, device=device, dtype=torch.float64)
    x[:, 12:] = torch.inf
    x.requires_grad_()
    state = random_state(layer, 4)
    leaves = [t.requires_grad_() for t in floats(state)]
    parameters = list(layer.parameters())

    def loss(y, new):
        return sum((t**2).sum() for t in (y, *floats(new)))

    packed = loss(*layer(x, state, cu_seqlens=torch.tensor(bounds, device=device)))
    dx, *rest = torch.autograd.grad(packed, [x, *leaves, *parameters])
    alone = sum((t[1] ** 2).sum() for t in floats(state))
    for n in (0, 2, 3):
        alone = alone + loss(*layer(x[:, bounds[n] : bounds[n + 1]], row(state, n)))
    dx_alone, *rest_alone = torch.autograd.grad(alone, [x, *leaves, *parameters])
    assert not dx[:, 12:].any()
    assert_close(dx[:, :12], dx_alone[:, :12], 1e-10)
    for a, b in zip(rest, rest_alone, strict=True):
        assert_close(a, b, 1e-10)
