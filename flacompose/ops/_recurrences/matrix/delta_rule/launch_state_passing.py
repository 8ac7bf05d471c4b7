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
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.operands import tile_count
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._recurrences.matrix.delta_rule.operands import Step, launch_step
from flacompose.ops._recurrences.matrix.delta_rule.plan import Passing

FACTORS = "q", "k", "W", "b", "P", "Y", "sums", "rest", "total"


@dataclass
class Factors:
    """The operands of state passing, which `kernels` explains, in both directions."""

    tokens: MatrixSequences
    plan: Passing
    v: Tensor
    v_token: int
    initial: Tensor | None
    q: Tensor  # the query and key factors that read the state, `[tokens, HK, K]`
    k: Tensor
    W: Tensor | None = None  # the keys that write values
    b: Tensor | None = None  # in the low-rank recurrence, the keys that write the reads of `k`
    P: Tensor | None = None  # products of tokens in a chunk, like `Y`
    Y: Tensor | None = None  # None also frees its memory after the forward pass that takes it
    sums: Tensor | None = None  # of gates of heads
    rest: Tensor | None = None
    total: Tensor | None = None  # of gates of channels
    log_norm: Tensor | None = None  # a bound for each chunk, if the recurrence has one
    beta: Tensor | None = None  # if `Y` are the inverses that stand for W and P
    read_before: bool = False  # whether `k` reads a state before the gate of a head decays it
    transitions: Tensor | None = None  # filled by the first pass that needs them


def scratch(tokens: MatrixSequences, D: int) -> Tensor:
    """Memory for vectors that are factors of products, ``[B, T, HV, D]``."""
    return torch.empty(*tokens.tokens, tokens.H, D, dtype=tokens.dtype, device=tokens.device)


def forwards(x: Factors, **outputs: Tensor | None) -> None:
    """Pass states forwards in time: fill `o`, `r`, `states` and `final`, if given."""
    _forwards(x, x.v, {"initial": _starts(x), **outputs})


def backwards(x: Factors, do: Tensor, d_final: Tensor | None, **outputs: Tensor | None) -> None:
    """Pass gradients backwards in time: fill `dv`, `du`, `d_states` and `d_initial`, if given."""
    _backwards(x, do, d_final=starts_of_gradients(x, do, d_final), **outputs)


def both_directions(x: Factors, do: Tensor, d_final: Tensor | None, **outputs: Tensor | None) -> None:
    """`forwards`, for `r` and `states`, and `backwards` in one launch."""
    starts = {"initial": _starts(x), "d_final": starts_of_gradients(x, do, d_final)}
    outputs = {**dict.fromkeys(("dv", "du", "d_states", "d_initial")), **outputs}
    step = x.plan.both_directions
    (programs,) = _grid(x, step, x.tokens.V)
    factors = {name: getattr(x, name) for name in FACTORS}
    arguments = {"v": x.v, "v_token": x.v_token, "do": do, **starts, **outputs, **factors, **_sizes(x)}
    launch_step(step, (programs, 2), x.tokens, **arguments)


def transition(x: Factors) -> tuple[Tensor, Tensor]:
    """The transition of each sequence: ``(end [N, HV, K, V], matrix [N, HV, K, K])``, `end` from zero."""
    tokens = x.tokens
    end, matrix = tokens.state(torch.float32), tokens.per_sequence(tokens.H, tokens.K, tokens.K)
    forwards(x, final=end)
    eye = torch.eye(tokens.K, dtype=torch.float32, device=tokens.device).repeat(tokens.N, tokens.H, 1, 1)
    initial = _joined(x, None, eye) if x.plan.is_split else eye
    _forwards(x, None, {"initial": initial, "final": matrix})
    return end, matrix


def place_of_dv(x: Factors, alone: bool) -> Tensor:
    """Memory for the gradients of values: that of W if possible, and if `backwards` is launched `alone`."""
    if alone and x.plan.overwrites_W:
        assert x.W is not None
        return x.W
    return x.tokens.per_token(x.tokens.H, x.tokens.V, dtype=x.tokens.dtype)


def starts_of_gradients(x: Factors, do: Tensor, d_final: Tensor | None) -> Tensor | None:
    """The gradients of the states after segments, at which state passing backwards in time starts."""
    tokens, plan = x.tokens, x.plan
    if plan.has_warm_starts:
        gradients = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
        _fill(gradients[plan.segments], d_final)
        _backwards(x, do, ends=gradients)
        return gradients[1:]
    if not plan.is_split:
        return d_final
    ends = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
    _backwards(x, do, ends=ends)
    return _joined(x, ends, d_final, reverse=True)


def _starts(x: Factors) -> Tensor | None:
    """The states before segments, at which state passing forwards in time starts."""
    tokens, plan = x.tokens, x.plan
    if plan.has_warm_starts:
        states = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
        _fill(states[0], x.initial)
        _forwards(x, x.v, {"ends": states[1:]})
        return states
    if not plan.is_split:
        return x.initial
    ends = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.V)
    _forwards(x, x.v, {"ends": ends})
    return _joined(x, ends, x.initial)


def _fill(state: Tensor, given: Tensor | None) -> None:
    """Write the `given` state, zero if there is none."""
    if given is None:
        state.zero_()
    else:
        state.copy_(given)


def _forwards(
    x: Factors, v: Tensor | None, tensors: dict[str, Tensor | None], IDENTITY: bool = False
) -> None:
    """Pass states with the values `v`. Without them a state has `K` values, and starts as told or at the identity."""
    tensors = {**dict.fromkeys(("initial", "o", "r", "states", "ends", "final")), **tensors}
    step, V = (x.plan.of_keys, x.tokens.K) if v is None else (x.plan.forwards, x.tokens.V)
    factors = {name: getattr(x, name) for name in FACTORS}
    if x.beta is None:  # each is needed for one output only
        factors["P"] = None if tensors["o"] is None else x.P
        factors["Y"] = None if tensors["r"] is None else x.Y
    arguments = {"v": v, "v_token": x.v_token, "beta": x.beta, "V": V, "IDENTITY": IDENTITY, **tensors}
    sizes = _sizes(x, tensors["ends"])
    launch_step(step, _grid(x, step, V), x.tokens, **arguments, **factors, **sizes)


def _backwards(x: Factors, do: Tensor, **tensors: Tensor | None) -> None:
    tensors = {**dict.fromkeys(("d_final", "dv", "du", "d_states", "ends", "d_initial")), **tensors}
    step, factors = x.plan.backwards, {name: getattr(x, name) for name in FACTORS}
    sizes = _sizes(x, tensors["ends"])
    launch_step(step, _grid(x, step, x.tokens.V), x.tokens, do=do, **tensors, **factors, **sizes)


def _joined(x: Factors, ends: Tensor | None, initial: Tensor | None, reverse: bool = False) -> Tensor:
    """The state before each segment or, with `reverse`, the gradient of the state after it.

    Without `ends`, the states reached from zero are zero, and `initial` has `K` values.
    """
    tokens, plan = x.tokens, x.plan
    if x.transitions is None:  # backwards in time the transposed matrices apply
        x.transitions = tokens.per_segment(plan.segments, tokens.H, tokens.K, tokens.K)
        _forwards(x, None, {"ends": x.transitions}, IDENTITY=True)
    V = tokens.K if ends is None else tokens.V
    starts = tokens.per_segment(plan.segments, tokens.H, tokens.K, V)
    tensors = {"transitions": x.transitions, "ends": ends, "initial": initial, "starts": starts}
    grid = (tile_count(V, plan.join.config["BV"]) * tokens.H * tokens.N,)
    launch_step(plan.join, grid, tokens, **tensors, SEGMENTS=plan.segments, V=V, REVERSE=reverse)
    return starts


def _grid(x: Factors, step: Step, V: int) -> tuple[int]:
    """A program for each segment and, unless a program has all of them, tile of `V` values."""
    return (tile_count(V, step.config.get("BV", V)) * x.plan.segments * x.tokens.N * x.tokens.H,)


def _sizes(x: Factors, ends: Tensor | None = None) -> dict[str, Any]:
    """The arguments that both directions share. Passes for `ends` use the log-norm bound."""
    return {
        "HK": x.q.shape[-2],
        "SEGMENTS": x.plan.segments,
        "log_norm": x.log_norm if x.plan.has_warm_starts or ends is not None else None,
        "WARM_STARTS": x.plan.has_warm_starts,
        "READ_BEFORE": x.read_before,
    }
