"""The states after each of the last tokens, of the entries that give them, and the same from shorter calls."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flacompose.ops import causal_conv1d

from .cases import CASES, OpCase, every
from .problems import Problem, call, draw

# Every entry by the function for decoding, and the convolution, which has one form.
WITH_STATES = [
    replace(case, function=case.function if case.form == "recurrent" else case.other, form="recurrent")
    for case in CASES
    if not case.name.startswith("bonus") and (case.form == "recurrent" or case.other is not None)
] + [case for case in CASES if case.function is causal_conv1d]
each = every(WITH_STATES)
# One of each registered op, and those in which several of its tokens are one, or that have a state beside it.
FEW = [
    next(case for case in WITH_STATES if name in case.name)
    for name in ("fused_recurrent_gla-gk-gv", "rwkv6", "fused_recurrent_simple_gla-g-g_gamma", "hgrn")
    + ("chunk_kda", "gated_delta_product", "gsa-grouped", "abc", "normalize", "causal_conv1d")
]
few = every(FEW)
# Of those that a graph tells apart, in which the schemes of one operator are one: that of a scan, that of a matrix, of
# several of its tokens, of two calls with a state beside them or more between, and PyTorch's own.
COMPILED = [
    case
    for case in FEW
    if any(name in case.name for name in ("hgrn", "kda", "product", "abc", "normalize", "causal_conv1d"))
]
few_compiled = every(COMPILED)


def with_states(problem: Problem, *, n: int, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The op, and its `n` states, those of a tuple joined: ``[N, n, ...]``."""
    given = {**problem.tensors, **tensors}
    return states_of(problem.case, given, n, {"scale": problem.scale} if problem.case.scaled else {})


def states_of(case: OpCase, tensors: dict[str, Tensor], n: int, options: dict) -> tuple[Tensor, Tensor]:
    inputs = dict(tensors)
    initial = inputs.pop("initial_state", None)
    given = None if initial is None else case.split(initial, inputs)
    o, states = case.function(**inputs, **options, initial_state=given, output_states=n)
    if isinstance(states, Tensor):
        return o, states
    return o, torch.stack([case.join(tuple(x[:, i] for x in states)) for i in range(n)], 1)


def until(problem: Problem, T: int, **tensors: Tensor) -> Tensor:
    """The state of a call that ends after `T` tokens."""
    tensors = {**problem.tensors, **tensors}
    state = {name: x for name, x in tensors.items() if name == "initial_state"}
    part = problem.case.at(slice(0, T), {x: y for x, y in tensors.items() if x not in state}, "T")
    return call(replace(problem, tensors={**part, **state}))[1]


def by_calls(problem: Problem, *, n: int, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """What `with_states` gives, from calls that know no states but their last."""
    T = problem.first.shape[1]
    states = [until(problem, t, **tensors) for t in range(T - n + 1, T + 1)]
    return call(problem, **tensors)[0], torch.stack(states, 1)


def drawn(
    case: OpCase, device: torch.device, n: int, dtype: torch.dtype = torch.float32, **options
) -> Problem:
    """A problem whose gradients arrive on `n` states."""
    problem = draw(case, device, dtype, **options)
    d_states = torch.stack(
        [draw(case, device, dtype, **{**options, "seed": 9 + i}).d_final_state for i in range(n)], 1
    )
    return replace(problem, d_final_state=d_states)
