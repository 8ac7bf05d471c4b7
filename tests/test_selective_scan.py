"""Mamba's selective scan: what surrounds its op, groups, rates of every size, layouts, and its memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from contract.accuracy import assert_accurate, assert_equal, error
from contract.cases import SELECTIVE, SELECTIVE_GROUPS, every
from contract.graphs import op_nodes, recorded
from contract.problems import call, draw, evaluate
from families import flat
from torch import Tensor, nn
from torch.export import Dim, export
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flacompose.ops import selective_scan_fn, selective_state_update
from flacompose.ops.families import _chunks
from flacompose.ops.families.selective_scan import eager

B, T, D, S, G = 2, 70, 6, 5, 2
OPTIONAL = ("D", "z", "delta_bias", "initial_states")
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


def inputs(device: torch.device, dtype: torch.dtype = torch.float32, *, T: int = T, N: int = B, B: int = B):
    """Time steps on both sides of 0, so that a softplus matters."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {
        "u": normal(B, T, D),
        "delta": normal(B, T, D) - 1,
        "A": -normal(D, S).exp(),
        "B": normal(B, T, S),
        "C": normal(B, T, S),
        "D": normal(D),
        "z": normal(B, T, D),
        "delta_bias": normal(D) / 2,
        "initial_states": normal(N, D, S),
    }
    return {name: x.to(device, dtype) for name, x in tensors.items()}


def one_by_one(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The truth, channel by channel of one number each."""
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    sequences = [(n, 0, u.shape[1]) for n in range(u.shape[0])]
    if bounds is not None:
        sequences = [(0, *span) for span in zip(bounds[:-1], bounds[1:], strict=True)]
    ys, states = [], []
    for i, (n, start, end) in enumerate(sequences):
        h = u.new_zeros(A.shape) if initial_states is None else initial_states[i]
        y = []
        for t in range(start, end):
            dt = delta[n, t] if delta_bias is None else delta[n, t] + delta_bias
            dt = (F.softplus(dt) if delta_softplus else dt)[:, None]
            h = (dt * A).exp() * h + dt * u[n, t, :, None] * B[n, t]
            out = h @ C[n, t] + (0 if D is None else D * u[n, t])
            y.append(out if z is None else out * F.silu(z[n, t]))
        ys.append(torch.stack(y) if y else u.new_zeros(0, u.shape[2]))
        states.append(h)
    tail = [] if bounds is None else [u.new_zeros(u.shape[1] - bounds[-1], u.shape[2])]
    return torch.stack(ys) if bounds is None else torch.cat([*ys, *tail])[None], torch.stack(states)


def scan(**arguments) -> tuple[Tensor, Tensor]:
    return selective_scan_fn(**arguments, return_last_state=True)


def gradients(function, tensors: dict[str, Tensor], **options) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    y, states = function(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    arriving = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (y, states)]
    results = torch.autograd.grad([y, states], list(leaves.values()), arriving)
    return {"y": y.detach(), "states": states.detach(), **dict(zip(leaves, results, strict=True))}


WITH = {
    "nothing": (False, ()),
    "softplus": (True, ()),
    "softplus and bias": (True, ("delta_bias",)),
    "bias": (False, ("delta_bias",)),
    "D": (True, ("D",)),
    "z": (True, ("z",)),
    "states": (True, ("initial_states",)),
    "all": (True, OPTIONAL),
}


@pytest.mark.parametrize(("softplus", "given"), WITH.values(), ids=WITH)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_values_and_gradients(
    softplus: bool, given: tuple[str, ...], packed: bool, device: torch.device
) -> None:
    tensors = inputs(device, **({"B": 1, "N": 4} if packed else {}))
    tensors = {name: x for name, x in tensors.items() if name not in OPTIONAL or name in given}
    if not softplus:
        tensors["delta"] = tensors["delta"].abs() / 4
        if "delta_bias" in tensors:
            tensors["delta_bias"] = tensors["delta_bias"].abs()
    options: dict = {"delta_softplus": softplus}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 30, 30, 31, 65], device=device)
    double = {name: x.double() for name, x in tensors.items()}
    truth = gradients(one_by_one, double, **options)
    actual = gradients(scan, tensors, **options)
    assert actual["y"].dtype == actual["states"].dtype == torch.float32
    for name, x in actual.items():
        assert error(x, truth[name]) <= (2e-5 if name in ("y", "states") else 1e-4), name
    for name, x in gradients(scan, double, **options).items():
        assert error(x, truth[name]) <= 1e-10, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Time steps, rates and states are computed with in float32; outputs and gradients have their inputs' dtypes."""
    tensors = inputs(device)
    for name in ("u", "B", "C", "z", "delta"):
        tensors[name] = tensors[name].to(dtype)
    options = {"delta_softplus": True}
    truth = gradients(one_by_one, {name: x.double() for name, x in tensors.items()}, **options)
    actual = gradients(scan, tensors, **options)
    assert actual["y"].dtype == dtype and actual["states"].dtype == torch.float32
    for name, x in actual.items():
        assert name in ("y", "states") or x.dtype == tensors[name].dtype
        # The output of the op and the sum with D are rounded, and what meets them backwards.
        assert error(x, truth[name]) <= 4 * torch.finfo(dtype).eps, name


def test_what_a_tail_holds_changes_nothing(device: torch.device) -> None:
    """Not the gradients either that its tokens would add to those of D, delta_bias and A."""
    options = {"delta_softplus": True, "cu_seqlens": torch.tensor([0, 30, 65], device=device)}
    tensors = inputs(device, B=1)
    expected = gradients(scan, tensors, **options)
    for name in ("u", "delta", "B", "C", "z"):
        tensors[name][:, 65:] = torch.nan
    results = gradients(scan, tensors, **options)
    assert not results["y"][:, 65:].any()
    assert_equal(results, expected)


def test_a_tail_is_zeros_and_has_no_gradient(device: torch.device) -> None:
    """Whatever a sequence's `D` is, and whatever arrives on the tail, as NaN from the square root of its zeros."""
    tensors = inputs(device, B=1)
    options = {"delta_softplus": True, "cu_seqlens": torch.tensor([0, 30, 65], device=device)}
    y, _ = scan(**tensors | {"D": torch.full_like(tensors["D"], torch.inf)}, **options)
    assert not y[:, 65:].any()

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


def test_time_steps_of_0_leave_the_state_as_it_is(device: torch.device) -> None:
    problem = draw(SELECTIVE, device)
    problem = problem.with_tensors(delta=torch.zeros_like(problem.tensors["delta"]))
    _, state = call(problem)
    assert torch.equal(state, problem.tensors["initial_state"])


def test_channels_first(device: torch.device) -> None:
    """Transposed views of tensors as mamba-ssm and transformers have them."""
    tensors = inputs(device)
    views = {name: x.mT.contiguous().mT if x.dim() == 3 else x for name, x in tensors.items()}
    assert not views["u"].is_contiguous()
    options = {"delta_softplus": True}
    expected = gradients(scan, tensors, **options)
    for name, x in gradients(scan, views, **options).items():
        assert error(x, expected[name]) <= 1e-6, name  # a softplus may depend on the layout in its last bits


def test_a_bias_of_another_shape(device: torch.device) -> None:
    tensors = inputs(device, T=5)
    expected = gradients(scan, tensors, delta_softplus=True)
    bias = tensors["delta_bias"].view(1, D, 1)
    results = gradients(scan, tensors | {"delta_bias": bias}, delta_softplus=True)
    assert_equal(results, expected | {"delta_bias": expected["delta_bias"].view_as(bias)})


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
    compiled = torch.compile(scan, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (64, 2, 3, 65):
            tensors = inputs(device, T=length)
            actual = gradients(compiled, tensors, delta_softplus=True)
            expected = gradients(scan, tensors, delta_softplus=True)
            for name, x in actual.items():
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
    limit = _chunks.CHUNK * 16 * 64
    monkeypatch.setattr(_chunks, "SEGMENT", limit)
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
    ({"z": lambda x: x[:, :1]}, ValueError, "z must have shape (2, 70, 6), got (2, 1, 6)"),
    ({"delta_bias": lambda x: x[:1]}, ValueError, "delta_bias must have the 6 elements of shape (6,), got shape (1,)"),
    ({"initial_states": lambda x: x.mT}, ValueError, "initial_states must have shape (2, 6, 5), got (2, 5, 6)"),
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
