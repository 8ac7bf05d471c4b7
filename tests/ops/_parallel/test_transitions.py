"""Spans of a sequence that lie apart, each mapped on its own and then joined, do what the whole sequence does.

All is in float64, where only the order of sums differs: results agree to 1e-12 of their norm.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from contract.graphs import op_nodes
from helpers.operators import CHOICES, PACKAGES, axes, operator, part, reference
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flacompose.ops._parallel.transitions import join

SIZES = {"H": 2, "HV": 4, "K": 3, "V": 4, "D": 4, "S": 3}
MATRICES = ("delta_rule", "low_rank")
T = 150
CUTS = [0, 70, 71, T]


class Case(NamedTuple):
    """A recurrence, which of its optional tensors are given, and what is not the default."""

    recurrence: str
    given: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.recurrence, *self.given, *(f"{name}={x}" for name, x in self.options)])

    @property
    def op(self) -> ModuleType:
        return part(self.recurrence, "op")

    @property
    def form(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self.op.forward if self.recurrence == "selective_scan" else self.op.chunk

    @property
    def reference(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return reference(self.recurrence)

    def inputs(self, tokens: int = T, rows: int = 2, dtype: torch.dtype = torch.float64) -> Any:
        """Some gates keep nearly everything, and some nothing."""
        module, generator = part(self.recurrence, "inputs"), torch.Generator().manual_seed(0)
        found: dict[str, Any] = {}
        needed = {"delta_rule": ("beta",), "low_rank": ("a", "b")}.get(self.recurrence, ())
        for name, of_name in axes(self.recurrence).items():
            optional = name in module.Inputs._field_defaults
            if name not in module.Inputs._fields or (optional and name not in (*needed, *self.given)):
                continue
            sizes = SIZES | {"B": rows, "T": tokens, "N": rows}
            x = torch.randn(
                [sizes[axis] for axis in of_name.split()], dtype=torch.float64, generator=generator
            )
            if name in ("g", "g_gamma", "gk", "gv", "A"):
                x = -0.1 * x.abs()
            if name in ("dt", "beta"):
                x = x.abs()
            if self.recurrence in MATRICES:  # so that the product of all matrices stays small
                x = torch.nn.functional.normalize(x, dim=-1) if name in ("k", "a", "b") else x
                x = x * {"beta": 0.3, "b": 0.1}.get(name, 1.0)
            if "T" in of_name.split() and name.startswith("g"):
                x[:, 3::77, ..., 0] = -torch.inf
            if name == "A":
                x[0, 0] = -torch.inf
            found[name] = x.to(dtype).requires_grad_()
        return module.Inputs(**found, **(CHOICES.get(self.recurrence, {}) | dict(self.options)))

    @property
    def ends(self) -> str:
        """The operator of the transition."""
        return f"{operator(self.recurrence)}_{'matrix_ends' if self.recurrence in MATRICES else 'ends'}"

    def tensors(self, inputs: Any) -> dict[str, Tensor]:
        """Those of the inputs that have gradients, by name."""
        named = {
            name: getattr(inputs, name) for name in part(self.recurrence, "inputs").SIGNATURE.differentiable
        }
        return {name: x for name, x in named.items() if x is not None}

    def state(self, inputs: Any) -> Tensor:
        """One for each sequence, of numbers around 1."""
        _, fake = part(self.recurrence, "inputs").SIGNATURE.fake(*inputs)
        generator = torch.Generator().manual_seed(1)
        return torch.randn(fake.shape, dtype=fake.dtype, generator=generator).requires_grad_()

    def spans(self, inputs: Any, cuts: list[int] | None = None) -> list[Any]:
        cuts = [*CUTS] if cuts is None else cuts
        of_tokens = [name for name in self.tensors(inputs) if "T" in axes(self.recurrence)[name].split()]
        pieces = []
        for start, end in zip(cuts, cuts[1:]):
            new: dict[str, Any] = {name: getattr(inputs, name)[:, start:end] for name in of_tokens}
            if inputs.cu_seqlens is not None:
                new["cu_seqlens"] = (inputs.cu_seqlens - start).clamp(0, end - start)
            pieces.append(inputs._replace(**new))
        return pieces


CASES = [
    Case("head_decay"),
    Case("head_decay", ("g",)),
    Case("head_decay", ("g_gamma", "beta")),
    Case("head_decay", ("g", "g_gamma", "beta")),
    Case("channel_decay", ("gk",)),
    Case("channel_decay", ("gv",)),
    Case("channel_decay", ("gk", "gv", "u")),
    Case("scan"),
    Case("selective_scan"),
    Case("delta_rule"),
    Case("delta_rule", ("g",)),
    Case("delta_rule", ("g", "a")),
    Case("delta_rule", ("g", "a"), (("read_before", True),)),
    Case("delta_rule", ("g", "gk", "a")),
    Case("low_rank"),
    Case("low_rank", ("gk",)),
    Case("low_rank", ("gk",), (("read_before", False),)),
]
every = pytest.mark.parametrize("case", CASES, ids=str)
# Of each operator, and of each scheme of the matrix recurrence, the case with the most tensors.
LARGEST = {case.recurrence: case for case in sorted(CASES, key=lambda case: len(case.given))}
of_each_scheme = pytest.mark.parametrize("case", LARGEST.values(), ids=str)
packed = pytest.mark.parametrize("bounds", [None, [0, 40, 40, 90, 150], [0, 60, 71, 140]], ids=str)


def test_every_recurrence_with_maps_has_a_case() -> None:
    mapped = {name for name in map(operator, PACKAGES) if hasattr(torch.ops.flacompose, f"{name}_ends")}
    assert {operator(case.recurrence) for case in CASES} == mapped


def drawn(case: Case, bounds: list[int] | None) -> Any:
    if bounds is None:
        return case.inputs()
    return case.inputs(rows=1)._replace(cu_seqlens=torch.tensor(bounds))


def joined(case: Case, inputs: Any, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(o, final_state)`` of the inputs, in spans that know of each other by their maps alone."""
    pieces = case.spans(inputs)
    maps, ends = zip(*map(case.op.transition, pieces))
    starts, final = join(maps, ends, state)
    return torch.cat([case.form(*x._replace(initial_state=S))[0] for x, S in zip(pieces, starts)], 1), final


def close(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() <= 1e-12 * y.norm().clamp(min=1), (x - y).norm()


@every
def test_spans_are_the_recurrence(case: Case) -> None:
    """Values and gradients, of the reference."""
    inputs = case.inputs()
    state, tensors = case.state(inputs), case.tensors(inputs)
    options = {"scale": 1.0} if case.recurrence in ("head_decay", "channel_decay") else dict(case.options)
    expected = case.reference(**tensors, initial_state=state, **options)
    arriving = [torch.randn_like(x) for x in expected]
    found = joined(case, inputs, state)
    close(found, expected)
    of = [*tensors.values(), state]
    close(torch.autograd.grad(found, of, arriving), torch.autograd.grad(expected, of, arriving))


@every
@packed
def test_packed(case: Case, bounds: list[int] | None) -> None:
    """Each span has a part of every sequence, and of some none."""
    inputs = drawn(case, bounds)
    state, of = case.state(inputs), [*case.tensors(inputs).values()]
    expected = case.form(*inputs._replace(initial_state=state))
    arriving = [torch.randn_like(x) for x in expected]
    found = joined(case, inputs, state)
    close(found, expected)
    close(
        torch.autograd.grad(found, [*of, state], arriving),
        torch.autograd.grad(expected, [*of, state], arriving),
    )


@every
@packed
def test_transposes(case: Case, bounds: list[int] | None) -> None:
    """Backwards in time, each span gets the gradient of the state after it, and then has all gradients at once."""
    inputs = drawn(case, bounds)
    state, tensors = case.state(inputs), case.tensors(inputs)
    expected = case.form(*inputs._replace(initial_state=state))
    do, d_final = (torch.randn_like(x) for x in expected)
    truth = torch.autograd.grad(expected, [*tensors.values(), state], (do, d_final))

    pieces = case.spans(inputs)
    d_outputs = [do[:, start:end] for start, end in zip(CUTS, CUTS[1:])]
    maps, ends = zip(*map(case.op.transition, pieces))
    starts, _ = join(maps, ends, state)
    d_initials = [case.op.d_initial(x, d) for x, d in zip(pieces, d_outputs)]
    d_states, d_state = join(maps, d_initials, d_final, reverse=True)
    found = [torch.zeros_like(x) for x in tensors.values()]
    for x, S, *d in zip(pieces, starts, d_outputs, d_states):
        results = case.form(*x._replace(initial_state=S.detach()))
        of_piece = torch.autograd.grad(results, [*tensors.values()], d, retain_graph=True)
        found = [a + b for a, b in zip(found, of_piece)]
    close([*found, d_state], truth)


@every
def test_derivatives(case: Case) -> None:
    """To the second order and in forward mode, where no gate is -inf: there, differences have no derivative."""
    inputs = case.inputs(3, 1)
    tensors = {
        name: torch.where(x.isinf(), -0.5, x.detach()).requires_grad_()
        for name, x in case.tensors(inputs).items()
    }

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        A, end = case.op.transition(inputs._replace(**dict(zip(tensors, values))))
        d_initial = case.op.d_initial(inputs._replace(**dict(zip(tensors, values))), values[0].new_ones(do))
        return *tree_leaves(A), end, d_initial

    do = case.form(*inputs)[0].shape
    assert torch.autograd.gradcheck(flat, (*tensors.values(),), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(flat, (*tensors.values(),), fast_mode=True)


def test_second_derivative_of_what_one_token_ends_in() -> None:
    """Of an output of which the first derivative does not depend on the input."""
    x, g = torch.randn(2, 1, 5, dtype=torch.float64), -torch.rand(2, 1, 5, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return (torch.ops.flacompose.scan_ends(x, g, None, None)[0] ** 3).sum()

    second = torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
    torch.testing.assert_close(second, 6 * x)


@of_each_scheme
@pytest.mark.parametrize("bounds", [None, [0, 40, 40, 90, 140]], ids=["dense", "packed"])
def test_opcheck(case: Case, bounds: list[int] | None) -> None:
    inputs = drawn(case, bounds)._replace(initial_state=None)
    op = getattr(torch.ops.flacompose, case.ends).default
    torch.library.opcheck(op, [*inputs])


@of_each_scheme
def test_graph(case: Case) -> None:
    """Compiled and exported, a span is one operator at any length, and its map is that of eager."""

    class Transition(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            A, end = case.op.transition(inputs._replace(**tensors))
            return A(torch.ones_like(end)), end

    inputs = case.inputs(20)
    tensors = case.tensors(inputs)
    length = torch.export.Dim("T", min=2, max=2**20)
    dims = {name: {1: length} if "T" in axes(case.recurrence)[name].split() else None for name in tensors}
    program = torch.export.export(Transition(), (tensors,), dynamic_shapes=(dims,))
    assert op_nodes(program.graph_module) == [f"flacompose::{case.ends}"]
    compiled = torch.compile(Transition(), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (20, 3, 150):
            tensors = case.tensors(case.inputs(tokens))
            expected = Transition()(tensors)
            close(program.module()(tensors), expected)
            close(compiled(tensors), expected)
            arriving = [torch.randn_like(x) for x in expected]
            found = []
            for results in (
                compiled(tensors),
                Transition()(tensors),
            ):  # without gates the map has no gradient
                outputs = [(y, dy) for y, dy in zip(results, arriving) if y.requires_grad]
                ys, dys = zip(*outputs)
                found.append(torch.autograd.grad(ys, [*tensors.values()], dys, allow_unused=True))
            pairs = zip(*found)
            close(*zip(*((x, y) for x, y in pairs if x is not None and y is not None)))
