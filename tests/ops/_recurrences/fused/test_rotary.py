"""Mamba-3's rotation by itself: packed sequences, some of them empty, and tokens in no sequence that hold anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flacompose.ops._recurrences.fused.rotary import op
from flacompose.ops._recurrences.fused.rotary.reference import rotary

BOUNDS = [0, 3, 3, 37, 39]
END, T = 39, 41
READ_BY = [0, 1, 2, 3, 3, 4, 1, 5]  # of each argument, a result that depends on it


def draw(dtype: torch.dtype, R: int, halves: bool, states: bool = True) -> op.Inputs:
    """Six numbers of a key, of which four turn, and by up to a turn and a half; the tail is not finite."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, q_bias, k_bias, angle, *initial = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in (
            *[(1, T, R, 2, 6)] * 2, (1, T, 4, 5), *[(4, R, 6)] * 2, (1, T, 4, 2), (4, R, 4, 6), (4, 4, 5),
        )
    )  # fmt: skip
    for x in (q, k, v, angle):
        x[:, END], x[:, END + 1] = torch.nan, torch.inf
    initial = initial if states else [None, None]
    return op.Inputs(q, k, v, q_bias, k_bias, angle, *initial, torch.tensor(BOUNDS), halves)


def assert_right(
    forward: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype, rtol: float, R: int, halves: bool
) -> None:
    """`forward` gives the values of the loop for each sequence, zeros for other tokens, and so its gradients do, all at
    once and each alone, of a result alone."""
    *tensors, cu_seqlens, _ = draw(dtype, R, halves)
    tensors = [x.requires_grad_() for x in tensors]
    results = forward(*tensors, cu_seqlens, halves)
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    parts = []
    for n, (lo, hi) in enumerate(zip(BOUNDS, BOUNDS[1:])):
        q, k, v, q_bias, k_bias, angle, *initial = leaves
        initial = [x[n : n + 1] for x in initial]
        if lo == hi:
            parts.append((*[x[:, :0] for x in parts[0][:4]], *initial))
        else:
            q, k, v, angle = (x[:, lo:hi] for x in (q, k, v, angle))
            parts.append(rotary(q, k, v, q_bias, k_bias, angle, *initial, halves))
    expected = [torch.cat(xs, 1 if i < 4 else 0) for i, xs in enumerate(zip(*parts, strict=True))]
    for x, y in zip(results[:4], expected[:4], strict=True):
        assert not x[:, END:].any()
        assert_close(x[:, :END].double(), y, atol=rtol, rtol=rtol)
    for x, y in zip(results[4:], expected[4:], strict=True):
        assert_close(x.double(), y, atol=rtol, rtol=rtol)

    d = [torch.randn_like(x) for x in results]
    exact_d = [x[:, :END].double() if i < 4 else x.double() for i, x in enumerate(d)]
    pairs = [*zip(results, expected, d, exact_d, strict=True)]
    for chosen, wanted in [(range(6), range(8)), *(([one], [x]) for x, one in enumerate(READ_BY))]:
        of, of_exact, d_, exact_d_ = zip(*[pairs[i] for i in chosen], strict=True)
        found = torch.autograd.grad(of, [tensors[i] for i in wanted], d_, retain_graph=True)
        exact = torch.autograd.grad(of_exact, [leaves[i] for i in wanted], exact_d_, retain_graph=True)
        for x, y in zip(found, exact, strict=True):
            assert_close(x.double(), y, atol=30 * rtol, rtol=30 * rtol)


@pytest.mark.parametrize(("R", "halves"), [(1, False), (2, True)])
def test_values_and_gradients(R: int, halves: bool) -> None:
    assert_right(op.forward, torch.float64, 1e-12, R, halves)


def test_the_operator_is_a_good_one() -> None:
    *tensors, cu_seqlens, halves = draw(torch.float32, 2, False)
    tensors = [x[:, :END] if x.shape[1] == T else x for x in tensors]
    torch.library.opcheck(op.forward, (*[x.requires_grad_() for x in tensors], cu_seqlens, halves))
    without = [
        x[:, :END] if x is not None and x.shape[1] == T else x
        for x in draw(torch.float32, 1, True, False)[:8]
    ]
    torch.library.opcheck(op.forward, (*without, None, True))
