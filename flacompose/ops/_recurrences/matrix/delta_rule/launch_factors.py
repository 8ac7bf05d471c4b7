"""Launches that compute the gates of chunks and the WY factors of one call, which state passing takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._launch.operands import operand
from flacompose.ops._recurrences.matrix.delta_rule.launch_state_passing import Factors, scratch
from flacompose.ops._recurrences.matrix.delta_rule.operands import Operands, launch_step
from flacompose.ops._recurrences.matrix.delta_rule.plan import Plan
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay


class Gates(NamedTuple):
    """The gates of chunks, if there are any: `sums` and `rest` of heads, and the others of channels."""

    sums: Tensor | None = None
    rest: Tensor | None = None
    total: Tensor | None = None  # filled with the factors, like the marks
    factorisable: Tensor | None = None  # marks of chunks


def gates(x: Operands, g: Tensor | None) -> Gates:
    """The sums of gates of heads, and memory for those of gates of channels."""
    tokens = x.tokens
    if x.gk is not None:
        marks = tokens.per_chunk(tokens.H, dtype=torch.int8)
        return Gates(total=tokens.per_chunk(tokens.H, tokens.K), factorisable=marks)
    return Gates() if g is None else Gates(*head_decay.sum_gates(tokens, operand(g), None))


def factors(x: Operands, plan: Plan, gates: Gates, with_r: bool = False) -> Factors:
    """The WY factors, `Y` included if the errors `r` of values are to be computed.

    With gates of channels, the factors that read the state are the decayed queries and keys.
    """
    tokens = x.tokens
    HV, K, C = tokens.H, tokens.K, tokens.C
    W = P = Y = None
    if plan.takes_inverses:
        Y = tokens.per_chunk(HV, C, C, dtype=tokens.dtype)
    else:
        W, P = scratch(tokens, K), tokens.per_chunk(HV, C, C, dtype=tokens.dtype)
        Y = tokens.per_chunk(HV, C, C) if with_r else None
    q_read, k_read = x.q, x.k if x.a is None else x.a
    if x.gk is not None:
        q_read, k_read = scratch(tokens, K), scratch(tokens, K)
    log_norm = tokens.per_chunk(HV) if plan.takes_log_norms else None
    of_chunks: dict[str, Any] = {"W": W, "P": P, "Y": Y, "sums": gates.sums, "rest": gates.rest}
    of_chunks |= {"total": gates.total, "log_norm": log_norm}
    vectors = {"q": x.q, "k": x.k, "a": x.a, "beta": x.beta, "gk": x.gk, "H": x.q.shape[2]}
    for step in plan.factors:
        launch_step(
            step,
            (tokens.chunks * HV,),
            tokens,
            **vectors,
            **of_chunks,
            q_read=q_read,
            k_read=k_read,
            mild=gates.factorisable,
            READ_BEFORE=x.read_before,
        )
    beta = x.beta if plan.takes_inverses else None
    passed = tokens, plan.passing, x.v, x.v_token, x.initial, q_read, k_read
    return Factors(*passed, **of_chunks, beta=beta, read_before=x.read_before)
