"""Linear attention: the normalised outputs, and their state ``(S, z)``."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from contract.accuracy import error
from contract.cases import NAMED
from contract.graphs import recorded
from contract.problems import draw
from torch import Tensor

from flacompose.ops import chunk_linear_attn, fused_recurrent_linear_attn

FORMS = [chunk_linear_attn, fused_recurrent_linear_attn]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
NORMALIZED = NAMED["chunk_linear_attn-normalize"]


def qkv(device: torch.device, **options) -> list[Tensor]:
    """Queries and keys past a feature map, and values."""
    return list(draw(NORMALIZED, device, state=False, **options).tensors.values())


@each_form
def test_outputs_are_not_normalised_unless_asked_for(form, device: torch.device) -> None:
    q, k, v = qkv(device)
    o, _ = form(q, k, v)
    expected, S = form(q, k, v, normalize=False, output_final_state=True)
    assert torch.equal(o, expected) and isinstance(S, Tensor)
    normalised, _ = form(q, k, v, normalize=True)
    assert error(normalised, o / (q * k.cumsum(1)).sum(-1, keepdim=True) * q.shape[-1] ** 0.5) <= 1e-5


@each_form
def test_means_of_values(form, device: torch.device) -> None:
    """Whatever the scale; of one value, that value."""
    q, k, v = qkv(device)
    o, _ = form(q, k, v, normalize=True)
    assert error(form(q, k, v, scale=7.0, normalize=True)[0], o) <= 1e-6
    assert o.min() >= v.min() and o.max() <= v.max()
    assert error(form(q, k, torch.full_like(v, 3.0), normalize=True)[0], torch.full_like(v, 3.0)) <= 1e-5


@each_form
def test_heads_of_values_share_a_z(form, device: torch.device) -> None:
    q, k, v = qkv(device)
    w = torch.randn_like(v)
    o, (S, z) = form(q, k, torch.stack([v, w], 3).flatten(2, 3), normalize=True, output_final_state=True)
    assert (S.shape, z.shape) == ((2, 4, 16, 32), (2, 2, 16))
    for i, x in enumerate((v, w)):
        assert error(o[:, :, i::2], form(q, k, x, normalize=True)[0]) <= 1e-6


@each_form
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "autocast"])
def test_a_mean_is_one_rounding_off(form, precision: str, device: torch.device) -> None:
    """Of values that are all 1 it is 1, also where the sums are past what float16 holds."""
    T = 9000
    q, k = (torch.ones(1, T, 1, 16, device=device) for _ in range(2))
    v = torch.ones(1, T, 1, 4, device=device)
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    if precision != "autocast":
        q, k, v = (x.to(dtype) for x in (q, k, v))
    with torch.autocast(device.type, dtype, enabled=precision == "autocast"):
        o, (_, z) = form(q, k, v, normalize=True, output_final_state=True)
    assert torch.equal(o, torch.ones_like(v, dtype=dtype))
    assert torch.equal(z, torch.full_like(z, T)) and z.dtype == torch.float32


@each_form
def test_gradients_of_values_with_a_mean(form, device: torch.device) -> None:
    """That of queries is then a small difference of two large terms, one for the numerator, one for the denominator."""
    q, k, v = qkv(device)
    inputs = [x.bfloat16() for x in (F.elu(q) + 1, F.elu(k) + 1, 5 + v)]
    do = torch.randn_like(v).bfloat16()

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(form(*leaves, normalize=True)[0], leaves, do.to(dtype))

    exact = gradients(torch.float64)
    for x, wide, truth in zip(gradients(torch.bfloat16), gradients(torch.float32), exact, strict=True):
        assert error(x, truth) <= 4 * error(wide.bfloat16(), truth)


@each_form
def test_compiled_with_a_state_under_autocast(form, device: torch.device) -> None:
    q, k, v = qkv(device)

    def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, state = form(q, k, v, normalize=True, output_final_state=True)
        o, (S, z) = form(q, k, v, initial_state=state, normalize=True, output_final_state=True)
        return o, S, z

    compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.autocast(device.type, torch.bfloat16):
        for x, y in zip(compiled(q, k, v), twice(q, k, v), strict=True):
            assert x.dtype == y.dtype and error(x, y) <= 1e-6


TUPLE = "initial_state must be a tuple (S, z) with normalize, got {}"
STATES = [
    (True, lambda S, z: S, TypeError, TUPLE.format("Tensor")),
    (True, lambda S, z: (S,), TypeError, TUPLE.format("tuple of 1")),
    (True, lambda S, z: (S, z, z), TypeError, TUPLE.format("tuple of 3")),
    (True, lambda S, z: 1.0, TypeError, TUPLE.format("float")),
    (True, lambda S, z: (S, None), TypeError, "initial_state[1] must be a tensor, got NoneType"),
    (True, lambda S, z: (S, z[..., :1]), ValueError, "initial_state[1] must have shape (2, 2, 16), got (2, 2, 1)"),
    (True, lambda S, z: (z, z), ValueError, "initial_state[0] must have shape (2, 2, 16, 32), got (2, 2, 16)"),
    (True, lambda S, z: (S, z.int()), TypeError,
     "initial_state[1] must be float32, bfloat16, float16 or float64, got int32"),
    (False, lambda S, z: (S, z), TypeError, "initial_state must be a tensor S without normalize, got tuple of 2"),
]  # fmt: skip


@each_form
@pytest.mark.parametrize(("normalize", "wrong", "error", "message"), STATES)
def test_states_of_the_wrong_kind(
    form, normalize: bool, wrong, error: type[Exception], message: str, device: torch.device
) -> None:
    q, k, v = qkv(device)
    state = wrong(torch.zeros(2, 2, 16, 32, device=device), torch.zeros(2, 2, 16, device=device))
    with recorded() as calls, pytest.raises(error, match=f"^{re.escape(message)}$"):
        form(q, k, v, initial_state=state, normalize=normalize)
    assert not calls
