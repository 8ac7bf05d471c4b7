"""RWKV6: its bonus, and states of every shape."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import assert_accurate
from contract.cases import NAMED
from contract.problems import draw, evaluate
from torch import Tensor

from flacompose.ops import chunk_rwkv6, fused_recurrent_rwkv6

FORMS = {form.__name__: form for form in (chunk_rwkv6, fused_recurrent_rwkv6)}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
CASE = {name: NAMED[name] for name in FORMS}
each_case = pytest.mark.parametrize("case", CASE.values(), ids=CASE)


def inputs(device: torch.device, **options) -> dict[str, Tensor]:
    return draw(CASE["chunk_rwkv6"], device, **options).tensors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only kernels differ by the shape of a state")
@each_case
@pytest.mark.parametrize(("K", "V"), [(16, 64), (64, 16)])
@pytest.mark.parametrize("gates", ["weak", "mixed"])
@pytest.mark.parametrize("lengths", [None, [70, 0, 60]], ids=["dense", "packed"])
def test_states_of_every_shape(case, lengths, gates, K: int, V: int, device: torch.device) -> None:
    problem = draw(case, device, T=130, K=K, V=V, gates=gates, lengths=lengths)
    for loss in ("o", "state", "both"):
        assert_accurate(problem, evaluate(problem, loss), loss)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_bonus_of_another_dtype(form, dtype: torch.dtype, device: torch.device) -> None:
    """It is computed with in float32, and gets its gradient in its own."""
    tensors = inputs(device, dtype=torch.bfloat16)
    u = tensors.pop("u")
    leaves = [u.to(x, copy=True).requires_grad_() for x in (dtype, torch.float32)]
    (o, _), (expected, _) = (form(**tensors, u=x) for x in leaves)
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected)
    o.float().sin().sum().backward()
    expected.float().sin().sum().backward()
    assert leaves[0].grad.dtype == dtype
    assert torch.equal(leaves[0].grad, leaves[1].grad.to(dtype))


@each_form
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_bonus_is_not_rounded(form, autocast: bool, device: torch.device) -> None:
    """To the dtype of what it is multiplied with, in which 1 and -1 - 2^-9 cancel."""
    tensors = inputs(device, T=1, K=2, state=False, dtype=torch.bfloat16)
    tensors = {name: torch.ones_like(x) for name, x in tensors.items()}
    if autocast:
        tensors = {name: x.float() for name, x in tensors.items()}
    tensors["u"] = torch.tensor([[1.0, -1 - 2**-9]] * 2, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        o, _ = form(**tensors, scale=1.0)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, torch.full_like(o, -(2**-9)))
