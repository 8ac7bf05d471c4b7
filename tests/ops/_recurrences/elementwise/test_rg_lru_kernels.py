"""The kernels of the RG-LRU beside resets, and in several tiles of channels."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from helpers.operators import flat
from torch import Tensor

from flacompose.ops._launch import sequences
from flacompose.ops._recurrences.elementwise.rg_lru import cuda, eager

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def drawn(
    T: int, D: int, lengths: list[int] | None = None, H: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor | None, ...]:
    """The arguments of a form, of one row or of packed sequences."""
    torch.manual_seed(0)
    x, r, i = torch.randn(3, 1, T, D).to(dtype)
    reset = torch.rand(1, T, H) < 0.15
    cu_seqlens = None if lengths is None else torch.tensor([0, *accumulate(lengths)])
    N = 1 if lengths is None else len(lengths)
    return x, r, i, torch.randn(D) - 4, torch.randn(N, D), reset, cu_seqlens


def error(found: Tensor, truth: Tensor) -> float:
    """Behind a reset, the initial state has a gradient of 0."""
    return float((found.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def check(*args: Tensor | None) -> None:
    """All forms and gradients, compared with PyTorch in float64, with the bounds of the contract for float32."""
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in args]
    o, state = flat(eager, "forward")(*exact)
    for form in ("chunk", "recurrent"):
        for found, truth in zip(flat(cuda, form)(*args), (o, state), strict=True):
            assert error(found, truth) <= 2e-5
    do, d_state = torch.randn(o.shape, dtype=args[0].dtype), torch.randn(state.shape)
    wanted = [True] * 5
    truths = flat(eager, "backward")(*exact, do.double(), d_state.double(), wanted)
    for found, truth in zip(flat(cuda, "backward")(*args, do, d_state, wanted), truths, strict=True):
        assert error(found, truth) <= 1e-4


@pytest.mark.parametrize("T", [1, 8, 9, 16, 37])
def test_lengths(T: int) -> None:
    check(*drawn(T, 5))


@pytest.mark.parametrize("lengths", [[6], [0, 17, 1, 0, 16, 0]], ids=["one", "six"])
def test_packed(lengths: list[int]) -> None:
    """Past the last sequence there may be anything."""
    args = drawn(sum(lengths) + 3, 3, lengths)
    for x in args[:3]:
        x[:, sum(lengths) :] = torch.nan
    check(*args)


@pytest.mark.parametrize("lengths", [None, [3, 60, 0, 40]], ids=["dense", "packed"])
def test_segments(lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    check(*drawn(103, 3, lengths))


def test_groups_of_channels() -> None:
    """As vmap makes them, each with resets of its own."""
    check(*drawn(20, 6, H=3))


def test_tiles_of_channels() -> None:
    check(*drawn(5, 70))


def test_layouts() -> None:
    """Those of parts of a projection, and of a row of resets that is seen many times."""
    x, r, i, *others, reset, cu_seqlens = drawn(9, 4)
    x, r, i = torch.stack([x, r, i], -1).unbind(-1)
    check(x, r, i, *others, reset[:, :1].expand(1, 9, 1), cu_seqlens)


def test_rates_of_any_size() -> None:
    x, r, i, _, state, reset, _ = drawn(9, 5)
    r[:, 1::3] = -torch.inf
    rates = torch.tensor([3e38, 50.0, 0.0, -20.0, -60.0])
    args = x, r, i, rates, state, reset, None
    results = *flat(cuda, "chunk")(*args), *flat(cuda, "backward")(*args, 1e3 * x, state, [True] * 5)
    expected = *flat(eager, "forward")(*args), *flat(eager, "backward")(*args, 1e3 * x, state, [True] * 5)
    for found, truth in zip(results, expected, strict=True):
        assert found.isfinite().all()
        assert error(found, truth.double()) <= 1e-5
