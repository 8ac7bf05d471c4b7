"""Values and every gradient against the reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from .accuracy import assert_accurate, assert_close, error
from .cases import LOSSES, OpCase, each_gated_op, each_op, each_scaled_op, one_op_a_form_of_kernels
from .problems import GATES, Problem, call, call_reference, draw, evaluate

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INF = float("inf")


@each_op
@pytest.mark.parametrize(
    ("dtype", "loss"),
    [
        *[(torch.float32, loss) for loss in ("o", "state", "both")],
        *[(torch.bfloat16, loss) for loss in LOSSES],
        (torch.float64, "both"),
        (torch.float16, "both"),
    ],
    ids=str,
)
def test_dtypes_and_losses(case: OpCase, dtype: torch.dtype, loss: str, device: torch.device) -> None:
    problem = draw(case, device, dtype, T=130)
    results = evaluate(problem, loss)
    assert_accurate(problem, results, loss)
    assert results["o"].dtype == dtype
    assert results["final_state"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(results[f"d{name}"].dtype == x.dtype for name, x in problem.tensors.items())
    assert all(x.device.type == device.type for x in results.values())


@each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_initial_state(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    problem = draw(case, device, dtype, state=False)
    assert_accurate(problem, evaluate(problem))


@each_gated_op
def test_gates_of_another_dtype(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, torch.bfloat16, gate_dtype=torch.float32)
    results = evaluate(problem)
    assert_accurate(problem, results)
    assert all(results[f"d{name}"].dtype == torch.float32 for name in case.gates)


@each_op
@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 130])
def test_lengths(case: OpCase, T: int, device: torch.device) -> None:
    problem = draw(case, device, T=T)
    assert_accurate(problem, evaluate(problem))


@each_op
@pytest.mark.parametrize(
    ("K", "V"), [(1, 3), (3, 17), (17, 1), (100, 256), (256, 100), (320, 512), (512, 300)]
)
def test_head_sizes(case: OpCase, K: int, V: int, device: torch.device) -> None:
    """With one head, the gradient of a constant decay would be a single number, which may be nearly 0 by chance."""
    # Kernels have tiles of large heads and of chunks; PyTorch has none of the former, and one chunk does.
    T = 70 if device.type == "cuda" or max(K, V) < 100 else 9
    problem = draw(case, device, B=1, T=T, K=K, V=V, M=max(K, V))
    assert_accurate(problem, evaluate(problem))


@each_scaled_op
@pytest.mark.parametrize("scale", [0.3, 1, 0.0, -0.7])
def test_scale(case: OpCase, scale: float, device: torch.device) -> None:
    problem = draw(case, device, T=5, scale=scale)
    assert_accurate(problem, evaluate(problem))


@each_op
def test_the_state_is_not_returned_unless_asked_for(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    o, state = case.call(**problem.tensors)
    assert state is None
    assert torch.equal(o, call(problem)[0])


@each_gated_op
@pytest.mark.parametrize(
    ("gates", "T"), [*product([*GATES, "mixed", "rare", "resets"], [70]), ("mixed", 3), ("resets", 3)]
)
def test_gates(case: OpCase, gates: str | float, T: int, device: torch.device) -> None:
    problem = draw(case, device, T=T, gates=gates)
    assert_accurate(problem, evaluate(problem))


@each_gated_op
@pytest.mark.parametrize("gates", [-30.0, -INF, "mixed", "rare"])
def test_gates_in_low_precision(case: OpCase, gates: str | float, device: torch.device) -> None:
    problem = draw(case, device, torch.bfloat16, T=70, gates=gates)
    assert_accurate(problem, evaluate(problem))


@each_gated_op
@pytest.mark.parametrize("loss", ["o", "state"])
@pytest.mark.parametrize("gates", [-15.0, "mixed", "rare"])
def test_gates_with_one_loss(case: OpCase, gates: str | float, loss: str, device: torch.device) -> None:
    problem = draw(case, device, T=20, gates=gates)
    assert_accurate(problem, evaluate(problem, loss), loss)


@each_op
@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_initial_state_of_any_dtype(case: OpCase, state_dtype: torch.dtype, device: torch.device) -> None:
    """It is computed with in float32, and gets its gradient in its own dtype."""
    problem = draw(case, device, T=20, state_dtype=state_dtype)
    results = evaluate(problem)
    assert results["final_state"].dtype == torch.float32
    gradient = results.pop("dinitial_state")
    assert gradient.dtype == state_dtype
    assert_accurate(problem, results)
    exact = evaluate(problem.to(torch.float64), function=call_reference)["dinitial_state"]
    assert error(gradient, exact) <= 1e-4 + error(exact.to(state_dtype), exact)


@each_op
@pytest.mark.parametrize("state_dtype", DTYPES[:3], ids=str)
def test_initial_state_of_any_dtype_in_float64(
    case: OpCase, state_dtype: torch.dtype, device: torch.device
) -> None:
    problem = draw(case, device, torch.float64, T=20, state_dtype=state_dtype)
    results = evaluate(problem)
    assert results["final_state"].dtype == torch.float64
    assert results.pop("dinitial_state").dtype == state_dtype
    assert_accurate(problem, results)


def call_in_parts(problem: Problem, *, points: list[int], **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The op on `points` cuts of the sequence, the state carried from each to the next."""
    state = tensors.pop("initial_state", None)
    o = []
    T = tensors[problem.case.first].shape[1]
    for start, end in zip([0, *points], [*points, T], strict=True):
        part = problem.case.at(slice(start, end), tensors, "T")
        output, state = call(problem, **part, initial_state=state)
        o.append(output)
    return torch.cat(o, dim=1), state


@each_op
@pytest.mark.parametrize("points", [[63], [65], [64, 129], [1, 2, 40, 128]], ids=str)
def test_state_carried_across_splits(case: OpCase, points: list[int], device: torch.device) -> None:
    problem = draw(case, device, T=130, gates="rare")

    def parts(problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return call_in_parts(problem, points=points, **tensors)

    assert_accurate(problem, evaluate(problem, function=parts))


@each_op
def test_token_by_token(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=6, gates="rare", state=False)

    def parts(problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return call_in_parts(problem, points=list(range(1, 6)), **tensors)

    assert_accurate(problem, evaluate(problem, function=parts))


@one_op_a_form_of_kernels
def test_long_sequence(case: OpCase, device: torch.device) -> None:
    """Right at every token and in every gradient by the op in float64, and that, on its last rows, by the reference."""
    T, rows = 43884 if device.type == "cuda" else 16391, 64
    K = 16 if case.recurrence == "selective_scan" else 64  # Mamba's own size of a channel's state
    problem = draw(case, device, B=1, T=T, H=1, K=K, V=64, gates="weak")
    truth = evaluate(problem.to(torch.float64))
    actual = evaluate(problem)
    for name, x in actual.items():
        assert x.isfinite().all(), name
        assert error(x, truth[name]) <= (2e-5 if name in ("o", "final_state") else 1e-4), name
    double = problem.to(torch.float64)
    head, last = slice(0, T - rows), slice(T - rows, T)
    sequences = {name: x for name, x in double.tensors.items() if name != "initial_state"}
    _, state = call(double, **case.at(head, sequences, "T"))
    o, state = call_reference(double, **case.at(last, sequences, "T"), initial_state=state)
    assert_close(
        {"o": truth["o"][:, last], "final_state": truth["final_state"]}, {"o": o, "final_state": state}, 1e-10
    )


@each_op
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_shapes(case: OpCase, device: torch.device, data: st.DataObject) -> None:
    # On a GPU every block size is a compilation, so few of them there.
    size = st.integers(1, 40) if device.type == "cpu" else st.sampled_from([5, 16, 20])
    packed = data.draw(st.booleans(), label="packed")
    lengths = (
        data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=6), label="lengths") if packed else None
    )
    tail = 0
    if lengths is not None:
        tail = data.draw(st.integers(0 if any(lengths) else 1, 70), label="tail")
    problem = draw(
        case,
        device,
        B=data.draw(st.integers(1, 3), label="B"),
        T=data.draw(st.integers(1, 150), label="T"),
        H=data.draw(st.integers(1, 3), label="H"),
        K=data.draw(size, label="K"),
        V=data.draw(size, label="V"),
        lengths=lengths,
        tail=tail,
        gates=data.draw(st.sampled_from(["weak", "mixed", "rare", "resets", -5.0]), label="gates"),
        state=data.draw(st.booleans(), label="state"),
        seed=data.draw(st.integers(0, 99), label="seed"),
    )
    loss = data.draw(st.sampled_from(["o", "state", "both"]), label="loss")
    assert_accurate(problem, evaluate(problem, loss), loss)
