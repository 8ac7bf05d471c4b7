"""What is refused, and in which words. Nothing is computed when it is."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flacompose.layers import GatedLinearAttention
from flacompose.ops import chunk_mlstm, chunk_simple_gla
from flacompose.ops._arguments import require

from .cases import CALLS_OF_OPERATORS, CASES, OpCase, each_op, every
from .graphs import recorded
from .problems import Problem, call, call_named, draw, named

PUBLIC = [case for case in CASES if not case.name.startswith(("bonus", "steps"))]
FLOATS = "float32, bfloat16, float16 or float64"


class NothingComputed(TorchDispatchMode):
    """Within it no operation of PyTorch runs, those of flacompose among them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran before the arguments were refused")


def refused(problem: Problem, error: type[Exception], message: str, **changes: object) -> None:
    """The public function raises this on the arguments of the problem with these changes."""
    arguments = {"output_final_state": True, "cu_seqlens": problem.cu_seqlens, **named(problem), **changes}
    with NothingComputed(), pytest.raises(error, match=f"^{re.escape(message)}$"):
        call_named(problem.case, **arguments)


def introduced(case: OpCase) -> dict[str, list[str]]:
    """By tensor, in order, the axes that no tensor before it has: their sizes are the tensor's own."""
    seen, axes = {"N"}, {}
    for name, names in {**case.inputs, **case.gates, **case.states}.items():
        axes[name] = [axis for axis in names if axis not in seen]
        seen.update(names)
    return axes


def owner(case: OpCase, axes: str) -> str | None:
    """The tensor that introduces one of these axes, if the op has any of them."""
    return next((x for x, new in introduced(case).items() if {*new} & {*axes.split()}), None)


def each(names: Callable[[OpCase], Iterable[str]], argument: str = "name") -> pytest.MarkDecorator:
    """Parametrize by every public op and each of these of its tensors, its axes or its options."""
    pairs = [(case, name) for case in PUBLIC for name in names(case)]
    ids = [f"{case.name}-{name}" for case, name in pairs]
    return pytest.mark.parametrize(("case", argument), pairs, ids=ids)


def each_axis(*axes: str) -> pytest.MarkDecorator:
    """Parametrize by every public op and those of these that it has."""
    return each(lambda case: [x for x in axes if owner(case, x)], "axes")


each_public_op = every(PUBLIC)
each_public_scaled_op = every([case for case in PUBLIC if case.scaled])
each_tensor = each(introduced)
each_tensor_but_the_first = each(lambda case: list(introduced(case))[1:])


def shape_of(name: str, x: Tensor) -> str:
    """The shape that `x` must have, in the words of an error; a selective scan also takes its B in groups."""
    B, T, *_, S = x.shape if name == "B" else (0, 0, 0)
    return f"{tuple(x.shape)}" + (f" or, in groups, ({B}, {T}, G, {S})" if name == "B" else "")


@each_tensor
def test_rank(case: OpCase, name: str, device: torch.device) -> None:
    """A tensor that introduces an axis is described by its axes, another by the shape it must have."""
    problem = draw(case, device, T=5)
    x = named(problem)[name]
    expected = shape_of(name, x)
    if introduced(case)[name]:
        expected = f"[{', '.join({**case.inputs, **case.gates}[name])}]"
    for wrong in (x[..., 0], x[None]):
        message = f"{name} must have shape {expected}, got {tuple(wrong.shape)}"
        refused(problem, ValueError, message, **{name: wrong})


@each_tensor_but_the_first
def test_every_axis(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    x = named(problem)[name]
    has_hint = x.dim() > 2 and " or" not in shape_of(name, x)
    for dim, axis in enumerate({**case.inputs, **case.gates, **case.states}[name]):
        if axis in introduced(case)[name]:
            continue
        hint = f": {next(iter(case.inputs))} has 5 tokens" if axis == "T" and has_hint else ""
        for wrong in (x.narrow(dim, 0, 1), x.repeat_interleave(2, dim)):
            message = f"{name} must have shape {shape_of(name, x)}, got {tuple(wrong.shape)}{hint}"
            refused(problem, ValueError, message, **{name: wrong})


@every([case for case in PUBLIC if any({"HV", "HQ"} & {*axes} for axes in case.inputs.values())])
def test_heads_in_groups(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    name, keys = ("v", "q") if "HV" in case.inputs["v"] else ("q", "k")
    for heads in (1, 3):
        wrong = problem.tensors[name][:, :, :1].repeat_interleave(heads, 2)
        message = f"{name} must have a multiple of the 2 heads of {keys}, got {heads}"
        refused(problem, ValueError, message, **{name: wrong})


@each_tensor
def test_not_a_float(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    for dtype in (torch.int32, torch.bool, torch.complex64):
        wrong = named(problem)[name].to(dtype)
        message = f"{name} must be {FLOATS}, got {str(dtype).removeprefix('torch.')}"
        refused(problem, TypeError, message, **{name: wrong})


@each_tensor
def test_not_a_tensor(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    refused(problem, TypeError, f"{name} must be a tensor, got float", **{name: 1.0})
    if (name in {**case.inputs, **case.gates} and name not in case.optional) or "[" in name:
        refused(problem, TypeError, f"{name} must be a tensor, got NoneType", **{name: None})


@each(lambda case: [name for name in list(case.inputs)[1:] if name not in case.any_dtype])
def test_mixed_dtypes(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    message = f"{name} must have the dtype of {case.first}, float32, got {{}}: cast one of them, as in "
    message += f"{case.first}.to({name}.dtype)"
    refused(problem, TypeError, message.format("bfloat16"), **{name: problem.tensors[name].bfloat16()})
    with torch.autocast(device.type, torch.bfloat16):
        refused(problem, TypeError, message.format("float64"), **{name: problem.tensors[name].double()})


@each_tensor_but_the_first
def test_another_device(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    message = f"{name} must be on the device of {case.first}, {problem.first.device}, got meta"
    refused(problem, ValueError, message, **{name: named(problem)[name].to("meta")})


@each_axis("B", "T", "H HQ HV D", "K", "V", "M", "S", "W")
def test_empty_dimensions(case: OpCase, axes: str, device: torch.device) -> None:
    problem = draw(case, device, T=5, state=False)
    name = owner(case, axes)
    empty = case.at(slice(0), problem.tensors, *axes.split())
    message = f"{name} must have no empty dimension, got {tuple(empty[name].shape)}"
    refused(problem, ValueError, message, **empty)


@each(lambda case: [x for x in "M" if owner(case, x)] or [x for x in "KVS" if owner(case, x)], "axes")
def test_head_size(case: OpCase, axes: str, device: torch.device) -> None:
    """Where there are slots, their number alone is limited."""
    sizes = {"K": 512, "V": 512, "M": 512, "K" if axes == "S" else axes: 513}
    problem = draw(case, device, B=1, T=1, H=1, state=False, **sizes)
    kind = "state" if axes == "S" else "head"
    refused(problem, ValueError, f"{owner(case, axes)} must have a {kind} size of at most 512, got 513")


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


WRONG_BOUNDS = {
    "lengths": ([2, 3, 0], "begin with 0, got [2, 3, 0]; the bounds of sequences of given lengths are "
                           "F.pad(lengths.cumsum(0), (1, 0))"),
    "negative": ([-1, 2, 5], "begin with 0, got [-1, 2, 5]"),
    "not ascending": ([0, 4, 2], "ascend, got [0, 4, 2], where 2 follows 4 at index 2"),
    "past the tokens": ([0, 3, 6], "end at the number of tokens T = 5 at most, got [0, 3, 6]"),
}  # fmt: skip


@each_public_op
@pytest.mark.parametrize("wrong", WRONG_BOUNDS)
def test_bounds(case: OpCase, wrong: str) -> None:
    """On a CPU the values of `cu_seqlens` are checked, and errors show those that the user gave."""
    bounds, message = WRONG_BOUNDS[wrong]
    problem = draw(case, torch.device("cpu"), lengths=[3, 2])
    with pytest.raises(ValueError, match=f"^cu_seqlens must {re.escape(message)}"):
        call(replace(problem, cu_seqlens=torch.tensor(bounds)))


@each_public_op
def test_a_program_that_is_given_no_tokens(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the operators alone, which say so in the words of the public functions."""
    if case.name.startswith(("causal_conv1d", "chunk_abc")):
        return  # a convolution has a result all the same, and ABC fails in PyTorch
    monkeypatch.setattr(require, "not_empty", lambda *_: None)
    problem = draw(case, torch.device("cpu"))
    none = {name: case.at(slice(0), {name: x}, "T")[name] for name, x in problem.tensors.items()}
    with pytest.raises(ValueError, match=r"^\w+ must have no empty dimension, got \(\d+, 0, "):
        call(problem, **none)


@each_public_op
def test_cu_seqlens_and_a_batch(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    cu_seqlens = torch.tensor([0, 5], device=device)
    message = f"{case.first} must have batch size 1 when cu_seqlens is given, got 2"
    refused(problem, ValueError, message, cu_seqlens=cu_seqlens)


@each(lambda case: case.states)
def test_states_of_packed_sequences(case: OpCase, name: str, device: torch.device) -> None:
    problem = draw(case, device, lengths=[3, 2])
    x = named(problem)[name]
    message = f"{name} must have shape {tuple(x.shape)}, got {tuple(x[:1].shape)}"
    refused(problem, ValueError, message, **{name: x[:1]})


@each_public_scaled_op
def test_scale(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    scale = torch.tensor(1.0, device=device)
    refused(problem, TypeError, "scale must be a number, got Tensor", scale=scale)
    refused(problem, TypeError, "scale must be a number, got str", scale="1")
    refused(problem, TypeError, "scale must be a number, got bool", scale=True)
    for wrong in (math.nan, math.inf, -math.inf, np.float32("nan"), np.float32("inf")):
        refused(problem, ValueError, f"scale must be finite, got {wrong}", scale=wrong)


@every([case for case in CALLS_OF_OPERATORS if case.scaled and case.nodes == 1])
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


def flags(case: OpCase) -> list[str]:
    """The options of the public function that are on or off."""
    parameters = inspect.signature(case.function).parameters.values()
    return [x.name for x in parameters if x.annotation == "bool"]


def shown(case: OpCase, flag: str) -> str:
    """What the public function calls this option."""
    of_the_peer = case.name == "selective_scan_fn" and flag == "output_final_state"
    return "return_last_state" if of_the_peer else flag


@each(flags)
@pytest.mark.parametrize("value", ["False", 1, None], ids=str)
def test_flags(case: OpCase, name: str, value: object, device: torch.device) -> None:
    message = f"{shown(case, name)} must be a bool, got {value!r}"
    refused(draw(case, device, T=5), TypeError, message, **{name: value})


@each(flags)
def test_flags_that_are_tensors(case: OpCase, name: str, device: torch.device) -> None:
    wrong = torch.ones((), dtype=torch.bool, device=device)
    message = f"{shown(case, name)} must be a bool, got Tensor"
    refused(draw(case, device, T=5), TypeError, message, **{name: wrong})


# A misspelt keyword, and those of flash-linear-attention that docs/migration.md lists as absent.
UNKNOWN = [
    "initial_sate", "state_v_first", "cu_seqlens_cpu", "reverse", "head_first", "chunk_size", "checkpoint_level",
    "output_attentions",
]  # fmt: skip


@each_op
def test_unknown_keywords(case: OpCase, device: torch.device) -> None:
    problem = draw(case, device, T=5)
    for keyword in UNKNOWN:
        with recorded() as calls, pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            call(problem, **{keyword: None})
        assert not calls


def test_other_layouts() -> None:
    """Shapes that are right head-first, beside another `q`, in the peer's layout or in a layer's state are told so."""
    (q, k), v, g = torch.randn(2, 2, 9, 3, 4), torch.randn(2, 9, 3, 5), -torch.rand(2, 9, 3)
    first = [x.transpose(1, 2) for x in (q, k, v)]
    state = torch.zeros(2, 3, 4, 5)
    layer = GatedLinearAttention(hidden_size=8, num_heads=2).init_state(2)
    head_first = ": head-first, or q is; all tensors of tokens are [B, T, H, ...]"
    for arguments, error, end in (
        ((*first, g), ValueError, head_first),
        ((q, k, first[2], g), ValueError, head_first),
        ((q[:, :5], k, v, g), ValueError, "must have shape (2, 5, 3, 4), got (2, 9, 3, 4): q has 5 tokens"),
        ((*first, g.mT, None, None, state), ValueError, "is q head-first? It must be [B, T, H, ...]"),
        ((q, k, v, g, None, None, state.mT), ValueError, "states are [N, H, K, V], so give initial_state.mT"),
        ((q, k, v, g, None, None, layer), TypeError, "of the state of a layer, give .recurrent"),
    ):
        with pytest.raises(error, match=f"{re.escape(end)}$"):
            chunk_simple_gla(*arguments)
    with pytest.raises(TypeError, match="of the state of a layer, give .recurrent$"):
        chunk_mlstm(q, k, v, g, g, initial_state=layer)
