"""Mamba-3's scans, against the recurrence in float64, token by token."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from contract.accuracy import assert_accurate, error
from contract.cases import MAMBA3, MAMBA3_MIMO
from contract.graphs import recorded
from contract.problems import call, draw, evaluate, named
from contract.recurrences import mamba3_siso, mimo, mimo_case
from torch.testing import assert_close

from flacompose.ops import mamba3_mimo_combined
from flacompose.ops._recurrences.elementwise.cumulative_angle.eager import running
from flacompose.ops._recurrences.fused.mamba3 import op
from flacompose.ops._recurrences.fused.mamba3.inputs import SIGNATURE


@pytest.mark.parametrize("lengths", [None, [30, 0, 1, 39]], ids=["dense", "packed"])
@pytest.mark.parametrize(("state", "gates"), [(False, "weak"), (True, "mixed")])
def test_several_keys_a_token(
    lengths: list[int] | None, state: bool, gates: str, device: torch.device
) -> None:
    problem = draw(mimo_case(normed=state), device, K=8, V=6, lengths=lengths, state=state, gates=gates)
    assert_accurate(problem, evaluate(problem))


@pytest.mark.parametrize(("state", "gates"), [(False, "weak"), (True, "mixed")])
@pytest.mark.parametrize("T", [1, 70])
def test_values_and_gradients(T: int, state: bool, gates: str, device: torch.device) -> None:
    """Gates of any strength, time steps of 0 among the others, and for one token the form for decoding."""
    problem = draw(MAMBA3, device, T=T, state=state, gates=gates)
    problem.tensors["DT"][:, ::3, 1:] = 0
    assert_accurate(problem, evaluate(problem))


def inputs_of_a_token(
    dtype: torch.dtype, values_first: bool, without: tuple[str, ...] = (), B: int = 2
) -> op.Inputs:
    """Of four heads, two groups of keys and shared angles, some of them slices of one projection."""
    H, G, S, P, A = 4, 2, 6, 5, 2
    parts = torch.randn(B, 1, 2 * H * P + H + A, dtype=dtype).split([H * P, H * P, H, A], -1)
    V, Z = (x.unflatten(-1, (H, P)) for x in parts[:2])
    gates = [-x for x in torch.rand(2, B, 1, H, dtype=dtype)]
    tokens, biases = torch.randn(2, B, 1, G, S, dtype=dtype), torch.randn(2, H, S, dtype=dtype)
    of_state = (P, S) if values_first else (S, P)
    states = [torch.randn(B, H, *size, dtype=dtype) for size in ((A,), of_state, (S,), (P,))]
    inputs = op.Inputs(
        *tokens, V, gates[0], -gates[1], parts[2], *biases, parts[3].unsqueeze(2), *states,
        torch.randn(H, dtype=dtype), Z, values_first,
    )  # fmt: skip
    return inputs._replace(**dict.fromkeys(without))


def test_one_token_is_an_operator() -> None:
    """Registered as PyTorch wants it, with all derivatives, and with results as a trace has them."""
    inputs = inputs_of_a_token(torch.float64, values_first=True, B=1)
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.library.opcheck(op.token, leaves)
    assert torch.autograd.gradcheck(op.token, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(op.token, leaves, fast_mode=True)
    wide = inputs._replace(V=inputs.V.transpose(2, 3).contiguous().transpose(2, 3))
    for real, fake in zip(op.token(*wide), SIGNATURE.fake(*wide), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("without", [(), ("D",), ("Z",), ("D", "Z")], ids=str)
def test_one_token_is_a_row_of_one(without: tuple[str, ...], device: torch.device) -> None:
    """A packed row of one token takes the way of many: with the same values, states and gradients."""
    problem = draw(MAMBA3, device, torch.float64, B=1, T=1)
    problem.tensors["Angles"] = problem.tensors["Angles"][:, :, :1]
    packed = replace(problem, cu_seqlens=torch.tensor([0, 1], device=device))
    absent = dict.fromkeys(without)
    less = replace(MAMBA3, function=lambda **given: mamba3_siso(**given | absent))
    with recorded() as calls:
        results = evaluate(replace(problem, case=less))
    assert {call._opname for call, _, _ in calls} == {"mamba3_token"}
    for name, x in evaluate(replace(packed, case=less)).items():
        assert_close(results[name], x, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_half_precision(device: torch.device) -> None:
    for case in (MAMBA3, MAMBA3_MIMO):
        problem = draw(case, device, torch.bfloat16, K=8, V=6)
        exact = problem.to(torch.float64)
        o, state = call(problem)
        assert o.dtype == torch.bfloat16
        for x, y in zip((o, state), call(exact), strict=True):
            assert (x - y).norm() < 0.02 * y.norm()


def test_biases_of_another_dtype() -> None:
    tensors = draw(MAMBA3_MIMO, torch.device("cpu"), torch.float32, T=5, K=8, V=6, state=False).tensors
    wide = {name: tensors[name].double() for name in ("Q_bias", "K_bias")}
    torch.testing.assert_close(mimo(**tensors | wide)[0], mimo(**tensors)[0])


@pytest.mark.parametrize("name", ["ADT", "DT", "Trap"])
def test_states_have_the_dtype_of_sums(name: str) -> None:
    tensors = draw(MAMBA3_MIMO, torch.device("cpu"), torch.float32, T=5, K=8, V=6, state=False).tensors
    _, state = mimo(**tensors | {name: tensors[name].double()}, output_final_state=True)
    assert {x.dtype for x in state} == {torch.float32}


def test_products_above_float16() -> None:
    """Of queries and keys; the output is far smaller than these."""
    tensors = draw(MAMBA3_MIMO, torch.device("cpu"), torch.float16, T=5, K=8, V=6, state=False).tensors
    tensors |= {name: torch.full_like(tensors[name], 400.0) for name in ("Q", "K")}
    tensors |= {"DT": tensors["DT"] * 1e-6}
    assert mimo(**tensors)[0].isfinite().all()


def test_angles_of_a_long_row() -> None:
    """After 32,768 tokens, some thousand turns, keys still stand where those of float64 do."""
    T = 32_768
    tensors = named(draw(MAMBA3, torch.device("cpu"), B=1, T=T, H=1, K=8, V=1, state=False))
    tensors["Angles"].abs_()
    _, (angle, _, k, _) = mamba3_siso(**tensors, output_final_state=True)
    step = tensors["Angles"].double().tanh() * math.pi * tensors["DT"].double().unsqueeze(-1)
    exact = step.sum(1)
    assert exact.min() > 1000 * 2 * math.pi
    off = torch.polar(torch.ones_like(exact), angle.double() - exact) - 1
    assert (
        off.abs().max() < 1e-4
    )  # each step, in float32, is off by up to 1e-7 of a radian, and not always one way
    assert k.isfinite().all()


@pytest.mark.parametrize("T", [2, 33, 64, 1100])
def test_sums_of_angles(T: int) -> None:
    """In parts of 32 tokens, sums and their gradients are those of one row, and nothing reaches an earlier token."""
    x, d = torch.randn(2, 2, T, 3, dtype=torch.float64)
    sums, gradient = torch.func.vjp(running, x)
    assert_close(sums, x.cumsum(1))
    assert_close(gradient(d)[0], d.flip(1).cumsum(1).flip(1))
    x[:, T - 1] = torch.inf
    assert running(x)[:, :-1].isfinite().all()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="on GPUs the compiler of PyTorch 2.11 splits long sums"
)
def test_a_long_row_is_compiled(device: torch.device) -> None:
    tensors = named(draw(MAMBA3, device, B=2, T=2048, H=4, K=16, V=16, state=False))
    compiled = torch.compile(mamba3_siso, fullgraph=True, dynamic=False)
    # The compiler adds up the angles in another order.
    assert error(compiled(**tensors)[0], mamba3_siso(**tensors)[0]) < 1e-5


def test_groups_of_angles(device: torch.device) -> None:
    """Angles that all heads share need not be given for each."""
    tensors = named(draw(MAMBA3, device, T=5, state=False))
    shared = tensors["Angles"][:, :, :1]
    both = [
        mamba3_siso(**tensors | {"Angles": angles})[0]
        for angles in (shared, shared.expand_as(tensors["Angles"]))
    ]
    assert torch.equal(*both)


def test_without_the_last_sum(device: torch.device) -> None:
    tensors = named(draw(MAMBA3_MIMO, device, T=5, K=8, V=6, state=False))
    summed = mimo(**tensors)[0]
    out = tensors.pop("MIMO_Out")
    apart = mimo(**tensors, MIMO_Out=None)[0]
    assert apart.shape == (*summed.shape[:2], 2, *summed.shape[2:])
    torch.testing.assert_close((apart * out.transpose(0, 1)).sum(2), summed)


def test_autocast(device: torch.device) -> None:
    """Products are in its dtype, and states are not rounded."""
    tensors = named(draw(MAMBA3, device, state=False))
    with torch.autocast(device.type, torch.bfloat16):
        o, state = mamba3_siso(**tensors, output_final_state=True)
    assert [x.dtype for x in (o, *state)] == [torch.bfloat16, *[torch.float32] * 2, *[torch.bfloat16] * 2]
    rounded = {name: x.bfloat16() if name in ("Q", "K", "V") else x for name, x in tensors.items()}
    assert torch.equal(mamba3_siso(**rounded)[0], o)


ONE, S = torch.ones(1, 3, 4, 6), "MIMO_Z must be a tensor where Z is given, got NoneType"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict.fromkeys("QK", torch.ones(1, 3, 2, 3, 8)), ValueError, "Q must have a number of groups that divides"),
        (dict.fromkeys("QK", torch.ones(1, 3, 2, 2, 7)), ValueError, "must have an even state size"),
        ({"ADT": torch.ones(1, 4, 3)}, ValueError, "ADT must have shape (1, 3, 4), got (1, 4, 3)"),
        ({"K": torch.ones(1, 3, 2, 2, 8).double()}, TypeError, "K must have the dtype of V, float32, got float64"),
        ({"Angles": torch.ones(1, 3, 4, 5)}, ValueError, "Angles must have from 1 to S / 2 = 4 angles, got 5"),
        ({"rotary_dim_divisor": 2}, ValueError, "Angles must have S // rotary_dim_divisor = 4 angles, got 2"),
        ({"MIMO_V": torch.ones(4, 3, 6)}, ValueError, "MIMO_V must have shape (4, 2, 6), got (4, 3, 6)"),
        ({"MIMO_Z": None}, TypeError, S),
        ({"dtype": 3}, TypeError, "dtype must be a torch.dtype, got int"),
        ({"outproj_norm_eps": math.inf}, ValueError, "outproj_norm_eps must be finite, got inf"),
        ({"outproj_norm_eps": -1.0}, ValueError, "outproj_norm_eps must be at least 0, got -1.0"),
        ({"outproj_norm_weight": ONE}, ValueError, "outproj_norm_weight must have the 24 elements of shape (4, 6)"),
        ({"return_state": 1}, TypeError, "return_state must be a bool, got 1"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"Input_States": (ONE,) * 3}, TypeError, "Input_States must be a tuple (angle, state, k, v), got tuple of 3"),
        ({"Input_States": (ONE,) * 4}, ValueError, "Input_States[0] must have shape (1, 4, 2), got (1, 3, 4, 6)"),
    ],
)  # fmt: skip
def test_errors(change: dict, error: type[Exception], message: str) -> None:
    tensors = named(draw(MAMBA3_MIMO, torch.device("cpu"), B=1, T=3, K=8, V=6, state=False))
    with pytest.raises(error, match=re.escape(message)):
        mamba3_mimo_combined(**{"rotary_dim_divisor": 4, **tensors, **change})
