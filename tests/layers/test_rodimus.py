"""The layer of Rodimus: gates of any strength, and first values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.truth import EVERY, build, floats, random_state, tokens_of

from flacompose.layers import RodimusAttention
from flacompose.layers.rodimus import _log_softplus


@pytest.mark.parametrize("logits", [-1e4, -100.0, 30.0, 1e4])
def test_gates_of_any_strength(logits: float, device: torch.device) -> None:
    """A gate that underflows, or forgets all, makes no NaN, nor does a key of zeros, and nor in any gradient."""
    for T in (1, 70):
        layer = build(EVERY["rodimus"], device=device)
        with torch.no_grad():
            layer.g_gate_proj.bias.fill_(logits)
            layer.k_proj.weight[:3] = 0
        x = tokens_of(layer, 1, T).requires_grad_()
        state = random_state(layer, 1)
        leaves = [t.requires_grad_() for t in floats(state)]
        y, new = layer(x, state)
        results = [y, *floats(new)]
        gradients = torch.autograd.grad(sum(t.sum() for t in results), [x, *leaves, *layer.parameters()])
        assert all(t.isfinite().all() for t in (*results, *gradients))


def test_log_softplus() -> None:
    """It and its derivative have all their digits on both sides of the place where the series begins."""
    x = torch.tensor([-80, -20.5, -20, -19.5, -1, 0, 5, 50], dtype=torch.float64, requires_grad=True)
    softplus = torch.log1p(x.exp())
    y = _log_softplus(x)
    torch.testing.assert_close(y, softplus.log(), rtol=1e-15, atol=0)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, x.sigmoid() / softplus, rtol=1e-14, atol=0)


def test_first_values() -> None:
    """Gates are from 0.001 to 0.1 and temperatures from 1/16 to 0.9, as in the peer's models."""
    layer = RodimusAttention(hidden_size=32, expand_ratio=512).requires_grad_(False)
    gates, temperatures = F.softplus(layer.g_gate_proj.bias), layer.tau_gate_proj.bias.sigmoid()
    # The mean of 512 uniform numbers is off by less than 5 of its standard deviations, 0.07 of the range.
    for values, low, high in ((gates.log10(), -3, -1), (temperatures, 1 / 16, 0.9)):
        assert low - 1e-3 <= float(values.min()) and float(values.max()) <= high + 1e-3
        assert abs(float(values.mean()) - (low + high) / 2) < 0.07 * (high - low)
    for m in (layer.g_gate_proj, layer.tau_gate_proj, *layer.i_gate_proj[:2]):
        bound = 2**-2.5 * (6 / sum(m.weight.shape)) ** 0.5  # of Glorot's uniform numbers
        assert 0.9 * bound < float(m.weight.abs().max()) <= bound
    assert not layer.i_gate_proj[1].bias.any() and (layer.residual_weight == 1).all()


def test_dtype_of_the_residual() -> None:
    """It is float32 unless the layer is told otherwise."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        dtypes = [
            RodimusAttention(hidden_size=16, residual_in_fp32=flag, dtype=dtype).residual_weight.dtype
            for flag, dtype in ((True, None), (False, None), (True, torch.float64))
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float64]
