"""The kernels of the short convolution: every width, and strides, which only a launch sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from contract.accuracy import assert_equal
from contract.cases import NAMED, OpCase, every
from contract.problems import draw, evaluate, permuted
from helpers.operators import flat
from helpers.unregistered import launch_of, launched
from torch import Tensor
from triton.runtime import interpreter

from flacompose.ops._recurrences.short_conv import cuda
from flacompose.ops._recurrences.short_conv.inputs import Inputs
from ops._recurrences.test_kernels import CPU, check

SILU = NAMED["causal_conv1d-silu"]
each = every([SILU, NAMED["causal_conv1d"]])


@each
@pytest.mark.parametrize("W", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("T", [1, 2, 67])
def test_widths(case: OpCase, W: int, T: int) -> None:
    check(draw(case, CPU, B=2, T=T, V=5, W=W))


@each
@pytest.mark.parametrize("loss", ["o", "state", "both"])
def test_packed_sequences_that_end_with_a_chunk(case: OpCase, loss: str) -> None:
    forward, backward = cuda.FORWARD[0], cuda.BACKWARD[0] - 3
    check(draw(case, CPU, V=3, lengths=[forward, 0, backward, 1, 2 * backward, 0], tail=forward + 1), loss)


def test_no_tokens() -> None:
    """As on a rank whose piece is empty: the state stays, and so does its gradient."""
    x, weight, bias = torch.zeros(2, 0, 5, requires_grad=True), torch.randn(5, 4), torch.randn(5)
    state = torch.randn(2, 5, 4, requires_grad=True)
    convolve = launch_of(cuda, "forward", Inputs._fields.index("cu_seqlens"))
    y, final_state = convolve(x, weight, bias, state, None, True)
    assert y.shape == x.shape and torch.equal(final_state, state)
    (final_state * final_state.detach()).sum().backward()
    assert torch.equal(state.grad, state)


def test_many_short_sequences() -> None:
    check(draw(SILU, CPU, V=3, lengths=[1, 2, 3, 0] * 12, tail=1))


def test_tokens_before_the_first_sequence() -> None:
    """They have chunks of their own, which write zeros."""
    problem = draw(SILU, CPU, V=3, lengths=[200, 3])
    problem.cu_seqlens[0] = 130
    poisoned = problem.with_tensors(x=problem.tensors["x"].clone())
    poisoned.tensors["x"][:, :130] = torch.nan
    results = evaluate(poisoned, function=launched)
    assert not results["o"][:, :130].any() and not results["dx"][:, :130].any()
    rest = replace(problem, cu_seqlens=problem.cu_seqlens - 130, do=problem.do[:, 130:])
    expected = evaluate(rest.with_tensors(x=problem.tensors["x"][:, 130:]), function=launched)
    for name in ("o", "dx"):
        results[name] = results[name][:, 130:]
    assert_equal({name: results[name] for name in ("o", "dx", "final_state", "dinitial_state")},
                 {name: expected[name] for name in ("o", "dx", "final_state", "dinitial_state")})  # fmt: skip


@pytest.mark.parametrize(
    ("T", "lengths", "tail"),
    [(1, None, 0), (2, None, 0), (140, None, 0), (0, [3, 0, 128, 1, 70], 3), (0, [63, 2, 59, 2], 0)],
)
def test_no_access_leaves_a_tensor(
    T: int, lengths: list[int] | None, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a read, whose value may not matter, nor a write; the last two sequences have chunks past the end."""
    spans: list[tuple[int, int]] = []

    def launch(kernel: Any, grid: Any, **arguments: Any) -> None:
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        spans[:] = [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors]
        kernel[grid](**arguments)

    def checked(access: Any, mask_at: int) -> Any:
        def check_access(self: Any, pointers: Any, *rest: Any) -> Any:
            for at in pointers.data[rest[mask_at].data.astype(bool)].reshape(-1).tolist():
                assert any(first <= at < last for first, last in spans)
            return access(self, pointers, *rest)

        return check_access

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_masked_load", checked(builder.create_masked_load, 0))
    monkeypatch.setattr(builder, "create_masked_store", checked(builder.create_masked_store, 1))
    monkeypatch.setattr(cuda, "launch", launch)
    check(draw(SILU, CPU, T=T, V=3, lengths=lengths, tail=tail))
    assert spans


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_no_token_past_the_end_has_a_gradient() -> None:
    """The sum of such a token, which is not computed with, would overflow; that of the last token does not."""
    x = torch.tensor([[[0.0], [2e38]]])
    weight, dy = torch.tensor([[2.0, 1.0]]), torch.ones(1, 2, 1)
    dx, *_ = flat(cuda, "backward")(x, weight, None, None, None, True, dy, None, [True, False, False, False])
    torch.testing.assert_close(dx, torch.tensor([[[0.5 + 2.0], [1.0]]]))


def part(x: Tensor) -> Tensor:
    """A view of some channels of a tensor with more of them."""
    wide = torch.full([*x.shape[:-1], 2 * x.shape[-1] + 3], torch.nan, dtype=x.dtype)
    wide[..., 3 : 3 + x.shape[-1]] = x
    return wide[..., 3 : 3 + x.shape[-1]]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("layout", [part, permuted])
def test_strides(layout, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of wider tensors are read where they lie; the channels of others are brought together first."""
    problem = draw(SILU, CPU, T=20, V=5, lengths=[9, 0, 11] if packed else None)
    other = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
    other = replace(other, do=layout(problem.do), d_final_state=layout(problem.d_final_state))
    read = []

    def launch(kernel: Any, grid: Any, **arguments: Any) -> None:
        read.extend(arguments[name].data_ptr() for name in ("x", "dy") if name in arguments)
        kernel[grid](**arguments)

    expected = evaluate(problem, function=launched)
    monkeypatch.setattr(cuda, "launch", launch)
    assert_equal(evaluate(other, function=launched), expected)
    where = [other.tensors["x"].data_ptr()] * 2 + [other.do.data_ptr()]
    assert (read == where) == (layout is part)
