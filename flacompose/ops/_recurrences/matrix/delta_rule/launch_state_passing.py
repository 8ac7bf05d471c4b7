"""Launches of state passing for the recurrences that erase, with long rows cut into segments.

The transition of a segment is an affine map of the state: `ends` are the states that segments reach from
zero, and `transitions` the matrices by which they multiply any other state. Joined, they give the state
before each segment. From these, all segments are processed at the same time, forwards or backwards in time.

To compute the transitions takes two more passes, which pay off only for rows of many segments. Shorter rows
are cut only where the state decays to zero in all heads. A segment then has a warm start: it begins at the
state that the last chunks before it reach from zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._recurrences.matrix.delta_rule.arguments import (
    ChunkDecays,
    PassedGradients,
    PassedStates,
    WYFactors,
)
from flacompose.ops._recurrences.matrix.delta_rule.operands import Step, launch_steps
from flacompose.ops._recurrences.matrix.delta_rule.plan import Passing


@dataclass
class PassOperands:
    """The operands of state passing, which `kernels` explains, in both directions."""

    tokens: MatrixSequences
    plan: Passing
    v: Tensor
    v_token: int
    initial: Tensor | None
    factors: WYFactors
    decays: ChunkDecays
    beta: Tensor | None = None  # if Y are the inverses that stand for W and P
    read_before: bool = False  # whether `k_read` reads a state before the gate of a head decays it
    transitions: Tensor | None = None  # filled by the first pass that needs them


def scratch(tokens: MatrixSequences, D: int) -> Tensor:
    """Memory for vectors that are factors of products, ``[B, T, HV, D]``."""
    return torch.empty(*tokens.tokens, tokens.H, D, dtype=tokens.dtype, device=tokens.device)


def forwards(
    x: PassOperands,
    o: Tensor | None = None,
    r: Tensor | None = None,
    states: Tensor | None = None,
    final: Tensor | None = None,
) -> None:
    """Pass states forwards in time: fill `o`, `r`, `states` and `final`, if given."""
    _forwards(x, x.v, PassedStates(_starts(x), states, None, final), o, r)


def backwards(
    x: PassOperands,
    do: Tensor,
    d_final: Tensor | None,
    dv: Tensor | None,
    du: Tensor | None = None,
    d_states: Tensor | None = None,
    d_initial: Tensor | None = None,
) -> None:
    """Pass gradients backwards in time: fill `dv`, `du`, `d_states` and `d_initial`, if given."""
    passed = PassedGradients(starts_of_gradients(x, do, d_final), d_states, None, d_initial)
    _backwards(x, do, passed, dv, du)


def both_directions(
    x: PassOperands,
    do: Tensor,
    d_final: Tensor | None,
    dv: Tensor | None,
    du: Tensor | None = None,
    d_states: Tensor | None = None,
    d_initial: Tensor | None = None,
    *,
    r: Tensor,
    states: Tensor,
) -> None:
    """`forwards`, for `r` and `states`, and `backwards` in one launch."""
    passed = PassedStates(_starts(x), states)
    d_passed = PassedGradients(starts_of_gradients(x, do, d_final), d_states, None, d_initial)
    vectors = {"v": x.v, "v_token": x.v_token, "do": do, "r": r, "dv": dv, "du": du}
    order = {"d_passed": d_passed, "READ_BEFORE": x.read_before}
    _launch(x, x.plan.both_directions, passed, x.factors, **vectors, **order)


def transition(x: PassOperands) -> tuple[Tensor, Tensor]:
    """The transition of each sequence: ``(end [N, HV, K, V], matrix [N, HV, K, K])``, `end` from zero."""
    tokens = x.tokens
    end, matrix = tokens.state(torch.float32), tokens.per_sequence(tokens.H, tokens.K, tokens.K)
    forwards(x, final=end)
    eye = torch.eye(tokens.K, dtype=torch.float32, device=tokens.device).repeat(tokens.N, tokens.H, 1, 1)
    initial = _joined(x, None, eye) if x.plan.is_split else eye
    _forwards(x, None, PassedStates(initial, final=matrix))
    return end, matrix


def place_of_dv(x: PassOperands, alone: bool) -> Tensor:
    """Memory for the gradients of values: W, if it is free and `backwards` is launched `alone`."""
    if alone and x.plan.overwrites_W:
        return cast(Tensor, x.factors.W)
    return x.tokens.per_token(x.tokens.H, x.tokens.V, dtype=x.tokens.dtype)


def starts_of_gradients(x: PassOperands, do: Tensor, d_final: Tensor | None) -> Tensor | None:
    """The gradients of the states after segments, at which state passing backwards in time starts."""
    tokens, plan = x.tokens, x.plan
    if plan.has_warm_starts:
        gradients = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
        _fill(gradients[plan.segments], d_final)
        _backwards(x, do, PassedGradients(ends=gradients))
        return gradients[1:]
    if not plan.is_split:
        return d_final
    ends = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
    _backwards(x, do, PassedGradients(ends=ends))
    return _joined(x, ends, d_final, reverse=True)


def _starts(x: PassOperands) -> Tensor | None:
    """The states before segments, at which state passing forwards in time starts."""
    tokens, plan = x.tokens, x.plan
    if plan.has_warm_starts:
        states = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
        _fill(states[0], x.initial)
        _forwards(x, x.v, PassedStates(ends=states[1:]))
        return states
    if not plan.is_split:
        return x.initial
    ends = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
    _forwards(x, x.v, PassedStates(ends=ends))
    return _joined(x, ends, x.initial)


def _fill(state: Tensor, given: Tensor | None) -> None:
    """Write the `given` state, zero if there is none."""
    if given is None:
        state.zero_()
    else:
        state.copy_(given)


def _forwards(
    x: PassOperands,
    v: Tensor | None,
    passed: PassedStates,
    o: Tensor | None = None,
    r: Tensor | None = None,
    IDENTITY: bool = False,
) -> None:
    """Pass states with the values `v`. Without them a state has `K` values, and starts as told or at the identity."""
    step, V = (x.plan.of_keys, x.tokens.K) if v is None else (x.plan.forwards, x.tokens.V)
    factors, more = x.factors, {"v": v, "v_token": x.v_token, "o": o, "V": V, "IDENTITY": IDENTITY}
    if x.beta is not None:
        more["beta"] = x.beta
    else:  # P and Y are needed for one output each
        factors = factors._replace(P=None if o is None else factors.P, Y=None if r is None else factors.Y)
        more |= {"r": r, "READ_BEFORE": x.read_before}
    _launch(x, step, passed, factors, **more)


def _backwards(
    x: PassOperands, do: Tensor, passed: PassedGradients, dv: Tensor | None = None, du: Tensor | None = None
) -> None:
    factors = x.factors._replace(Y=None)
    more = {"do": do, "dv": dv, "du": du, "READ_BEFORE": x.read_before}
    _launch(x, x.plan.backwards, passed, factors, **more)


def _launch(
    x: PassOperands, step: Step, passed: PassedStates | PassedGradients, factors: WYFactors, **more: Any
) -> None:
    """Launch a pass. Passes for `ends` use the log-norm bound, and with warm starts all do."""
    plan, decays = x.plan, x.decays
    if not plan.has_warm_starts and passed.ends is None:
        decays = decays._replace(log_norm=None)
    sizes = {"HK": factors.q_read.shape[-2], "SEGMENTS": plan.segments, "WARM_STARTS": plan.has_warm_starts}
    segments = plan.segments * x.tokens.N * x.tokens.H
    launch_steps((step,), segments, x.tokens, factors=factors, decays=decays, passed=passed, **sizes, **more)


def _joined(x: PassOperands, ends: Tensor | None, initial: Tensor | None, reverse: bool = False) -> Tensor:
    """The state before each segment or, with `reverse`, the gradient of the state after it.

    Without `ends`, the states reached from zero are zero, and `initial` has `K` values.
    """
    tokens, plan = x.tokens, x.plan
    if x.transitions is None:  # backwards in time the transposed matrices apply
        x.transitions = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.K)
        _forwards(x, None, PassedStates(ends=x.transitions), IDENTITY=True)
    step, V = (plan.join_of_keys, tokens.K) if ends is None else (plan.join, tokens.V)
    starts = tokens.per_segment(plan.segments, tokens.H, tokens.K, V)
    tensors = {"transitions": x.transitions, "ends": ends, "initial": initial, "starts": starts}
    sizes = {"SEGMENTS": plan.segments, "V": V, "REVERSE": reverse}
    launch_steps((step,), tokens.N * tokens.H, tokens, **tensors, **sizes)
    return starts
