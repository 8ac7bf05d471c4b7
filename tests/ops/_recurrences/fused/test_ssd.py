"""Mamba-2's scan and its step, against the recurrence in float64, token by token."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from contract import problems
from contract.accuracy import assert_accurate, assert_equal, error
from contract.cases import SSD, OpCase
from contract.graphs import op_nodes, other_ops, recorded
from contract.problems import call, call_reference, evaluate, named
from contract.recurrences import mamba
from contract.recurrences import ssd as reference
from helpers import ranks
from helpers.ranks import check_sharded, on_two_ranks, placement
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim, export
from torch.testing import assert_close

from flacompose.ops import mamba_chunk_scan_combined, selective_state_update, ssd
from flacompose.ops._recurrences.fused.ssd import op
from flacompose.ops._recurrences.fused.ssd.op import SIGNATURE, operator
from flacompose.ops._recurrences.matrix import op as matrix

INF = float("inf")
BATCH, HEADS, GROUPS, P, S = 2, 4, 2, 6, 5
# Time steps are on both sides of 0, so that what bounds them matters.
drawn = partial(problems.draw, H=GROUPS, K=S, V=P)


def case_of(
    softplus: bool = True, limit: tuple[float, float] = (0.0, INF), **axes: tuple[str, ...]
) -> OpCase:
    """The scan with these options, of the inputs that it needs and those whose axes are given."""
    return replace(
        SSD,
        function=mamba(
            mamba_chunk_scan_combined,
            "return_final_states",
            chunk_size=64,
            dt_softplus=softplus,
            dt_limit=limit,
        ),
        reference=partial(reference, softplus=softplus, limit=limit),
        inputs={name: SSD.inputs[name] for name in ("x", "dt", "A", "B", "C")} | axes,
    )


def scan(**arguments) -> Tensor | tuple[Tensor, Tensor]:
    return mamba_chunk_scan_combined(**{"chunk_size": 64, **arguments})


def draw(device: torch.device, matrix: bool = False, **options) -> dict[str, Tensor]:
    """All tensors that the scan takes."""
    case = replace(SSD, inputs=SSD.inputs | ({"D": ("HV", "V")} if matrix else {}))
    return named(drawn(case, device, **options))


OPTIONS = {
    "plain": ({"softplus": False}, ()),
    "softplus": ({}, ()),
    "bias": ({"softplus": False}, ("dt_bias",)),
    "softplus and bias": ({}, ("dt_bias",)),
    "limits": ({"limit": (0.4, 1.2)}, ("dt_bias",)),
    "D": ({}, ("D",)),
    "z": ({}, ("z",)),
    "states": ({}, ("initial_states",)),
    "all": ({"limit": (0.4, 1.2)}, ("D", "z", "dt_bias", "initial_states")),
}


@pytest.mark.parametrize(("options", "given"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("matrix", [False, True], ids=["D [H]", "D [H, P]"])
@pytest.mark.parametrize("lengths", [None, [30, 0, 1, 39]], ids=["dense", "packed"])
def test_values_and_gradients(
    options: dict, given: tuple[str, ...], matrix: bool, lengths: list[int] | None, device: torch.device
) -> None:
    axes = {name: axes for name, axes in SSD.inputs.items() if name in given}
    if matrix and "D" in axes:
        axes["D"] = ("HV", "V")
    case, state = case_of(**options, **axes), "initial_states" in given
    for dtype in (torch.float32, torch.float64):
        problem = drawn(case, device, dtype, lengths=lengths, state=state)
        results = evaluate(problem)
        assert_accurate(problem, results)
        assert results["o"].dtype == results["final_state"].dtype == dtype
    assert call(problem)[1].is_contiguous()


def assert_extremes_right(device: torch.device) -> None:
    """At rates of -inf a time step above 1e-36 forgets all and one of 0 nothing; such a rate has no gradient, and gives
    the steps none; nor do rates below -1e31. Nor has a gate that leaves nothing. Time steps far from 0 are
    precise."""
    problem = drawn(case_of(softplus=False), device, B=1, T=9)
    tensors = problem.tensors
    tensors["A"][1:3] = -INF
    tensors["dt"].abs_()
    tensors["dt"][:, 1::3] = 0
    tensors["dt"][:, 5] = 1e-36
    results = evaluate(problem)
    assert_accurate(problem, results)
    assert not results["dA"][1:3].any()

    # Of the gradient of a gate that leaves nothing, a rounding error would outweigh those of all other time steps.
    tensors["A"].fill_(-1e6)
    tensors["dt"].mul_(1e-6)[:, 4] = 1
    assert_accurate(problem, evaluate(problem))

    for dt in (-17.0, 30.0):
        problem = drawn(case_of(), device, B=1, T=9, state=False)
        problem.tensors["dt"].fill_(dt)
        assert_accurate(problem, evaluate(problem))

    problem = drawn(case_of(), device, B=1, T=9)
    tensors = problem.tensors
    tensors["dt"][:, 1::2] = -200  # its softplus underflows
    endless = evaluate(problem.with_tensors(A=torch.full_like(tensors["A"], -INF)))
    problem = problem.with_tensors(A=torch.full_like(tensors["A"], -3e38))
    assert_equal(evaluate(problem), endless)
    for dt in (-103.0, -95.0, -88.0):
        tensors["dt"][:, 1::2] = dt  # and here is nearly 0
        assert all(x.isfinite().all() for x in evaluate(problem.with_tensors(dt=tensors["dt"])).values())


@pytest.mark.parametrize("form", ["composed", "operator"])
def test_extremes(form: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    if form == "operator":
        request.getfixturevalue("of_operator")
    assert_extremes_right(device)


def test_gates_that_leave_nothing_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although kernels give them one, of their rounding errors, here 1: a strong rate would make much of it."""

    def chunk(q, k, v, g, *rest):
        return v + g.unsqueeze(-1), torch.zeros(())

    monkeypatch.setattr(matrix, "chunk", chunk)
    tensors = draw(torch.device("cpu"), T=3)
    x, B, C = tensors["x"], tensors["B"], tensors["C"]
    dt = torch.ones(BATCH, 3, HEADS, requires_grad=True)
    A = torch.tensor([-1.0, -1e3, -1e30, -INF], requires_grad=True)
    d_dt, dA = torch.autograd.grad(scan(x=x, dt=dt, A=A, B=B, C=C).sum(), [dt, A])
    assert d_dt[..., 0].all() and dA[0] and not d_dt[..., 1:].any() and not dA[1:].any()


def test_a_bias_of_another_shape(device: torch.device) -> None:
    problem = drawn(SSD, device, T=5)
    bias = problem.tensors["dt_bias"].view(1, HEADS, 1)
    expected = evaluate(problem)
    expected["ddt_bias"] = expected["ddt_bias"].view_as(bias)
    assert_equal(evaluate(problem.with_tensors(dt_bias=bias)), expected)

    tensors = step(device, heads=True)
    flat = tensors | {"dt_bias": tensors["dt_bias"].flatten()}
    for x, y in zip(selective_state_update(**flat), selective_state_update(**tensors), strict=True):
        assert torch.equal(x, y)


def test_nan_is_not_hidden_by_the_softplus(device: torch.device) -> None:
    """On a GPU the smaller of NaN and a number is the number."""
    x, B, C = torch.ones(3, 1, 5, 1, 1, device=device)
    dt = torch.zeros(1, 5, 1, device=device)
    dt[0, 2] = torch.nan
    y = scan(x=x, dt=dt, A=-torch.ones(1, device=device), B=B, C=C, dt_softplus=True)
    assert y[0, 2:].isnan().all()


def test_negative_time_steps_are_clamped_to_0(device: torch.device) -> None:
    """By the default limits, where no softplus makes them positive."""
    tensors = draw(device)
    arguments = {name: tensors[name] for name in ("x", "dt", "A", "B", "C")}
    assert (tensors["dt"] < 0).any()
    expected = scan(**{**arguments, "dt": tensors["dt"].relu()})
    assert torch.equal(scan(**arguments), expected)


FORMS = ["plain", "limits", "D", "z", "all"]


def assert_right(given: str, packed: bool, device: torch.device, **sizes: int) -> None:
    """The scan and its gradients are those of the recurrence, also a gradient made alone, and tokens in no sequence
    have zeros, whatever they hold."""
    options, names = OPTIONS[given]
    axes = {name: SSD.inputs[name] for name in names if name in SSD.inputs}
    axes |= {"D": ("HV", "V")} if given == "D" else {}
    tail = {"lengths": [30, 0, 1, 69], "tail": 3} if packed else {}
    # Of these numbers no gradient of a rate is a small difference of large sums.
    problem = drawn(case_of(**options, **axes), device, state=given == "all", seed=1, **sizes, **tail)
    if packed:
        for x in (problem.do, *(x for x in problem.tensors.values() if x.dim() > 2 and len(x) == 1)):
            x[:, -3:] = torch.nan
    results = evaluate(problem)
    assert_accurate(problem, results)
    for name, x in problem.tensors.items() if given == "all" and not packed else ():
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            call(problem, **{name: leaf}), leaf, [problem.do, problem.d_final_state]
        )
        assert error(gradient, results[f"d{name}"]) <= 1e-5, name


@pytest.fixture
def of_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan is the operator that CUDA has for all of it."""
    monkeypatch.setattr(ssd, "ssd", lambda inputs: operator(*inputs))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("given", FORMS)
@pytest.mark.usefixtures("of_operator")
def test_the_operator(given: str, packed: bool, device: torch.device) -> None:
    assert_right(given, packed, device)


def few(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """The tensors of the operator but for `cu_seqlens`, of one row."""
    tensors = draw(device, dtype=dtype, matrix=True, B=1, T=5)
    tensors["initial_states"] = tensors["initial_states"].mT
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    return tuple(tensors[name].to(dtype).requires_grad_() for name in names)


def test_the_operator_is_a_good_one(device: torch.device) -> None:
    """Also under `vmap`, and in its second derivatives."""
    tensors, rest = few(device), (None, True, 0.0, INF)
    torch.library.opcheck(operator, (*few(device, torch.float32), *rest))
    torch.library.opcheck(operator, (*tensors, torch.tensor([0, 5], device=device), *rest[1:]))
    assert torch.autograd.gradgradcheck(lambda *x: operator(*x, *rest), tensors, fast_mode=True)
    pairs = [torch.stack([x, 2 * x]) for x in tensors]
    mapped = torch.func.vmap(lambda *x: operator(*x, *rest))(*pairs)
    for i in range(2):
        alone = operator(*(x[i] for x in pairs), *rest)
        assert_close([x[i] for x in mapped], list(alone))


def check_ranks(mesh: DeviceMesh) -> None:
    axes, tensors = SIGNATURE.axes, few(torch.device("cpu"))
    rows = {name for name in axes if axes[name].startswith(("B", "N"))}
    tensors = [torch.cat([x, x]).detach() if n in rows else x.detach() for n, x in zip(axes, tensors)]
    for split in (ranks.BATCH, ranks.HEADS):
        placements = [placement(axes[name].split(), split) for name in SIGNATURE.differentiable]
        outputs = check_sharded(mesh, lambda *x: operator(*x, None, True, 0.0, INF), tensors, placements)
        assert outputs == [placement(axes[name].split(), split) for name in ("o", "final_state")]


def test_distributed() -> None:
    on_two_ranks(check_ranks)


def test_who_calls_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA, where no rank has a part of the tokens: exported graphs have that of head decay."""

    class Module(nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return mamba_chunk_scan_combined(*args[:5], 64, *args[5:8])

    def called(tensors: tuple[Tensor, ...], graph: bool = False) -> list[str]:
        with FakeTensorMode(allow_non_fake_inputs=True):  # no GPU is needed to trace for one
            args = tuple(torch.empty_like(x, device="cuda") for x in tensors[:8])
            if graph:
                return op_nodes(torch.export.export(Module(), args).graph_module)
            with recorded() as calls:
                Module()(*args)
            return [op._opname for op, *_ in calls]

    given = few(torch.device("cpu"), torch.float32)
    assert called(given) == ["ssd_forward"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        assert called(given) == ["ssd_forward"]
    composed = ["matrix_recurrence_chunk", "gated_skip_forward"]
    wide = (*given[:3], *(x.repeat(1, 1, 1, 60) for x in given[3:5]), *given[5:])
    assert called(wide) == called(few(torch.device("cpu"))) == composed
    with monkeypatch.context() as patch:
        patch.setattr(op, "autocast_dtype", lambda device: torch.bfloat16)
        assert called(given) == composed
    with monkeypatch.context() as patch:
        patch.setattr(op, "sharing", lambda: True)
        patch.setattr(op.eager, "composed", lambda inputs, *_: (inputs.x, inputs.x))
        assert called(given) == []
    assert called(given, graph=True) == ["flacompose::matrix_recurrence_chunk"]


def test_heads_of_any_size_in_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the operator does not take are computed in parts."""
    draws = ((1, 3, 1, 5), (1, 3, 2, 600), (1, 3, 2), (2,), (2, 1))
    C, x, dt, A, D = (torch.rand(shape, dtype=torch.float64) for shape in draws)
    options = {"initial_state": None, "output_final_state": True, "cu_seqlens": None}
    expected = op.ssd(op.Inputs(x, dt, -A, C, C, D, x))
    monkeypatch.setattr(ssd, "ssd", lambda inputs: inputs)
    assert_close(ssd.chunk_ssd(C, C, x, dt, -A, D, x, **options), expected)
    assert ssd.chunk_ssd(C, C, x[..., :6], dt, -A, D, x[..., :6], **options).x.shape[-1] == 6
    with pytest.raises(TypeError, match="unexpected keyword argument 'output_states'"):
        ssd.chunk_ssd(C, C, x[..., :6], dt, -A, D, None, output_states=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Time steps, rates and states are computed with in float32, outputs and gradients have their inputs' dtypes."""
    problem = drawn(SSD, device)
    given = {name: problem.tensors[name].to(dtype) for name in ("x", "B", "C", "z", "dt")}
    problem = replace(problem.with_tensors(**given), do=problem.do.to(dtype))
    truth = evaluate(problem.to(torch.float64), function=call_reference)
    actual = evaluate(problem)
    assert actual["o"].dtype == dtype and actual["final_state"].dtype == torch.float32
    assert all(actual[f"d{name}"].dtype == x.dtype for name, x in problem.tensors.items())
    for name, x in actual.items():
        # Values dt * x are rounded, outputs twice.
        assert error(x, truth[name]) <= 8 * torch.finfo(dtype).eps, name


def test_tokens_in_no_sequence_without_skip_and_gate(device: torch.device) -> None:
    """They may hold anything, and so may the gradients that arrive at them, where the scan alone sees to that."""
    tensors = {name: x for name, x in draw(device, T=9, B=1, state=False).items() if name not in ("D", "z")}
    do = torch.randn_like(tensors["x"])
    for x in (do, *(tensors[name] for name in ("x", "dt", "B", "C"))):
        x[:, 7:] = torch.nan
    leaves = [x.requires_grad_() for x in tensors.values()]
    y = scan(**tensors, cu_seqlens=torch.tensor([0, 3, 7], device=device))
    assert not y[:, 7:].any()
    assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(y, leaves, do)))


def test_final_states_are_not_returned_unless_asked_for(device: torch.device) -> None:
    tensors = draw(device)
    y = scan(**tensors)
    assert isinstance(y, Tensor)
    assert torch.equal(y, scan(**tensors, return_final_states=True)[0])


def test_the_chunk_size_changes_nothing(device: torch.device) -> None:
    tensors = draw(device)
    expected = scan(**tensors, return_final_states=True)
    for chunk_size in (1, 16, 256, 1000):
        results = mamba_chunk_scan_combined(**tensors, chunk_size=chunk_size, return_final_states=True)
        assert all(map(torch.equal, results, expected))


def test_states_carry_a_sequence_on(device: torch.device) -> None:
    tensors = draw(device)
    whole, final = scan(**tensors, return_final_states=True)
    along = ("x", "dt", "B", "C", "z")
    first = {name: x[:, :33] if name in along else x for name, x in tensors.items()}
    y1, states = scan(**first, return_final_states=True)
    second = {name: x[:, 33:] if name in along else x for name, x in tensors.items()}
    y2, states = scan(**{**second, "initial_states": states}, return_final_states=True)
    assert error(torch.cat([y1, y2], 1), whole) <= 2e-5
    assert error(states, final) <= 2e-5


class Scan(nn.Module):
    def forward(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        return mamba_chunk_scan_combined(x, dt, A, B, C, 64, D)


def arguments(device: torch.device, T: int) -> tuple[Tensor, ...]:
    tensors = draw(device, T=T)
    return tuple(tensors[name] for name in ("x", "dt", "A", "B", "C", "D"))


def exported(device: torch.device):
    T = Dim("T", min=2, max=2**20)
    shapes = tuple({1: T} if i in (0, 1, 3, 4) else None for i in range(6))
    return export(Scan(), arguments(device, 37), dynamic_shapes=shapes)


def test_exported_as_one_node(device: torch.device) -> None:
    program = exported(device)
    decomposed = program.run_decompositions()
    for form in (program, decomposed):
        assert op_nodes(form.graph_module) == ["flacompose::matrix_recurrence_chunk"]
        for T in (2, 3, 63, 64, 65, 165):
            inputs = arguments(device, T)
            assert error(form.module()(*inputs), Scan()(*inputs)) <= 1e-6


def test_graph_of_the_scan() -> None:
    """Time steps and gates before the op, what joins input and output directly after it."""
    module = exported(torch.device("cpu")).run_decompositions().graph_module
    gates = ["lt", "alias", "where", "clamp", "mul", "clamp"]
    steps = ["lt", "alias", "clamp", "where"]
    assert other_ops(module) == ["unsqueeze", *steps, *gates, "mul", "add"]


def test_compiled_training_with_one_graph(device: torch.device) -> None:
    case = case_of(limit=(0.4, 1.2), **SSD.inputs)
    function = partial(case.call, output_final_state=True)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (64, 2, 3, 65):
            problem = drawn(case, device, T=T)
            expected = evaluate(problem)
            for name, x in evaluate(problem, function=lambda _, **tensors: compiled(**tensors)).items():
                # On CUDA, outside graphs, kernels of its own add up in another order.
                assert error(x, expected[name]) <= (2e-5 if device.type == "cuda" else 1e-6), name


@pytest.mark.parametrize("matrix", [False, True], ids=["D [H]", "D [H, P]"])
def test_a_step_is_the_next_token_of_the_scan(matrix: bool, device: torch.device) -> None:
    tensors = draw(device, T=4, matrix=matrix)
    y, final = scan(**tensors, dt_softplus=True, return_final_states=True)
    state, outputs = tensors["initial_states"], []
    A = tensors["A"][:, None, None].expand(HEADS, P, S)
    D = tensors["D"] if matrix else tensors["D"][:, None].expand(HEADS, P)
    for t in range(4):
        out, state = selective_state_update(
            state,
            tensors["x"][:, t],
            tensors["dt"][:, t, :, None].expand(BATCH, HEADS, P),
            A,
            tensors["B"][:, t],
            tensors["C"][:, t],
            D,
            tensors["z"][:, t],
            tensors["dt_bias"][:, None].expand(HEADS, P),
            dt_softplus=True,
        )
        outputs.append(out)
    assert error(torch.stack(outputs, 1), y) <= 2e-5
    assert error(state, final) <= 2e-5


def step(device: torch.device, heads: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    H, G = ((HEADS,), (GROUPS,)) if heads else ((), ())
    return {
        "state": normal(BATCH, *H, P, S),
        "x": normal(BATCH, *H, P),
        "dt": normal(BATCH, *H, P),
        "A": -normal(*H, P, S).exp(),
        "B": normal(BATCH, *G, S),
        "C": normal(BATCH, *G, S),
        "D": normal(*H, P),
        "z": normal(BATCH, *H, P),
        "dt_bias": normal(*H, P),
    }


def step_by_loops(state, x, dt, A, B, C, D, z, dt_bias) -> tuple[Tensor, Tensor]:
    """With heads, channel by channel."""
    y, new = torch.empty_like(x), torch.empty_like(state)
    for n in range(state.shape[0]):
        for h in range(state.shape[1]):
            group = h // (state.shape[1] // B.shape[1])
            for p in range(state.shape[2]):
                delta = F.softplus(dt[n, h, p] + dt_bias[h, p])
                new[n, h, p] = (delta * A[h, p]).exp() * state[n, h, p] + delta * x[n, h, p] * B[n, group]
                out = new[n, h, p] @ C[n, group] + D[h, p] * x[n, h, p]
                y[n, h, p] = out * F.silu(z[n, h, p])
    return y, new


@pytest.mark.parametrize("heads", [True, False], ids=["heads", "no heads"])
def test_a_step(heads: bool, device: torch.device) -> None:
    """Of Mamba's states too, without heads; the state that is given stays as it is."""
    tensors = step(device, heads)
    before = tensors["state"].clone()
    y, state = selective_state_update(**tensors, dt_softplus=True)
    assert torch.equal(tensors["state"], before)
    assert state.untyped_storage().data_ptr() != tensors["state"].untyped_storage().data_ptr()
    double = {name: x.double() for name, x in tensors.items()}
    if not heads:  # one head
        double = {name: x.unsqueeze(0 if name in ("A", "D", "dt_bias") else 1) for name, x in double.items()}
    expected, new = step_by_loops(**double)
    assert error(y, expected if heads else expected[:, 0]) <= 2e-6
    assert error(state, new if heads else new[:, 0]) <= 2e-6


@pytest.mark.parametrize("missing", ["D", "z", "dt_bias"])
def test_a_step_without(missing: str, device: torch.device) -> None:
    tensors = step(device, heads=True)
    x = tensors.pop(missing)
    y, state = selective_state_update(**tensors, dt_softplus=True)
    neutral = torch.full_like(x, 1.2784645427610738 if missing == "z" else 0)  # silu of it is 1
    expected, new = selective_state_update(**tensors, **{missing: neutral}, dt_softplus=True)
    assert error(y, expected) <= 1e-6
    assert error(state, new) <= 1e-6


def test_a_step_of_rates_of_minus_infinity(device: torch.device) -> None:
    """As of a finite rate that leaves nothing, but without a gradient from it."""
    tensors = step(device, heads=True)
    tensors = {name: tensors[name] for name in ("state", "x", "dt", "A", "B", "C")}
    tensors["dt"] = tensors["dt"].abs()
    tensors["dt"][0] = 0
    endless = torch.arange(S, device=device) % 2 == 0
    finite = selective_state_update(**tensors | {"A": tensors["A"].masked_fill(endless, -1e30)})
    leaves = [x.requires_grad_() for x in (tensors | {"A": tensors["A"].masked_fill(endless, -INF)}).values()]
    results = selective_state_update(*leaves)
    for x, y in zip(results, finite, strict=True):
        assert torch.equal(x, y)
    _, _, d_dt, dA, *_ = torch.autograd.grad([x.sum() for x in results], leaves)
    assert d_dt.isfinite().all() and not dA[..., endless].any() and dA[..., ~endless].all()


@pytest.mark.parametrize("dt", [-200.0, -103.0, -95.0, -88.0])
def test_a_step_that_underflows(dt: float, device: torch.device) -> None:
    """Or nearly so, at rates whose gradients could overflow: its gradient is finite, as at a rate of -inf."""
    tensors = step(device, heads=True)
    tensors["A"].fill_(-3e38)
    tensors["dt"].fill_(dt)
    leaves = [x.requires_grad_() for x in tensors.values()]
    results = selective_state_update(*leaves, dt_softplus=True)
    for x in torch.autograd.grad([x.sum() for x in results], leaves):
        assert x.isfinite().all()


@pytest.mark.parametrize("heads", [True, False], ids=["heads", "no heads"])
def test_a_step_has_gradients(heads: bool, device: torch.device) -> None:
    tensors = step(device, heads, torch.float64)
    leaves = [x.requires_grad_() for x in tensors.values()]

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return selective_state_update(**dict(zip(tensors, leaves, strict=True)), dt_softplus=True)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_dtypes_of_a_step(device: torch.device) -> None:
    """States are computed with in float32 and returned in their dtype, outputs in that of x."""
    tensors = step(device, heads=True)
    tensors.update({name: tensors[name].bfloat16() for name in ("x", "B", "C", "z", "dt")})
    y, state = selective_state_update(**tensors, dt_softplus=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    expected, new = step_by_loops(**{name: x.double() for name, x in tensors.items()})
    assert error(y, expected) <= 2**-8
    assert error(state, new) <= 1e-2
    half, small = selective_state_update(**{**tensors, "state": tensors["state"].half()}, dt_softplus=True)
    assert (half.dtype, small.dtype) == (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("heads", [True, False], ids=["heads", "no heads"])
def test_a_compiled_step(heads: bool, device: torch.device) -> None:
    compiled = torch.compile(selective_state_update, fullgraph=True, backend="aot_eager")
    tensors = step(device, heads)
    for x, y in zip(compiled(**tensors), selective_state_update(**tensors), strict=True):
        assert error(x, y) <= 1e-6


SCAN_ERRORS = [
    ({"x": lambda x: x[0]}, ValueError, "x must have shape [B, T, H, P], got (70, 4, 6)"),
    ({"x": lambda x: x.int()}, TypeError, "x must be float32, bfloat16, float16 or float64, got int32"),
    ({"dt": lambda x: x[..., None]}, ValueError, "dt must have shape (2, 70, 4), got (2, 70, 4, 1)"),
    ({"A": lambda x: x[:1]}, ValueError, "A must have shape (4,), got (1,)"),
    ({"B": lambda x: x[0]}, ValueError, "B must have shape [B, T, G, S], got (70, 2, 5)"),
    ({"B": lambda x: x[:, :1]}, ValueError, "B must have shape (2, 70, 2, 5), got (2, 1, 2, 5): x has 70 tokens"),
    ({"C": lambda x: x[..., :1]}, ValueError, "C must have shape (2, 70, 2, 5), got (2, 70, 2, 1)"),
    ({name: lambda x: torch.cat([x, x[:, :, :1]], 2) for name in ("B", "C")}, ValueError,
     "B must have a number of groups that divides the 4 heads of x, got 3"),
    ({"D": lambda x: x[:1]}, ValueError, "D must have shape (4,), got (1,)"),
    ({"D": lambda x: x.view(2, 2)}, ValueError, "D must have shape (4, 6), got (2, 2)"),
    ({"z": lambda x: x[:, :1]}, ValueError, "z must have shape (2, 70, 4, 6), got (2, 1, 4, 6): x has 70 tokens"),
    ({"dt_bias": lambda x: x[:1]}, ValueError, "dt_bias must have the 4 elements of shape (4,), got shape (1,)"),
    ({"initial_states": lambda x: x.mT}, ValueError,
     "initial_states must have shape (2, 4, 6, 5), got (2, 4, 5, 6): its last two axes are the other way round; "
     "give initial_states.mT"),
    ({"dt": lambda x: None}, TypeError, "dt must be a tensor, got NoneType"),
    ({"z": lambda x: x.to("meta")}, ValueError, "z must be on the device of x, {device}, got meta"),
]  # fmt: skip


def refused(function, arguments: dict, kind: type[Exception], message: str) -> None:
    with recorded() as calls, pytest.raises(kind, match=f"^{re.escape(message)}$"):
        function(**arguments)
    assert not calls


@pytest.mark.parametrize(("wrong", "kind", "message"), SCAN_ERRORS)
def test_errors_of_the_scan(wrong: dict, kind: type[Exception], message: str, device: torch.device) -> None:
    tensors = draw(device)
    tensors.update({name: change(tensors[name]) for name, change in wrong.items()})
    refused(scan, tensors, kind, message.format(device=tensors["A"].device))


OPTION_ERRORS = [
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
    ({"chunk_size": 2.0}, TypeError, "chunk_size must be an int, got float"),
    ({"dt_softplus": "False"}, TypeError, "dt_softplus must be a bool, got 'False'"),
    ({"return_final_states": "yes"}, TypeError, "return_final_states must be a bool, got 'yes'"),
    ({"dt_limit": (1.0, 0.5)}, ValueError, "dt_limit must be two ascending bounds of at least 0, got (1.0, 0.5)"),
    ({"dt_limit": None}, TypeError, "dt_limit must be a tuple of two bounds, got NoneType"),
    ({"dt_limit": (None, 0.5)}, TypeError, "dt_limit[0] must be a number, got NoneType"),
    ({"dt_limit": (0.5,)}, ValueError, "dt_limit must be two ascending bounds of at least 0, got (0.5,)"),
    ({"dt_limit": (-1.0, 0.5)}, ValueError, "dt_limit must be two ascending bounds of at least 0, got (-1.0, 0.5)"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "message"), OPTION_ERRORS)
def test_options_of_the_scan(wrong: dict, kind: type[Exception], message: str, device: torch.device) -> None:
    refused(scan, {**draw(device), **wrong}, kind, message)


def test_sizes_of_the_scan(device: torch.device) -> None:
    tensors = {name: draw(device)[name] for name in ("x", "dt", "A", "B", "C")}
    x, B, C = tensors["x"], tensors["B"], tensors["C"]
    refused(
        scan,
        {**tensors, "x": x.repeat(1, 1, 1, 100)},
        ValueError,
        "x must have a head size of at most 512, got 600",
    )
    states = {"B": B.repeat(1, 1, 1, 120), "C": C.repeat(1, 1, 1, 120)}
    refused(scan, {**tensors, **states}, ValueError, "B must have a state size of at most 512, got 600")
    message = "C must have the dtype of x, float32, got bfloat16: cast one of them, as in x.to(C.dtype)"
    refused(scan, {**tensors, "C": C.bfloat16()}, TypeError, message)
    empty = {name: y if name == "A" else y[:, :0] for name, y in tensors.items()}
    refused(scan, empty, ValueError, f"x must have no empty dimension, got {tuple(empty['x'].shape)}")
    packed = {**tensors, "cu_seqlens": torch.tensor([0, 70], device=device)}
    refused(scan, packed, ValueError, "x must have batch size 1 when cu_seqlens is given, got 2")


STEP_ERRORS = [
    ({"state": lambda x: x[0, 0]}, "state must have shape [N, H, P, S] or [N, P, S], got (6, 5)"),
    ({"x": lambda x: x[0]}, "x must have shape (2, 4, 6), got (4, 6)"),
    ({"dt": lambda x: x[..., 0]}, "dt must have shape (2, 4, 6), got (2, 4)"),
    ({"A": lambda x: x[0]}, "A must have shape (4, 6, 5), got (6, 5)"),
    ({"B": lambda x: x[:, 0]}, "B must have shape (2, 1, 5), got (2, 5)"),
    ({"B": lambda x: x[:, [0, 1, 1]]}, "B must have a number of groups that divides the 4 heads, got 3"),
    ({"C": lambda x: x[:, :1]}, "C must have shape (2, 2, 5), got (2, 1, 5)"),
    ({"D": lambda x: x[0]}, "D must have shape (4, 6), got (6,)"),
    ({"z": lambda x: x[0]}, "z must have shape (2, 4, 6), got (4, 6)"),
    ({"dt_bias": lambda x: x[0]}, "dt_bias must have the 24 elements of shape (4, 6), got shape (6,)"),
]


@pytest.mark.parametrize(("wrong", "message"), STEP_ERRORS)
def test_errors_of_a_step(wrong: dict, message: str, device: torch.device) -> None:
    tensors = step(device, heads=True)
    tensors.update({name: change(tensors[name]) for name, change in wrong.items()})
    refused(selective_state_update, tensors, ValueError, message)


def test_softplus_of_a_step_is_a_bool(device: torch.device) -> None:
    arguments = {**step(device, heads=True), "dt_softplus": "False"}
    refused(selective_state_update, arguments, TypeError, "dt_softplus must be a bool, got 'False'")
