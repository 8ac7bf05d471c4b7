"""Mamba's selective scan: what surrounds its op, groups, rates of every size, layouts, and its memory."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from contract.accuracy import assert_accurate, assert_equal, error
from contract.cases import SELECTIVE, SELECTIVE_GROUPS, OpCase, every
from contract.graphs import op_nodes, recorded
from contract.problems import call, call_reference, draw, evaluate, named
from contract.recurrences import mamba, mamba1
from helpers.operators import flat
from torch import Tensor, nn
from torch.export import Dim, export
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flacompose.ops import selective_scan_fn, selective_state_update
from flacompose.ops._recurrences import chunks
from flacompose.ops._recurrences.elementwise.selective_scan import eager

T, D, S = 70, 6, 5
# Rates as gates, since with none of them nothing is forgotten: what is 0 is measured on that.
RATES = [
    replace(
        case,
        inputs={name: axes for name, axes in case.inputs.items() if name != "A"},
        gates={"A": case.inputs["A"]},
    )
    for case in (SELECTIVE, SELECTIVE_GROUPS)
]
each = every(RATES)
SIZES = {"V": D, "K": S}
OPTIONS = {"D": ("D",), "z": ("B", "T", "D"), "delta_bias": ("D",)}


def case_of(softplus: bool = True, *options: str) -> OpCase:
    """The scan with these options. Time steps are on both sides of 0 before a softplus, and above it without one."""
    steps = (lambda x: x - 1) if softplus else (lambda x: x.abs() / 4)
    return replace(
        SELECTIVE,
        function=mamba(selective_scan_fn, "return_last_state", delta_softplus=softplus),
        reference=partial(mamba1, softplus=softplus),
        inputs=SELECTIVE.inputs | {name: OPTIONS[name] for name in options},
        draws=SELECTIVE.draws | {"delta": steps, "delta_bias": lambda x: x / 2 if softplus else x.abs()},
    )


FULL = case_of(True, *OPTIONS)


def inputs(device: torch.device, **options) -> dict[str, Tensor]:
    """All tensors that the scan takes."""
    return named(draw(FULL, device, **SIZES, **options))


def scan(**arguments) -> tuple[Tensor, Tensor]:
    return selective_scan_fn(**arguments, return_last_state=True)


WITH = {
    "nothing": (False, ()),
    "softplus": (True, ()),
    "softplus and bias": (True, ("delta_bias",)),
    "bias": (False, ("delta_bias",)),
    "D": (True, ("D",)),
    "z": (True, ("z",)),
    "states": (True, ("initial_states",)),
    "all": (True, ("D", "z", "delta_bias", "initial_states")),
}


@pytest.mark.parametrize(("softplus", "given"), WITH.values(), ids=WITH)
@pytest.mark.parametrize("lengths", [None, [30, 0, 1, 34]], ids=["dense", "packed"])
def test_values_and_gradients(
    softplus: bool, given: tuple[str, ...], lengths: list[int] | None, device: torch.device
) -> None:
    case = case_of(softplus, *(name for name in given if name in OPTIONS))
    for dtype in (torch.float32, torch.float64):
        problem = draw(case, device, dtype, **SIZES, lengths=lengths, tail=5, state="initial_states" in given)
        results = evaluate(problem)
        assert_accurate(problem, results)
        assert results["o"].dtype == results["final_state"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Time steps, rates and states are computed with in float32; outputs and gradients have their inputs' dtypes."""
    problem = draw(FULL, device, **SIZES)
    given = {name: problem.tensors[name].to(dtype) for name in ("u", "B", "C", "z", "delta")}
    problem = replace(problem.with_tensors(**given), do=problem.do.to(dtype))
    truth = evaluate(problem.to(torch.float64), function=call_reference)
    actual = evaluate(problem)
    assert actual["o"].dtype == dtype and actual["final_state"].dtype == torch.float32
    assert all(actual[f"d{name}"].dtype == x.dtype for name, x in problem.tensors.items())
    for name, x in actual.items():
        # The output of the op and the sum with D are rounded, and what meets them backwards.
        assert error(x, truth[name]) <= 4 * torch.finfo(dtype).eps, name


def test_what_a_tail_holds_changes_nothing(device: torch.device) -> None:
    """Not the gradients either that its tokens would add to those of D, delta_bias and A."""
    problem = draw(FULL, device, **SIZES, lengths=[30, 35], tail=5)
    expected = evaluate(problem)
    for name in ("u", "delta", "B", "C", "z"):
        problem.tensors[name][:, 65:] = torch.nan
    results = evaluate(problem)
    assert not results["o"][:, 65:].any()
    assert_equal(results, expected)


def test_a_tail_is_zeros_and_has_no_gradient(device: torch.device) -> None:
    """Whatever a sequence's `D` is, and whatever arrives on the tail, as NaN from the square root of its zeros."""
    tensors = inputs(device, lengths=[30, 35], tail=5)
    options = {"delta_softplus": True, "cu_seqlens": torch.tensor([0, 30, 65], device=device)}
    u = tensors["u"].clone().requires_grad_()
    y, _ = scan(**tensors | {"u": u, "D": torch.full_like(tensors["D"], torch.inf)}, **options)
    assert not y[:, 65:].any()
    assert not torch.autograd.grad(y, u, torch.ones_like(y))[0][:, 65:].any()

    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    y, _ = scan(**leaves, **options)
    ones = torch.ones_like(y)
    wrong = ones.masked_fill(torch.arange(T, device=device)[:, None] >= 65, torch.nan)
    expected, actual = (
        torch.autograd.grad(y, list(leaves.values()), x, retain_graph=True) for x in (ones, wrong)
    )
    for x, whole in zip(actual, expected, strict=True):
        assert x.isfinite().all() and torch.equal(x, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [None, [0, 70, 1, 64]], ids=["dense", "packed"])
@pytest.mark.parametrize("H", [1, 2, 6])
def test_groups(H: int, lengths: list[int] | None, dtype: torch.dtype, device: torch.device) -> None:
    problem = draw(SELECTIVE_GROUPS, device, dtype, T=130, H=H, K=5, V=12, lengths=lengths, tail=3)
    assert_accurate(problem, evaluate(problem))


def test_one_group_is_none(device: torch.device) -> None:
    tensors = inputs(device)
    grouped = {**tensors, "B": tensors["B"][:, :, None], "C": tensors["C"][:, :, None]}
    options = {"delta_softplus": True}
    for x, y in zip(scan(**grouped, **options), scan(**tensors, **options), strict=True):
        assert torch.equal(x, y)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", ["o", "state", "both"])
@pytest.mark.parametrize("rate", [0.0, 1e-6, 1e-3, 5.0, 30.0, 1e4, 3e38])
def test_rates_of_every_size(case, rate: float, loss: str, dtype: torch.dtype, device: torch.device) -> None:
    """From what forgets nothing to what a time step makes -inf: there a token starts afresh."""
    problem = draw(case, device, dtype, V=8, K=3)
    problem = problem.with_tensors(A=torch.full_like(problem.tensors["A"], -rate))
    assert_accurate(problem, evaluate(problem, loss), loss)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_rates_and_time_steps(case, dtype: torch.dtype, device: torch.device) -> None:
    """All in one chunk, time steps of 0 among them, which a state passes unchanged."""
    problem = draw(case, device, dtype, V=8, K=7)
    rates = torch.tensor([0.0, 1e-6, 0.1, 5.0, 30.0, 1e30, torch.inf], device=device)
    steps = torch.tensor([0.0, 1e-36, 1e-3, 0.1, 1.0, 20.0], device=device)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(6, problem.tensors["delta"].shape, generator=generator).to(device)
    A = -rates.expand_as(problem.tensors["A"])
    problem = problem.with_tensors(A=A.to(dtype), delta=steps[chosen].to(dtype))
    assert_accurate(problem, evaluate(problem))


@pytest.mark.parametrize("delta", [-200.0, -103.0, -95.0, -88.0])
def test_time_steps_that_underflow(delta: float, device: torch.device) -> None:
    """Or nearly so, at rates whose gradients could overflow: theirs are finite, as at a rate of -inf."""
    problem = draw(FULL, device, **SIZES)
    tensors = problem.tensors
    tensors["delta"][:, 1::2] = delta
    results = evaluate(problem.with_tensors(A=torch.full_like(tensors["A"], -3e38)))
    assert all(x.isfinite().all() for x in results.values())
    if delta == -200:
        assert_equal(results, evaluate(problem.with_tensors(A=torch.full_like(tensors["A"], -torch.inf))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rates_that_give_time_steps_no_gradient(dtype: torch.dtype, device: torch.device) -> None:
    """From just above the bound on, which a gradient shows that a time step of 0 has there."""
    problem = draw(SELECTIVE, device, dtype, **SIZES)
    problem.tensors["delta"].zero_()
    bound = -1e31 if dtype == torch.float32 else -1e300
    for rate, gives in ((bound, True), (1.1 * bound, False)):
        A = torch.full_like(problem.tensors["A"], rate)
        ddelta = evaluate(problem.with_tensors(A=A), "state")["ddelta"]
        assert (ddelta.abs() > -bound / 1e3).any() == gives


def test_time_steps_of_0_leave_the_state_as_it_is(device: torch.device) -> None:
    problem = draw(SELECTIVE, device)
    problem = problem.with_tensors(delta=torch.zeros_like(problem.tensors["delta"]))
    _, state = call(problem)
    assert torch.equal(state, problem.tensors["initial_state"])


def test_channels_first(device: torch.device) -> None:
    """Transposed views of tensors as mamba-ssm and transformers have them."""
    problem = draw(FULL, device, **SIZES)
    views = {name: x.mT.contiguous().mT for name, x in problem.tensors.items() if x.dim() == 3}
    assert not views["u"].is_contiguous()
    expected = evaluate(problem)
    for name, x in evaluate(problem.with_tensors(**views)).items():
        assert error(x, expected[name]) <= 1e-6, name  # a softplus may depend on the layout in its last bits


def test_a_bias_of_another_shape(device: torch.device) -> None:
    problem = draw(FULL, device, **SIZES, T=5)
    bias = problem.tensors["delta_bias"].view(1, D, 1)
    expected = evaluate(problem)
    expected["ddelta_bias"] = expected["ddelta_bias"].view_as(bias)
    assert_equal(evaluate(problem.with_tensors(delta_bias=bias)), expected)


def test_last_states_are_not_returned_unless_asked_for(device: torch.device) -> None:
    tensors = inputs(device)
    y = selective_scan_fn(**tensors, delta_softplus=True)
    assert isinstance(y, Tensor) and torch.equal(y, scan(**tensors, delta_softplus=True)[0])


def test_a_step_is_the_next_token_of_the_scan(device: torch.device) -> None:
    tensors = inputs(device, T=4)
    y, final = scan(**tensors, delta_softplus=True)
    state, outputs = tensors["initial_states"], []
    for t in range(4):
        u, delta, B, C, z = (tensors[name][:, t] for name in ("u", "delta", "B", "C", "z"))
        bias, rates = tensors["delta_bias"], tensors["A"]
        out, state = selective_state_update(state, u, delta, rates, B, C, tensors["D"], z, bias, True)
        outputs.append(out)
    assert error(torch.stack(outputs, 1), y) <= 2e-6
    assert error(state, final) <= 2e-6


class Block(nn.Module):
    def forward(self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor):
        return selective_scan_fn(u, delta, A, B, C, D, z, delta_softplus=True, return_last_state=True)


def test_exported_with_all_that_surrounds_it(device: torch.device) -> None:
    def arguments(T: int) -> tuple[Tensor, ...]:
        return tuple(inputs(device, T=T)[name] for name in ("u", "delta", "A", "B", "C", "D", "z"))

    along = {1: Dim("T", min=2, max=8192)}
    shapes = along, along, None, along, along, None, along
    program = export(Block(), arguments(37), dynamic_shapes=shapes)
    assert op_nodes(program.run_decompositions().graph_module) == ["flacompose::selective_scan_forward"]
    for length in (2, 3, 63, 64, 65, 165, 2048):
        for x, y in zip(program.module()(*arguments(length)), Block()(*arguments(length)), strict=True):
            assert torch.equal(x, y)


def test_compiled_training_with_one_graph(device: torch.device) -> None:
    function = partial(FULL.call, output_final_state=True)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (64, 2, 3, 65):
            problem = draw(FULL, device, **SIZES, T=length)
            expected = evaluate(problem)
            for name, x in evaluate(problem, function=lambda _, **tensors: compiled(**tensors)).items():
                assert error(x, expected[name]) <= 1e-6, name


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made within it."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@pytest.mark.parametrize("lengths", [None, [200, 0, 312]], ids=["dense", "packed"])
def test_the_states_of_all_tokens_are_never_in_memory(
    lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In PyTorch no tensor has more elements than a segment may have, here those of the states of one chunk."""
    limit = chunks.CHUNK * 16 * 64
    monkeypatch.setattr(chunks, "CACHE_BLOCK", limit)
    problem = draw(SELECTIVE, torch.device("cpu"), B=1, T=512, K=16, V=64, lengths=lengths)
    with recorded() as calls:
        evaluate(problem)
    for op, args, _ in calls:
        with Largest() as largest:
            if op.name().endswith("_backward"):
                flat(eager, "backward")(*args)
            else:
                flat(eager, "forward")(*args)
        assert largest.elements <= limit


ERRORS = [
    ({"u": lambda x: x[0]}, ValueError, "u must have shape [B, T, D], got (70, 6)"),
    ({"delta": lambda x: x[..., :1]}, ValueError, "delta must have shape (2, 70, 6), got (2, 70, 1)"),
    ({"A": lambda x: x[0]}, ValueError, "A must have shape [D, S], got (5,)"),
    ({"A": lambda x: x[:1]}, ValueError, "A must have shape (6, 5), got (1, 5)"),
    ({"A": lambda x: x.repeat(1, 120)}, ValueError, "A must have a state size of at most 512, got 600"),
    *(
        (
            {"B": change},
            ValueError,
            f"B must have shape (2, 70, 5) or, in groups, (2, 70, G, 5), got {got}",
        )
        for change, got in (
            (lambda x: x.mT, (2, 5, 70)),
            (lambda x: x.mT[:, None], (2, 1, 5, 70)),  # as mamba-ssm has it
            (lambda x: x[0, 0], (5,)),
            (lambda x: x[:, :, None, :1], (2, 70, 1, 1)),
        )
    ),
    (
        {name: lambda x: x[:, :, None].repeat(1, 1, 4, 1) for name in ("B", "C")},
        ValueError,
        "B must have a number of groups that divides the 6 channels of u, got 4",
    ),
    ({"C": lambda x: x[:, :, None]}, ValueError, "C must have shape (2, 70, 5), got (2, 70, 1, 5)"),
    (
        {"C": lambda x: x.half()},
        TypeError,
        "C must have the dtype of u, float32, got float16: cast one of them, as in u.to(C.dtype)",
    ),
    ({"D": lambda x: x[:1]}, ValueError, "D must have shape (6,), got (1,)"),
    ({"z": lambda x: x[:, :1]}, ValueError, "z must have shape (2, 70, 6), got (2, 1, 6): u has 70 tokens"),
    ({"delta_bias": lambda x: x[:1]}, ValueError, "delta_bias must have the 6 elements of shape (6,), got shape (1,)"),
    ({"initial_states": lambda x: x.mT}, ValueError,
     "initial_states must have shape (2, 6, 5), got (2, 5, 6): its last two axes are the other way round; "
     "give initial_states.mT"),
    ({"z": lambda x: x.to("meta")}, ValueError, "z must be on the device of u, {device}, got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "message"), ERRORS)
def test_errors(wrong: dict, kind: type[Exception], message: str, device: torch.device) -> None:
    tensors = inputs(device)
    expected = message.format(device=tensors["u"].device)
    tensors.update({name: change(tensors[name]) for name, change in wrong.items()})
    with recorded() as calls, pytest.raises(kind, match=f"^{re.escape(expected)}$"):
        selective_scan_fn(**tensors)
    assert not calls


def test_softplus_is_a_bool(device: torch.device) -> None:
    with recorded() as calls, pytest.raises(TypeError, match="^delta_softplus must be a bool, got 'False'$"):
        selective_scan_fn(**inputs(device), delta_softplus="False")
    assert not calls
