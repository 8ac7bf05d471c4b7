"""Launches that compute the gates of chunks and the WY factors of one call, which state passing takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._launch.operands import operand
from flacompose.ops._recurrences.matrix.delta_rule.arguments import (
    ChunkDecays,
    GateSums,
    KeyVectors,
    WYFactors,
)
from flacompose.ops._recurrences.matrix.delta_rule.launch_state_passing import PassOperands, scratch
from flacompose.ops._recurrences.matrix.delta_rule.operands import CallOperands, launch_steps
from flacompose.ops._recurrences.matrix.delta_rule.plan import Plan
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay


class CallGates(NamedTuple):
    """The sums of gates of heads, or empty memory that the kernels of factors fill for gates of channels."""

    sums: GateSums = GateSums()  # of gates of heads
    chunk_decay: Tensor | None = None  # the decay of each chunk by gates of channels
    factorisable_chunks: Tensor | None = None  # by gates of channels


def compute_gates(x: CallOperands, g: Tensor | None) -> CallGates:
    """The sums of gates of heads, and memory for the decays by gates of channels."""
    tokens = x.tokens
    if x.gk is not None:
        marks = tokens.per_chunk(tokens.H, dtype=torch.int8)
        return CallGates(chunk_decay=tokens.per_chunk(tokens.H, tokens.K), factorisable_chunks=marks)
    return CallGates() if g is None else CallGates(GateSums(*head_decay.sum_gates(tokens, operand(g), None)))


def compute_factors(x: CallOperands, plan: Plan, gates: CallGates, with_r: bool = False) -> PassOperands:
    """The WY factors, `Y` included if the errors `r` of values are to be computed.

    With gates of channels, the factors that read the state are the decayed queries and keys.
    """
    tokens = x.tokens
    HV, K, C = tokens.H, tokens.K, tokens.C
    q_read, k_read = x.q, x.k if x.a is None else x.a
    W = P = Y = beta = None
    if plan.takes_inverses:
        Y, beta = tokens.per_chunk(HV, C, C, dtype=tokens.dtype), x.beta
    else:
        W, P = scratch(tokens, K), tokens.per_chunk(HV, C, C, dtype=tokens.dtype)
        Y = tokens.per_chunk(HV, C, C) if with_r else None
    log_norm = tokens.per_chunk(HV) if plan.takes_log_norms else None
    arguments: dict[str, Any] = {"vectors": KeyVectors(x.q, x.k, x.a, x.beta), "W": W, "P": P, "Y": Y}
    if x.gk is None:
        arguments |= {"gates": gates.sums, "log_norm": log_norm, "READ_BEFORE": x.read_before}
    else:
        q_read, k_read = scratch(tokens, K), scratch(tokens, K)
        arguments |= {"gk": x.gk, "q_decayed": q_read, "k_decayed": k_read, "chunk_decay": gates.chunk_decay}
        arguments["factorisable_chunks"] = gates.factorisable_chunks
    launch_steps(plan.factors, tokens.chunks * HV, tokens, H=x.q.shape[2], **arguments)
    factors = WYFactors(q_read, k_read, W, None, P, Y)
    decays = ChunkDecays(*gates.sums, gates.chunk_decay, log_norm)
    return PassOperands(tokens, plan.passing, x.v, x.v_token, x.initial, factors, decays, beta, x.read_before)
