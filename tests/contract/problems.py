"""Drawing the inputs of an op, and evaluating it, or its reference, with all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .opcase import OpCase

GATES = [0.0, -1e-6, -0.1, -5.0, -15.0, -30.0, -1e4, float("-inf")]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """One call of an op: float inputs by name, and the gradients that arrive on ``o`` and the final state."""

    case: OpCase
    tensors: dict[str, Tensor]
    do: Tensor
    d_final_state: Tensor
    start: Tensor  # the state of a sequence without tokens
    cu_seqlens: Tensor | None = None
    scale: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def first(self) -> Tensor:
        return self.tensors[self.case.first]

    def with_tensors(self, **tensors: Tensor) -> Problem:
        return replace(self, tensors={**self.tensors, **tensors})

    def with_gates(self, value: float) -> Problem:
        gates = {name: self.tensors[name] for name in self.case.gates}
        drawn = {
            name: _drawn(self.case, name, torch.full_like(x, value, dtype=torch.float64)).to(x)
            for name, x in gates.items()
        }
        return self.with_tensors(**drawn)

    def to(self, dtype: torch.dtype) -> Problem:
        tensors = {name: x.to(dtype) for name, x in self.tensors.items()}
        return replace(
            self, tensors=tensors, do=self.do.to(dtype), d_final_state=self.d_final_state.to(dtype)
        )


def draw(
    case: OpCase,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    B: int = 2,
    T: int = 70,
    H: int = 2,
    K: int = 16,
    V: int = 32,
    M: int = 12,
    W: int = 4,
    lengths: Sequence[int] | None = None,
    tail: int = 0,
    cu_dtype: torch.dtype = torch.int32,
    gates: str | float = "weak",
    gate_dtype: torch.dtype | None = None,
    state: bool = True,
    state_dtype: torch.dtype | None = None,
    scale: float | None = None,
    seed: int = 0,
) -> Problem:
    """The same numbers on every device. `lengths` packs sequences of those lengths, and `tail` tokens after them."""
    cu_seqlens = None
    N = B
    if lengths is not None:
        B, N, T = 1, len(lengths), sum(lengths) + tail
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=cu_dtype, device=device)
    many = case.groups * H
    size = {"B": B, "T": T, "H": H, "HV": many, "HQ": many, "K": K, "V": V, "M": M, "W": W, "N": N}
    size |= {"D": V, "S": K}  # channels without heads, and the state of each
    size |= {"R": 2, "A": 2}  # steps of a token, and the angles of its keys
    if len(case.states) > 1:
        size["joined"] = sum(prod(size[axis] for axis in axes[2:]) for axes in case.states.values())
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(seed)

    def normal(axes: Sequence[str], dtype: torch.dtype, name: str = "") -> Tensor:
        x = torch.randn([size[axis] for axis in axes], generator=generator, dtype=torch.float64)
        return _drawn(case, name, x).to(device, dtype)

    tensors = {name: normal(axes, dtype, name) for name, axes in case.inputs.items()}
    for name, axes in case.gates.items():
        tensors[name] = _drawn(case, name, gate(axes, size, gates, generator)).to(device, gate_dtype or dtype)
    if state:
        tensors["initial_state"] = normal(case.state, state_dtype or accumulator, "initial_state")
    do = normal(case.output_axes, dtype)
    d_final_state = normal(case.state, accumulator)
    start = [
        torch.full([1, *(size[axis] for axis in axes[1:])], case.empty.get(name, 0.0)).to(d_final_state)
        for name, axes in case.states.items()
    ]
    start = case.join(tuple(start)) if len(start) > 1 else start[0]
    return Problem(case, tensors, do, d_final_state, start, cu_seqlens, scale)


def _drawn(case: OpCase, name: str, x: Tensor) -> Tensor:
    return case.draws.get(name, lambda x: x)(x)


def gate(axes: Sequence[str], size: dict[str, int], kind: str | float, generator: torch.Generator) -> Tensor:
    """Log decays: one `kind` of value throughout, all GATES "mixed", "rare" strong ones, "resets" of whole tokens.

    "strong" ones are from -5 to 0, as models with a lower bound of -5 have them. They are weak in the first channels,
    in which a state outlives a chunk.
    """
    shape = [size[axis] for axis in axes]
    if not isinstance(kind, str):
        return torch.full(shape, kind, dtype=torch.float64)
    weak = F.logsigmoid(2 + torch.randn(shape, generator=generator, dtype=torch.float64)) / 2
    if kind == "weak":
        return weak
    if kind == "strong":
        strength = torch.linspace(0, 5, shape[-1], dtype=torch.float64)
        return -strength * torch.rand(shape, generator=generator, dtype=torch.float64)
    drawn = torch.tensor(GATES, dtype=torch.float64)[torch.randint(len(GATES), shape, generator=generator)]
    if kind == "mixed":
        return drawn
    if kind == "rare":
        return torch.where(torch.rand(shape, generator=generator) < 0.05, drawn, weak)
    assert kind == "resets"
    token = torch.rand([size[a] if a in ("B", "T") else 1 for a in axes], generator=generator) < 0.1
    return weak.masked_fill(token, float("-inf")) if "T" in axes else weak


def permuted(x: Tensor) -> Tensor:
    """Dense, its dimensions in memory the other way round: every stride is another."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def tokens_last(x: Tensor) -> Tensor:
    """``[B, T, ...]`` as a convolution of images leaves it; what has no tokens is in some other order, too."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x


def side_by_side(x: Tensor) -> Tensor:
    """``[B, T, ...]`` as a part of a wider projection, whose tokens are further apart."""
    if x.dim() < 3:
        return permuted(x)
    wide = torch.full((*x.shape[:2], 3, *x.shape[2:]), torch.nan, dtype=x.dtype, device=x.device)
    return wide[:, :, 1].copy_(x)


def call(problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The op on the problem's inputs, or on others of those names."""
    scale = {"scale": problem.scale} if problem.case.scaled else {}
    o, state = problem.case.call(
        **{**problem.tensors, **tensors}, **scale, output_final_state=True, cu_seqlens=problem.cu_seqlens
    )
    assert state is not None
    return o, state


def named(problem: Problem) -> dict[str, Tensor]:
    """The tensors of the public function, each part of a state by the name that errors have for it."""
    tensors = dict(problem.tensors)
    if "initial_state" in tensors:
        state = problem.case.split(tensors.pop("initial_state"), problem.tensors)
        tensors |= zip(problem.case.states, (state,) if isinstance(state, Tensor) else state, strict=True)
    return tensors


def call_named(case: OpCase, form: Callable | None = None, **arguments: object) -> tuple[Tensor, object]:
    """The public function, or another of its arguments, on tensors as `named` has them."""
    states = [arguments.pop(name) for name in case.states if name in arguments]
    if states:
        arguments["initial_state"] = states[0] if len(states) == 1 else tuple(states)
    return (form or case.function)(**arguments)


def call_reference(
    problem: Problem, *, uncancelled: bool = False, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """The specification: token by token, packed sequences one after the other, zeros after the last."""
    tensors = {**problem.tensors, **tensors}
    first = tensors[problem.case.first]
    scale = {}
    if problem.case.scaled:
        scale["scale"] = first.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    initial = tensors.pop("initial_state", None)
    reference = partial(problem.case.reference_with_one_state, uncancelled=uncancelled, **scale)
    if problem.cu_seqlens is None:
        return reference(**tensors, initial_state=initial)
    cu = problem.cu_seqlens.tolist()
    o, states = [], []
    for n, (start, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        state = problem.start.to(first.dtype) if initial is None else initial[n : n + 1]
        if start < end:
            sequence = problem.case.at(slice(start, end), tensors, "T")
            output, state = reference(**sequence, initial_state=state)
            o.append(output)
        states.append(state)
    o.append(torch.zeros_like(problem.do[:, cu[-1] :], dtype=first.dtype))
    return torch.cat(o, dim=1), torch.cat(states)


Call = Callable[..., tuple[Tensor, Tensor]]


def evaluate(problem: Problem, loss: str = "both", function: Call = call) -> Results:
    """``o``, ``final_state`` and the gradient of every float input, for a loss on "o", on the "state", or on "both"."""
    leaves = {name: x.detach().requires_grad_() for name, x in problem.tensors.items()}
    o, state = function(problem, **leaves)
    arriving = {"o": (o, problem.do), "state": (state, problem.d_final_state)}
    chosen = [(y, dy) for name, (y, dy) in arriving.items() if loss in (name, "both") and y.requires_grad]
    ys, dys = [y for y, _ in chosen], [dy for _, dy in chosen]
    grads = (
        torch.autograd.grad(ys, list(leaves.values()), dys, allow_unused=True) if ys else [None] * len(leaves)
    )
    results = {"o": o.detach(), "final_state": state.detach()}
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        results[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
    return results
