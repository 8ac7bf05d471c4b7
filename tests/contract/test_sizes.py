"""Sizes that only the data know, as those of `nonzero`: one graph for all of them, without help from the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from flacompose.ops import chunk_hgrn, chunk_simple_gla
from flacompose.ops._composed import logsumexp

from .accuracy import assert_close, assert_equal
from .cases import CALLS_OF_OPERATORS, MAMBA3, ONE_OP_A_GRAPH, OpCase
from .problems import Problem, draw, evaluate

Function = Callable[[dict[str, Tensor], Tensor, Tensor], tuple[Tensor, Tensor | None]]

# Mamba-3 is made of head decay and the scan: a program of its layer is tested in tests/layers/test_sizes.py.
CALLS = [case for case in CALLS_OF_OPERATORS if case is not MAMBA3]
each_call = pytest.mark.parametrize(
    ("case", "layout"),
    [(case, "packed") for case in CALLS] + [(case, "rows") for case in ONE_OP_A_GRAPH],
    ids=lambda x: x.name if isinstance(x, OpCase) else x,
)
unknown_sizes = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True)


@pytest.fixture(autouse=True)
def few_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logsumexp, "LEVELS", 4)


def places(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()


def bounds(positions: Tensor) -> Tensor:
    """``cu_seqlens`` as code that packs makes them: where a position is 0, and the end."""
    starts = places(positions == 0)
    return torch.cat([starts, starts.new_full((1,), positions.shape[0])])


def chosen(x: Tensor, axes: tuple[str, ...], places: dict[str, Tensor]) -> Tensor:
    """`x` at some places of those of its axes that are named."""
    for i, axis in enumerate(axes):
        if axis in places:
            x = x.index_select(i, places[axis])
    return x


def function(case: OpCase, layout: str) -> Function:
    """The op on tokens that a mask has chosen, and on rows that another has, or packed by their positions."""

    def rows(tensors: dict[str, Tensor], tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        at = {"B": places(rows), "T": places(tokens)}
        at["N"] = at["B"]
        tensors = {name: chosen(x, case.axes[name], at) for name, x in tensors.items()}
        return case.call(**tensors, output_final_state=True)

    def packed(tensors: dict[str, Tensor], tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        one = torch.arange(2, device=tokens.device) < 1
        at = {"T": places(tokens), "B": places(one)}  # one row, which the graph does not know
        tensors = {name: chosen(x, case.axes[name], at) for name, x in tensors.items()}
        cu_seqlens = bounds(positions.index_select(0, at["T"]))
        return case.call(**tensors, output_final_state=True, cu_seqlens=cu_seqlens)

    return rows if layout == "rows" else packed


def problems(case: OpCase, layout: str, device: torch.device) -> list[tuple[Problem, Tensor, Tensor]]:
    """Two calls of the same shapes, whose tokens and whose rows or sequences differ in number, and their masks."""
    calls = []
    for kept, lengths in (15, [5, 10]), (9, [4, 2, 3]):
        tokens = torch.arange(16) < kept
        if layout == "rows":
            problem = draw(case, device, B=4, T=16, seed=kept)
            other = torch.arange(4) < len(lengths)
            at = {"B": places(other).to(device), "T": places(tokens).to(device)}
        else:
            problem = draw(case, device, lengths=lengths, tail=16 - kept, seed=kept, state=False)
            other = torch.cat([*map(torch.arange, lengths), torch.ones(16 - kept, dtype=torch.int64)])
            at = {"T": places(tokens).to(device)}
        axes = case.output_axes
        d_state = chosen(problem.d_final_state, case.state, {"N": at["B"]} if "B" in at else {})
        problem = replace(problem, do=chosen(problem.do, axes, at), d_final_state=d_state)
        calls.append((problem, tokens.to(device), other.to(device)))
    return calls


@each_call
@unknown_sizes
def test_training(case: OpCase, layout: str, device: torch.device) -> None:
    plain = function(case, layout)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    for problem, *masks in problems(case, layout, device):
        actual, expected = (
            evaluate(problem, function=lambda _, run=run, masks=masks, **tensors: run(tensors, *masks))
            for run in (compiled, plain)
        )
        assert_close(actual, expected, 1e-6)


class Program(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(
        self, tensors: dict[str, Tensor], tokens: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.function(tensors, tokens, other)


@each_call
def test_export(case: OpCase, layout: str, device: torch.device) -> None:
    plain = function(case, layout)
    calls = [(problem.tensors, *masks) for problem, *masks in problems(case, layout, device)]
    module = torch.export.export(Program(plain), calls[0]).module()
    for call in calls:
        for actual, expected in zip(module(*call), plain(*call), strict=True):
            assert_equal({"": actual}, {"": expected})


@unknown_sizes
def test_sizes_that_differ(device: torch.device) -> None:
    """What eager code refuses, a graph refuses when it runs."""
    x = torch.randn(1, 8, 4, device=device)

    def of_two_masks(of_x: Tensor, of_g: Tensor) -> Tensor:
        return chunk_hgrn(x[:, places(of_x)], -x[:, places(of_g)].abs())[0]

    def packed(positions: Tensor, state: Tensor) -> Tensor:
        return chunk_hgrn(x, -x.abs(), state, cu_seqlens=bounds(positions))[0]

    t = torch.arange(8, device=device)
    wrong = [
        (of_two_masks, (t < 5, t > 2), (t < 5, t > 4), "g must have shape"),
        (of_two_masks, (t < 5, t > 2), (t < 0, t > 7), "x must have no empty dimension"),
        (packed, (t % 4, x[0, :2]), (t % 2, x[0, :2]), "initial_state must have shape"),
    ]
    for plain, right, others, message in wrong:
        torch._dynamo.reset()
        compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*right), plain(*right))
        with pytest.raises(ValueError, match=message):
            plain(*others)
        with pytest.raises(RuntimeError, match="Runtime assertion failed|is invalid for input of size"):
            compiled(*others)


def test_sizes_that_a_graph_leaves_open(device: torch.device) -> None:
    """A wrong one is refused while the graph is made, in the words of the op."""
    x = torch.randn(1, 8, 4, device=device)
    compiled = torch.compile(chunk_hgrn, backend="eager", fullgraph=True, dynamic=True)
    # PyTorch 2.11 shows the parts of the message one by one.
    with pytest.raises(Exception, match=r"\bg\b.{0,50} must have shape"):
        compiled(x, x[:, 1:])


def test_heads_of_values_that_only_the_data_know(device: torch.device) -> None:
    """That they are a multiple of the heads of keys is asserted when the graph runs."""

    def some_heads(q: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return chunk_simple_gla(q, q, v.index_select(2, places(mask)))[0]

    q, v = torch.randn(1, 5, 2, 4, device=device), torch.randn(1, 5, 8, 4, device=device)
    compiled = torch.compile(some_heads, backend="eager", fullgraph=True)
    with unknown_sizes:
        for kept in (4, 6):
            mask = torch.arange(8, device=device) < kept
            assert torch.equal(compiled(q, v, mask), some_heads(q, v, mask))
        with pytest.raises(RuntimeError):
            compiled(q, v, torch.arange(8, device=device) < 5)
