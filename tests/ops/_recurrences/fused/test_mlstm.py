"""mLSTM beyond the contract: input gates and stabilisers of any size, and derivatives of the output."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from contract.accuracy import FIXED, assert_accurate, error
from contract.cases import NAMED
from contract.problems import Problem, call_reference, draw, evaluate
from torch import Tensor
from torch.testing import assert_close

from flacompose.layers import MLSTM
from flacompose.ops import chunk_mlstm, fused_recurrent_mlstm

CASE = NAMED["chunk_mlstm"]


def with_any_input_gates(problem: Problem) -> Problem:
    """The problem with input gates from -1e4 to 1e4 and -inf, between resets, from states as large.

    Queries and keys are positive, so that no weights cancel: there even float32 input would leave nothing of them.
    """
    tensors = dict(problem.tensors)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([0, 0, 0, 30, -30, 1e4, -1e4, -torch.inf])
    tensors["i"] = tensors["i"] + sizes[torch.randint(8, tensors["i"].shape, generator=generator)].to(
        tensors["i"]
    )
    tensors["f"][:, 4::9] = -torch.inf
    tensors["i"][:, 13] = -torch.inf  # a reset that leaves nothing at all
    tensors |= {name: tensors[name].abs() for name in ("q", "k", "initial_state")}
    tensors["initial_state"][0, :, -1], tensors["initial_state"][1:, :, -1] = 1e4, -1e4
    return problem.with_tensors(**tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", [chunk_mlstm, fused_recurrent_mlstm], ids=lambda form: form.__name__)
def test_input_gates_of_any_size(form, dtype: torch.dtype, device: torch.device) -> None:
    problem = with_any_input_gates(draw(CASE, device, dtype, lengths=[70, 0, 33], tail=3, gates="rare"))
    case = CASE if form is chunk_mlstm else NAMED["fused_recurrent_mlstm"]
    actual = evaluate(replace(problem, case=case), "o")
    truth = evaluate(problem.to(torch.float64), "o", call_reference)
    for name in ("o", *(f"d{x}" for x in problem.tensors)):
        assert actual[name].isfinite().all(), name
        assert error(actual[name], truth[name]) <= FIXED[dtype][name != "o"], name


@pytest.mark.parametrize("m", [None, 0.5, -torch.inf], ids=["no state", "a state", "a forgotten state"])
def test_one_token(m: float | None, device: torch.device) -> None:
    problem = draw(NAMED["fused_recurrent_mlstm"], device, torch.float64, T=1, state=m is not None)
    if m is not None:
        problem.tensors["initial_state"][:, :, -1] += m
    assert_accurate(problem, evaluate(problem))


def test_input_gates_of_any_size_token_by_token(device: torch.device) -> None:
    problem = with_any_input_gates(draw(CASE, device, torch.float64, B=2, T=40, gates="rare"))
    tensors, o = dict(problem.tensors), []
    state = CASE.split(tensors.pop("initial_state"), tensors)
    expected, _ = chunk_mlstm(**tensors, initial_state=state)
    for t in range(40):
        token = {name: x[:, t : t + 1] for name, x in tensors.items()}
        y, state = fused_recurrent_mlstm(**token, initial_state=state, output_final_state=True)
        o.append(y)
    torch.testing.assert_close(torch.cat(o, 1), expected, atol=1e-9, rtol=1e-9)


def test_the_stabiliser_of_a_state_may_be_any(device: torch.device) -> None:
    """The same memory at another scale gives the same outputs, and the same gradients of what is before it."""
    problem = draw(CASE, device, torch.float64, T=20)
    tensors = dict(problem.tensors)
    C, n, m = CASE.split(tensors.pop("initial_state"), tensors)
    o = partial(chunk_mlstm, **tensors, eps=0.0)
    by = torch.tensor([3.0, -2.0, 0.5, 7.0], dtype=torch.float64, device=device)
    C, n = C.requires_grad_(), n.requires_grad_()
    expected, _ = o(initial_state=(C, n, m))
    scaled, _ = o(initial_state=(C * (-by).exp()[:, None, None], n * (-by).exp()[:, None], m + by))
    torch.testing.assert_close(scaled, expected)
    for x, y in zip(*(torch.autograd.grad(y.sin().sum(), (C, n)) for y in (scaled, expected)), strict=True):
        torch.testing.assert_close(x, y)


def test_derivatives_of_the_output(device: torch.device) -> None:
    """What depends on outputs alone does not depend on the stabiliser, a constant, from one call to the next either."""
    problem = draw(CASE, device, torch.float64, B=1, T=5, H=1, K=2, V=2, state=False)

    def output(*inputs: Tensor) -> Tensor:
        first, state = chunk_mlstm(*(x[:, :3] for x in inputs), output_final_state=True, eps=0.0)
        second, _ = chunk_mlstm(*(x[:, 3:] for x in inputs), initial_state=state, eps=0.0)
        return torch.cat([first, second], 1)

    inputs = [problem.tensors[name].requires_grad_() for name in "qkvif"]
    assert torch.autograd.gradcheck(output, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(output, inputs, fast_mode=True)


def test_a_numerator_above_float16() -> None:
    """It grows with the tokens; the output is a mean."""
    q, i = torch.ones(1, 8300, 1, 64, dtype=torch.float16), torch.zeros(1, 8300, 1)
    for form in (chunk_mlstm, fused_recurrent_mlstm):
        o, _ = form(q, q, q[..., :1], i, i + 40)
        assert_close(o, torch.ones_like(o))


def test_gates_that_forget_for_long() -> None:
    """Where nothing is written any more, no sum of gates grows so large that its rounding counts."""
    q, i = torch.ones(1, 4, 1, 2), torch.tensor([[[0.0], [-torch.inf], [-torch.inf], [-torch.inf]]])
    f = torch.tensor([[[0.0], [-1.1e9], [-5.7e9], [-3.3e9]]])
    for form in (chunk_mlstm, fused_recurrent_mlstm):
        o, (_, _, m) = form(q, q, q, i, f, output_final_state=True)
        assert o.isfinite().all() and not o[:, 1:].any()
        assert m == -1e4


def test_first_gates() -> None:
    """Those of xLSTM-7B, the same for every token: hardly anything is written, and most is kept."""
    layer = MLSTM(hidden_size=16, num_heads=4)
    assert not layer.igate_preact.weight.any() and not layer.fgate_preact.weight.any()
    assert_close(layer.igate_preact.bias, torch.full((4,), -10.0))
    assert_close(layer.fgate_preact.bias, torch.tensor([3.0, 4.0, 5.0, 6.0]))


def test_errors() -> None:
    q, i = torch.randn(1, 4, 2, 3), torch.randn(1, 4, 2)
    state = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3), torch.zeros(1, 2)
    with pytest.raises(TypeError, match=r"initial_state must be a tuple \(C, n, m\), got tuple of 2"):
        chunk_mlstm(q, q, q, i, i, initial_state=state[:2])
    with pytest.raises(ValueError, match=r"initial_state\[2\] must have shape \(1, 2\), got \(1, 2, 1\)"):
        chunk_mlstm(q, q, q, i, i, initial_state=(*state[:2], state[2].unsqueeze(-1)))
    for eps, message in ((torch.inf, "finite, got inf"), (-1.0, "at least 0, got -1.0")):
        with pytest.raises(ValueError, match=f"eps must be {message}"):
            chunk_mlstm(q, q, q, i, i, eps=eps)
