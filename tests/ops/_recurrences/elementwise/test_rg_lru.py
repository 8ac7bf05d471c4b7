"""RG-LRU: resets, also beside what the operator does with other inputs, and decays that no number can tell from 1."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import error
from torch import Tensor
from torch.testing import assert_close

from flacompose.ops import chunk_rg_lru, fused_recurrent_rg_lru
from flacompose.ops._parallel.transitions import join
from flacompose.ops._recurrences.elementwise.rg_lru import op
from flacompose.ops._recurrences.elementwise.rg_lru.reference import rg_lru

FORMS = [chunk_rg_lru, fused_recurrent_rg_lru]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def drawn(
    T: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", D: int = 5
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, T, D), (2, T, D), (2, T, D), (D,), (2, D)
    return [torch.randn(shape, dtype=dtype).to(device).requires_grad_() for shape in shapes]


def by_tokens(
    x: Tensor, r: Tensor, i: Tensor, a_param: Tensor, h: Tensor, reset: Tensor
) -> tuple[Tensor, Tensor]:
    """As the code of Griffin has it: at a reset the state counts nothing, and the input is not scaled."""
    o = []
    for t in range(x.shape[1]):
        a = (-8 * a_param.exp().log1p() * r[:, t].sigmoid()).exp()
        entering, again = i[:, t].sigmoid() * x[:, t], reset[:, t, None]
        h = torch.where(again, entering, a * h + (1 - a * a).sqrt() * entering)
        o.append(h)
    return torch.stack(o, 1), h


@each_form
def test_resets(form) -> None:
    """Of some sequences and in the middle, from a state; values and all gradients."""
    inputs = drawn(9)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[0, 0] = reset[1, 4] = reset[0, 8] = True
    *tokens, h = inputs
    results = form(*tokens, reset, h, True), by_tokens(*inputs, reset)
    assert_close(*results, atol=1e-12, rtol=1e-12)
    gradients = (torch.autograd.grad(o.sum() + h.square().sum(), inputs) for o, h in results)
    assert_close(*gradients, atol=1e-11, rtol=1e-11)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resets_in_kernels(form, dtype: torch.dtype, device: torch.device) -> None:
    """On a GPU these are the kernels. Most of a difference in bfloat16 is the rounding of outputs and gradients."""
    inputs = drawn(70, torch.float32, device, 40)
    with torch.no_grad():
        inputs[3] -= 4
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    reset = (torch.rand(2, 70) < 0.05).to(device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = form(*inputs[:4], reset, inputs[4], True), rg_lru(*exact, reset.unsqueeze(2))
    bound = 1e-5 if dtype == torch.float32 else 5e-3
    for found, truth in zip(*results, strict=True):
        assert error(found.detach(), truth.detach()) <= bound
    gradients = (
        torch.autograd.grad(o.double().sum() + h.double().square().sum(), x)
        for (o, h), x in zip(results, (inputs, exact), strict=True)
    )
    for found, truth in zip(*gradients, strict=True):
        assert error(found, truth) <= 2 * bound


@each_form
def test_weak_decays_add_up(form, device: torch.device) -> None:
    """One of about 1e-6 a token takes a part of 0.03 in 33,000, though float32 has 1 minus 1e-6 to 3 percent.

    Of 1e-6 the roundings of a state in float32 after each token cancel to 0.06 percent.
    """
    x, a_param = torch.zeros(1, 33_000, 1, device=device), torch.full((1,), -15.2018, device=device)
    _, state = form(x, x, x, a_param, None, torch.ones(1, 1, device=device), True)
    taken = -torch.expm1(-8 * a_param.double().exp().log1p() / 2 * 33_000)
    assert error(1 - state, taken) <= 1e-3


@each_form
def test_decays_of_1(form, device: torch.device) -> None:
    """Of a rate of 0 nothing enters and nothing is NaN; beside a rate of 1e-12, 1 minus the decay's square is exact."""
    x, r, i, a_param, h = drawn(3, torch.float32, device)
    with torch.no_grad():
        r[:, 1] = -200.0  # of which the sigmoid is 0
        a_param.copy_(torch.tensor([-26.0, -27.0, -28.0, -29.0, -200.0]))
    o, _ = form(x, r, i, a_param)
    assert torch.equal(o[:, 1], o[:, 0]) and not o[..., 4].any()
    gradients = torch.autograd.grad(o.sum(), [x, r, i, a_param])
    assert all(gradient.isfinite().all() for gradient in gradients)
    double = [y.detach().double().requires_grad_() for y in (x, r, i, a_param)]
    g = -8 * double[3].exp().log1p() * double[1].sigmoid()
    expected = ((-torch.expm1(2 * g)).sqrt() * double[2].sigmoid() * double[0]).cumsum(1)
    assert error(o.detach(), expected.detach()) <= 1e-6
    exact = torch.autograd.grad(expected.sum(), double)
    for gradient, truth in zip(gradients, exact, strict=True):
        assert error(gradient, truth.nan_to_num()) <= 1e-5


def test_second_derivatives_at_decays_of_1() -> None:
    inputs = drawn(3)
    with torch.no_grad():
        inputs[1][:, 1] = -800.0  # of which the sigmoid is 0
    o, _ = chunk_rg_lru(*inputs[:4])
    gradients = torch.autograd.grad(o.square().sum(), inputs[:4], create_graph=True)
    second = torch.autograd.grad(sum(dx.square().sum() for dx in gradients), inputs[:4])
    assert all(x.isfinite().all() for x in second)


def test_rates_of_any_size(device: torch.device) -> None:
    """Where a gate is closed they keep the state, and nowhere is a gradient NaN."""
    x, r, i, a_param, h = drawn(4, torch.float32, device)
    with torch.no_grad():
        r[:, 1] = -torch.inf
        r[:, 2] = 200.0
        a_param.copy_(torch.tensor([3e38, 1e30, 50.0, 200.0, -3e38]))
    o, state = chunk_rg_lru(x, r, i, a_param, None, h, True)
    assert torch.equal(o[:, 1], o[:, 0]) and o.isfinite().all() and torch.equal(state, o[:, 3])
    gradients = torch.autograd.grad(1e3 * o.sum(), [x, r, i, a_param, h])
    assert all(gradient.isfinite().all() for gradient in gradients)


def some_resets(T: int) -> Tensor:
    return torch.rand(2, T, generator=torch.Generator().manual_seed(1)) < 0.2


@pytest.mark.parametrize("mapped", ["all", "resets", "inputs"])
def test_vmap_of_resets(mapped: str) -> None:
    """The operator has the resets of each call for its channels, whether those differ or not."""
    *tokens, h = (torch.stack([x.detach(), x.detach().flip(1)]) for x in drawn(9)[:3])
    a_param, state = (x.detach() for x in drawn(9)[3:])
    inputs, reset = (*tokens, h), torch.stack([some_resets(9), some_resets(9).flip(0)])
    inputs = tuple(x[0] for x in inputs) if mapped == "resets" else inputs
    reset = reset[0] if mapped == "inputs" else reset
    dims = tuple(None if mapped == "resets" else 0 for _ in inputs), None if mapped == "inputs" else 0

    def of_one(inputs: tuple[Tensor, ...], reset: Tensor) -> Tensor:
        def loss(a_param: Tensor) -> Tensor:
            return chunk_rg_lru(*inputs, a_param, reset, state)[0].square().sum()

        o, _ = chunk_rg_lru(*inputs, a_param, reset, state)
        return torch.cat([o.flatten(), torch.func.grad(loss)(a_param)])

    found = torch.func.vmap(of_one, dims)(inputs, reset)
    for n in range(2):
        one = tuple(x if mapped == "resets" else x[n] for x in inputs)
        assert_close(found[n], of_one(one, reset if mapped == "inputs" else reset[n]))


def test_resets_in_spans() -> None:
    """As on several ranks, where each span is known to the others by its map alone."""
    *tokens, a_param, h = drawn(90)
    reset = some_resets(90).unsqueeze(2) & (torch.arange(90) < 60)[:, None]
    pieces = [
        op.Inputs(*(x[:, cut] for x in tokens), a_param, None, reset[:, cut])
        for cut in (slice(40), slice(40, 41), slice(41, 90))
    ]
    starts, state = join(*zip(*map(op.transition, pieces)), h)
    o = torch.cat([op.chunk(*x._replace(initial_state=S))[0] for x, S in zip(pieces, starts)], 1)
    results = (o, state), op.chunk(*tokens, a_param, h, reset, None)
    assert_close(*results, atol=1e-12, rtol=1e-12)
    gradients = (torch.autograd.grad(o.sum() + S.square().sum(), [*tokens, a_param, h]) for o, S in results)
    assert_close(*gradients, atol=1e-11, rtol=1e-11)


def test_states_after_resets() -> None:
    *tokens, h = (x.detach() for x in drawn(9))
    o, states = fused_recurrent_rg_lru(*tokens, some_resets(9), h, output_states=4)
    assert_close(states, o[:, 5:])
    assert_close(o, chunk_rg_lru(*tokens, some_resets(9), h)[0])


def test_derivatives_beside_resets() -> None:
    """To the second order and in forward mode."""
    inputs, reset = drawn(3), some_resets(3).unsqueeze(2)

    def flat(*inputs: Tensor) -> tuple[Tensor, ...]:
        return op.chunk(*inputs, reset, None)

    assert torch.autograd.gradcheck(flat, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(flat, inputs, fast_mode=True)


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 4, 4, 7])], ids=["dense", "packed"])
def test_opcheck_of_resets(cu_seqlens: Tensor | None) -> None:
    rows, N = (2, 2) if cu_seqlens is None else (1, 3)
    *tokens, a_param, _ = drawn(9)
    tokens = [x.detach()[:rows].requires_grad_() for x in tokens]
    reset = some_resets(9)[:rows].unsqueeze(2)
    args = *tokens, a_param, torch.randn(N, 5, dtype=torch.float64, requires_grad=True), reset, cu_seqlens
    torch.library.opcheck(torch.ops.flacompose.rg_lru_chunk.default, args)
    wanted = [True, False, True, True, False]
    do, d_state = (x.detach() for x in op.chunk(*args))
    torch.library.opcheck(torch.ops.flacompose.rg_lru_backward.default, (*args, do, d_state, wanted))


def test_errors() -> None:
    x, r, i, a_param, _ = drawn(3)
    with pytest.raises(TypeError, match="reset must be bool, got int64"):
        chunk_rg_lru(x, r, i, a_param, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"reset must have shape \(2, 3\), got \(3,\)"):
        chunk_rg_lru(x, r, i, a_param, torch.zeros(3, dtype=torch.bool))
