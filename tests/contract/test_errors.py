"""What is refused, and in which words. Nothing is computed when it is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from .cases import CASES, OpCase, each_op, each_public_op, every
from .graphs import recorded
from .problems import Problem, call, draw

PUBLIC = [case for case in CASES if case.public]
FLOATS = "float32, bfloat16, float16 or float64"


def refused(problem: Problem, error: type[Exception], message: str, **arguments: object) -> None:
    arguments = {
        **problem.tensors,
        **({"scale": None} if problem.case.scaled else {}),
        "output_final_state": True,
        "cu_seqlens": problem.cu_seqlens,
        **arguments,
    }
    with recorded() as calls, pytest.raises(error, match=f"^{re.escape(message)}$"):
        problem.case.call(**arguments)
    assert not calls


def shaped(case: OpCase, name: str) -> list[object]:
    return [pytest.param(case, name, id=f"{case.name}-{name}")]


each_tensor = pytest.mark.parametrize(
    ("case", "name"), [p for case in PUBLIC for name in case.axes for p in shaped(case, name)]
)
# What the other shapes are compared with.
each_tensor_but_the_first = pytest.mark.parametrize(
    ("case", "name"),
    [p for case in PUBLIC for name in case.axes if name != case.first for p in shaped(case, name)],
)
each_input_but_the_first = pytest.mark.parametrize(
    ("case", "name"), [p for case in PUBLIC for name in list(case.inputs)[1:] for p in shaped(case, name)]
)
each_public_scaled_op = every([case for case in PUBLIC if case.scaled])
each_op_with_heads = every([case for case in PUBLIC if "v" in case.inputs])


@each_tensor_but_the_first
def test_rank(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    x = problem.tensors[name]
    expected = tuple(x.shape)
    for wrong in (x[..., 0], x[None]):
        message = f"{name} must have shape {expected}, got {tuple(wrong.shape)}"
        if name == "v":  # its last size is its own
            message = f"v must have shape [{', '.join(case.axes['v'])}], got {tuple(wrong.shape)}"
        refused(problem, ValueError, message, **{name: wrong})


@each_public_op
def test_rank_of_the_first(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    name, wrong = case.first, problem.first[..., 0]
    message = f"{name} must have shape [{', '.join(case.axes[name])}], got {tuple(wrong.shape)}"
    refused(problem, ValueError, message, **{name: wrong})


@each_tensor_but_the_first
def test_every_axis(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    axes = case.axes[name]
    expected = tuple(problem.tensors[name].shape)
    for dim, axis in enumerate(axes):
        if name == "v" and axis in ("HV", "V"):
            continue
        for wrong in (
            problem.tensors[name].narrow(dim, 0, 1),
            problem.tensors[name].repeat_interleave(2, dim),
        ):
            refused(
                problem,
                ValueError,
                f"{name} must have shape {expected}, got {tuple(wrong.shape)}",
                **{name: wrong},
            )


@every([case for case in PUBLIC if "HV" in case.inputs[case.output]])
def test_heads_of_v(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    for heads in (1, 3):
        wrong = problem.tensors["v"][:, :, :1].repeat_interleave(heads, 2)
        refused(problem, ValueError, f"v must have a multiple of the 2 heads of q, got {heads}", v=wrong)


@each_tensor
def test_not_a_float(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    for dtype in (torch.int32, torch.bool, torch.complex64):
        wrong = problem.tensors[name].to(dtype)
        message = f"{name} must be {FLOATS}, got {str(dtype).removeprefix('torch.')}"
        refused(problem, TypeError, message, **{name: wrong})


@each_tensor
def test_not_a_tensor(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    refused(problem, TypeError, f"{name} must be a tensor, got float", **{name: 1.0})


@each_input_but_the_first
def test_mixed_dtypes(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    wrong = problem.tensors[name].bfloat16()
    refused(problem, TypeError, f"{name} must have the dtype of q, float32, got bfloat16", **{name: wrong})


@each_op_with_heads
def test_mixed_with_float64_under_autocast(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    wrong = problem.tensors["v"].double()
    with torch.autocast(device.type, torch.bfloat16):
        refused(problem, TypeError, "v must have the dtype of q, float32, got float64", v=wrong)


@each_tensor_but_the_first
def test_another_device(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    here = problem.first.device
    wrong = problem.tensors[name].to("meta")
    message = f"{name} must be on the device of {case.first}, {here}, got meta"
    refused(problem, ValueError, message, **{name: wrong})


@each_public_op
@pytest.mark.parametrize("axes", [("B",), ("T",), ("H", "HV", "D"), ("K", "D"), ("V", "D")], ids="-".join)
def test_empty_dimensions(case: OpCase, axes: tuple[str, ...], device: torch.device) -> None:
    problem = draw(case, device, T=5, state=False)
    empty = case.at(slice(0), problem.tensors, *axes)
    name = case.output if "V" in axes else case.first
    message = f"{name} must have no empty dimension, got {tuple(empty[name].shape)}"
    refused(problem, ValueError, message, **empty)


@each_op_with_heads
def test_head_size(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, B=1, T=1, H=1, K=257, V=256)
    refused(problem, ValueError, "q must have a head size of at most 256, got 257")
    problem = draw(case, device, B=1, T=1, H=1, K=256, V=257)
    refused(problem, ValueError, "v must have a head size of at most 256, got 257")


Wrong = Callable[[Tensor], object]
CU_SEQLENS: list[tuple[str, Wrong, type[Exception], str]] = [
    ("list", Tensor.tolist, TypeError, "cu_seqlens must be a tensor, got list"),
    ("int16", Tensor.short, TypeError, "cu_seqlens must be int32 or int64, got int16"),
    ("float", Tensor.float, TypeError, "cu_seqlens must be int32 or int64, got float32"),
    ("rank", lambda cu: cu[None], ValueError, "cu_seqlens must have shape [N + 1] with N >= 1, got (1, 3)"),
    ("short", lambda cu: cu[:1], ValueError, "cu_seqlens must have shape [N + 1] with N >= 1, got (1,)"),
    (
        "meta",
        lambda cu: cu.to("meta"),
        ValueError,
        "cu_seqlens must be on the device of {first}, {device}, got meta",
    ),
]


@each_public_op
@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"), CU_SEQLENS, ids=[row[0] for row in CU_SEQLENS]
)
def test_cu_seqlens(
    case: OpCase, name: str, wrong: Wrong, error: type[Exception], message: str, device: torch.device
) -> None:
    problem = draw(case, device, lengths=[3, 2])
    message = message.format(first=case.first, device=problem.first.device)
    refused(problem, error, message, cu_seqlens=wrong(problem.cu_seqlens))


@each_public_op
def test_cu_seqlens_and_a_batch(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    cu_seqlens = torch.tensor([0, 5], device=device)
    message = f"{case.first} must have batch size 1 when cu_seqlens is given, got 2"
    refused(problem, ValueError, message, cu_seqlens=cu_seqlens)


@each_public_op
def test_states_of_packed_sequences(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, lengths=[3, 2])
    state = problem.tensors["initial_state"]
    refused(
        problem,
        ValueError,
        f"initial_state must have shape {tuple(state.shape)}, got {tuple(state[:1].shape)}",
        initial_state=state[:1],
    )


@each_public_scaled_op
def test_scale(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    scale = torch.tensor(1.0, device=device)
    refused(problem, TypeError, "scale must be a number, got Tensor", scale=scale)
    refused(problem, TypeError, "scale must be a number, got str", scale="1")
    refused(problem, TypeError, "scale must be a number, got bool", scale=True)
    for wrong in (math.nan, math.inf, -math.inf, np.float32("nan"), np.float32("inf")):
        refused(problem, ValueError, f"scale must be finite, got {wrong}", scale=wrong)


@each_public_scaled_op
def test_scale_under_the_compiler(case: OpCase, device: torch.device) -> None:
    """Traced with a scale that is a symbol: there it is not known to be finite, and asking breaks no graph."""
    problem = draw(case, device, T=5)

    def scaled(scale: float) -> Tensor:
        return case.call(
            **problem.tensors, scale=scale, output_final_state=True, cu_seqlens=problem.cu_seqlens
        )[0]

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend="eager")
    for scale in (0.5, -0.7):
        assert torch.equal(compiled(scale), scaled(scale))


@each_op
@pytest.mark.parametrize("keyword", ["head_first", "state_v_first", "chunk_size", "initial_sate"])
def test_unknown_keywords(case: OpCase, keyword: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    with recorded() as calls, pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        call(problem, **{keyword: None})
    assert not calls
