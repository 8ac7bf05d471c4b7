"""The layer of Mamba-2, and rates of that of Mamba."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from flacompose.layers import Mamba, Mamba2


def test_first_values():
    """Steps, rates and weights of the convolution fill the ranges that are given for them."""
    layer = Mamba2(hidden_size=2048, head_dim=8, dt_min=0.01, dt_max=0.5, A_init_range=(2, 5), conv_init=0.25)
    layer.requires_grad_(False)
    dt, A = torch.nn.functional.softplus(layer.dt_bias), layer.A_log.exp()
    for x, low, high in ((dt, 0.01, 0.5), (A, 2, 5), (layer.conv1d.weight, -0.25, 0.25)):
        slack = 1e-3 * abs(low)
        assert low - slack <= float(x.min()) < low + (high - low) / 20
        assert high - (high - low) / 20 < float(x.max()) <= high * 1.001
    # Uniform logarithms of steps, uniform rates.
    assert abs(float(dt.log().mean()) - math.log(0.01 * 0.5) / 2) < 0.2
    assert abs(float(A.mean()) - 3.5) < 0.2
    assert torch.equal(layer.D, torch.ones(512))
    assert layer.A_log.dtype == torch.float32
    layer = Mamba2(hidden_size=24, head_dim=8, dt_min=1e-9, dt_max=1e-8, dt_init_floor=1e-3)
    torch.testing.assert_close(torch.nn.functional.softplus(layer.dt_bias.detach()), torch.full((6,), 1e-3))


def test_limits_of_the_time_step_that_are_set_later():
    limited, layer = (
        Mamba2(hidden_size=24, head_dim=8, dt_limit=limit) for limit in ((0.4, 0.9), (0.0, math.inf))
    )
    layer.load_state_dict(limited.state_dict())
    layer.dt_limit = (0.4, 0.9)
    u = torch.randn(1, 3, 24)
    assert torch.equal(layer(u)[0], limited(u)[0])


@pytest.mark.parametrize("layer", [Mamba, partial(Mamba2, head_dim=8)], ids=["Mamba", "Mamba2"])
def test_rates_that_overflow(layer):
    """They forget everything, as great ones do, and their gradient is 0, and not NaN."""
    layer = layer(hidden_size=24, state_size=5, dtype=torch.float64)
    torch.nn.init.constant_(layer.A_log, 70.0)
    u = torch.randn(1, 6, 24, dtype=torch.float64)
    expected, _ = layer(u)
    torch.nn.init.constant_(layer.A_log, 1000.0)
    y, _ = layer(u)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert not layer.A_log.grad.any() and layer.in_proj.weight.grad.isfinite().all()


def test_a_norm_before_its_gate():
    """What is normed has a mean square of 1 and does not depend on the gate."""
    layer = Mamba2(
        hidden_size=24, head_dim=8, state_size=5, norm_before_gate=True, norm_eps=0.0, dtype=torch.float64
    )
    given, u = [], torch.randn(1, 6, 24, dtype=torch.float64)
    layer.out_proj.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    for factor in (1.0, -0.5):
        layer.in_proj.weight.data[:48] *= factor
        layer(u)
        given[-1] = given[-1] / torch.nn.functional.silu(layer.in_proj(u)[..., :48])
    torch.testing.assert_close(given[0].square().mean(-1), torch.ones(1, 6, dtype=torch.float64))
    torch.testing.assert_close(given[0], given[1])


def test_float16_of_a_large_gate():
    """Gated outputs, which float16 cannot hold, are normed before they are rounded."""
    torch.manual_seed(0)
    layer = Mamba2(hidden_size=64, head_dim=16, state_size=16).requires_grad_(False)
    layer.in_proj.weight *= 20
    u = torch.randn(1, 12, 64)
    expected, _ = layer.double()(u.double())
    y, _ = layer.half()(u.half())
    # Outputs are below 2, and float16 rounds each of a few numbers that make them by at most 1e-3 then.
    torch.testing.assert_close(y.double(), expected, atol=5e-3, rtol=0)
