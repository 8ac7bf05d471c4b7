"""The kernels of RWKV-4, in chunks of a few tokens, tiles of a few channels, and segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract.problems import permuted, tokens_last
from helpers.operators import flat
from helpers.unregistered import launch_of
from torch import Tensor

from flacompose.ops._launch import sequences
from flacompose.ops._recurrences.elementwise.rwkv4 import cuda, op
from ops._recurrences.elementwise.test_rwkv4 import assert_right, draw

# What a decay of -inf leaves is computed in two ways, of which one is chosen.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

DIFFERENTIABLE = op.Inputs._fields.index("cu_seqlens")
chunk, recurrent = (launch_of(cuda, form, DIFFERENTIABLE) for form in ("chunk", "recurrent"))


@pytest.mark.parametrize("form", [chunk, recurrent], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("T", [1, 8, 9, 21])
@pytest.mark.parametrize("state", [True, False], ids=["state", "nothing"])
def test_lengths(form: Callable[..., Any], T: int, state: bool) -> None:
    assert_right(form, draw(T, state=state), 1e-5)


@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 55, 60], [2, 30, 70, 71]], ids=str)
@pytest.mark.parametrize("segments", [2, 5])
def test_segments(segments: int, bounds: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them without tokens, and sequences without tokens, and tokens that are in no sequence."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    assert_right(chunk, draw(75, bounds=bounds), 1e-5)


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("segments", [1, 3])
def test_keys_of_any_size(size: float, segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of single precision are those of exponents of keys of this size."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    assert_right(chunk, draw(40, size=size), 1e-5 * max(1.0, size / 10))


@pytest.mark.parametrize("form", [chunk, recurrent], ids=["chunk", "recurrent"])
def test_weights_that_are_all_small(form: Callable[..., Any]) -> None:
    """Of a token before which nothing was written the output is its value, also where its weight underflows."""
    inputs = draw(1)
    inputs = op.Inputs(
        inputs.v, torch.full_like(inputs.k, -200), inputs.w, inputs.u, *torch.zeros(3, 2, 7).unbind()
    )
    torch.testing.assert_close(form(*inputs)[0], inputs.v)


@pytest.mark.parametrize("form", [chunk, recurrent], ids=["chunk", "recurrent"])
def test_writes_that_have_decayed_to_zero(form: Callable[..., Any]) -> None:
    """The maximum of a key so low that a decay is below its rounding stays, and counts no more than the write."""
    inputs = draw(3, state=False)
    k = torch.tensor([-1e30, -1e38, -1e38])[:, None].expand_as(inputs.k).contiguous()
    o = form(*inputs._replace(k=k, w=torch.full_like(inputs.w, -1e4)))[0]
    torch.testing.assert_close(o[:, 2], inputs.v[:, 2])


def test_roundings_do_not_add_up() -> None:
    """Over a slow decay, in which the maximum does nothing but decay."""
    inputs = draw(400, D=3, state=False)
    k = inputs.k - torch.linspace(0, 0.1, 400)[:, None]
    k[:, 0] = 5
    assert_right(chunk, inputs._replace(k=k, w=torch.tensor([-1e-4, -1e-3, -3e-3])), 1e-6)


def test_lowest_maxima() -> None:
    """Of a state in which nothing has been written, and of the lowest keys, after which others count alone."""
    inputs = draw(12)
    inputs.initial_a[:, 0] = inputs.initial_b[:, 0] = 0
    inputs.initial_m[:, 0] = 500
    inputs.k[:, :9, 0] = inputs.k[:, ::3, 2] = torch.finfo(torch.float32).min
    for form in (chunk, recurrent):
        assert_right(form, inputs, 1e-5)


def test_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 2)
    assert_right(chunk, draw(11, D=70), 1e-5)


@pytest.mark.parametrize("layout", [permuted, tokens_last])
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    inputs = draw(10)
    other = inputs._replace(
        v=layout(inputs.v), k=layout(inputs.k), initial_b=inputs.initial_b.T.contiguous().T
    )
    assert not other.v.is_contiguous()
    for x, y in zip(chunk(*other), chunk(*inputs), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_states(count: int) -> None:
    """To the bit those of shorter calls."""
    inputs, steps = draw(5), flat(cuda, "steps")
    o, *states = steps(*inputs, count, 1)
    assert torch.equal(o, recurrent(*inputs)[0])
    for i in range(count):
        T = 5 - count + i + 1
        _, *expected = steps(*inputs._replace(v=inputs.v[:, :T], k=inputs.k[:, :T]), 1, 1)
        for x, y in zip(states, expected, strict=True):
            assert torch.equal(x[:, i], y[:, 0])


def test_how_far_a_nan_reaches() -> None:
    """Not into another sequence or channel, and not back to outputs before it."""
    inputs = draw(20, bounds=[0, 7, 7, 15, 20])
    inputs.v[0, 10, 2] = torch.nan
    v, k = (x.requires_grad_() for x in (inputs.v, inputs.k))
    o, *state = chunk(*inputs)
    reached = o.isnan()
    assert reached[0, 10:15, 2].all() and reached.sum() == 5 and state[0].isnan().sum() == 1
    for x in torch.autograd.grad(o[..., :3].sum(), (v, k)):
        assert (
            not x[0, [*range(7), *range(15, 20)]].isnan().any()
            and not x[..., [0, 1, 3, 4, 5, 6]].isnan().any()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is stored, rounded once."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 2)
    assert_right(chunk, draw(20, dtype=dtype), torch.finfo(dtype).eps)
