"""Launches of the gradients of queries, keys, `a`, `beta` and gates of each chunk, from the stored states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import tile_count
from flacompose.ops._recurrences.matrix.delta_rule.arguments import (
    GateSums,
    KeyGradients,
    KeyVectors,
    StoredPairs,
    ValueVectors,
)
from flacompose.ops._recurrences.matrix.delta_rule.head_gradients import delta_add_heads_kernel
from flacompose.ops._recurrences.matrix.delta_rule.launch_factors import CallGates
from flacompose.ops._recurrences.matrix.delta_rule.launch_state_passing import (
    PassOperands,
    starts_of_gradients,
)
from flacompose.ops._recurrences.matrix.delta_rule.operands import CallOperands, launch_steps
from flacompose.ops._recurrences.matrix.delta_rule.plan import Plan
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay

SUMS_PER_PROGRAM = 2048  # sums over heads that a program of `delta_add_heads_kernel` computes


def compute_gradients(
    x: CallOperands,
    plan: Plan,
    gates: CallGates,
    values: ValueVectors,
    states: Tensor,
    d_states: Tensor | None,
    wants_gates: bool,
) -> dict[str, Tensor]:
    """The gradients of queries and, with `d_states`, of keys, `a`, `beta` and wanted gates.

    With gates of channels several kernels are launched; the second table of `plan` says which tiles each computes.
    """
    tokens, H, HV, tiles = x.tokens, x.q.shape[2], x.tokens.H, plan.gradients.tiles
    heads = H if plan.gradients.adds_heads else HV
    made = _memory(x, tiles, heads)
    # Always allocated, so that the bits of other gradients do not depend on whether these are wanted.
    d_sums, d_total = _sums(x, gates.sums, tiles)
    if d_states is None:
        values, made = values._replace(dv=None), KeyGradients(made.dq, None, None, None)
        d_sums = d_total = None
    arguments: dict[str, Any] = {"vectors": KeyVectors(x.q, x.k, x.a, x.beta), "values": values, "made": made}
    arguments |= {"states": states, "d_states": d_states}
    dgk = None
    if x.gk is None:
        arguments |= {"gates": gates.sums, "d_sums": d_sums, "d_total": d_total, "READ_BEFORE": x.read_before}
    else:
        dgk = tokens.per_token(HV, tokens.K, dtype=x.gk.dtype) if wants_gates else None
        C, marks = tokens.C, tokens.per_chunk(HV, tiles, dtype=torch.int8)
        stored = StoredPairs(tokens.per_chunk(HV, 2, C, C), tokens.per_chunk(HV, C))
        arguments |= {"gk": x.gk, "dgk": dgk, "stored": stored, "factorisable_tiles": marks}
        if plan.gradients.takes_marks:
            arguments["factorisable_chunks"] = gates.factorisable_chunks
    launch_steps(plan.gradients.steps, tokens.chunks * heads, tokens, H=H, **arguments)
    found = _added_up(x, made)
    if dgk is not None:
        found["gk"] = tokens.batched(dgk)
    return found | (_gate_gradient(x, d_sums, d_total) if wants_gates and x.gk is None else {})


def with_state_passing(
    x: CallOperands,
    plan: Plan,
    passing: PassOperands,
    do: Tensor,
    r: Tensor,
    states: Tensor,
    d_final: Tensor | None,
    d_initial: Tensor | None,
) -> tuple[KeyGradients, Tensor | None, Tensor | None]:
    """`backwards` of state passing and the gradients of queries, keys and `beta` in one kernel.

    Returns gradients for each head of values, and `d_sums` and `d_total` of gates. It overwrites `r` with dv, and
    W with the gradient of queries: a program reads `r` and W of a chunk before it overwrites them.
    """
    tokens, K, sums = x.tokens, x.tokens.K, passing.decays.sums
    d_final = starts_of_gradients(passing, do, d_final)
    W = passing.factors.W
    dk = tokens.per_token(tokens.H, K, dtype=tokens.dtype)
    made = KeyGradients(W, dk, None, tokens.per_token(K // 64, tokens.H, dtype=torch.float32))
    d_sums, d_total = _sums(x, GateSums(sums), K // 64)
    tensors = {"q": x.q, "k": x.k, "beta": x.beta, "W": W, "P": passing.factors.P, "sums": sums}
    tensors |= {"do": do, "r": r, "dv": r, "states": states, "d_final": d_final, "d_initial": d_initial}
    tensors |= {"dq": W, "dk": dk, "dbeta": made.dbeta, "d_sums": d_sums, "d_total": d_total}
    sizes = {"SEGMENTS": plan.passing.segments, "GROUP": tokens.H // x.q.shape[2], "D": K}
    segments = plan.passing.segments * tokens.N * tokens.H
    launch_steps(plan.gradients.steps, segments, tokens, **tensors, **sizes)
    return made, d_sums, d_total


def of_heads(
    x: CallOperands,
    made: KeyGradients,
    d_sums: Tensor | None,
    d_total: Tensor | None,
    wants: Callable[..., bool],
) -> dict[str, Tensor]:
    """The wanted gradients from `with_state_passing`, added up over the heads that share keys.

    Each sum is rounded as in `hopper/head_gradients`, which adds to the stored sum of the heads before.
    """
    tokens, (H, K) = x.tokens, x.q.shape[2:]
    if tokens.H != H:
        added = KeyGradients(None, None, None, made.dbeta)
        for name in filter(wants, ("q", "k")):
            sums = tokens.per_token(H, K, dtype=tokens.dtype)
            sizes = {"size": sums.numel(), "GROUP": tokens.H // H, "K": K, "BLOCK": SUMS_PER_PROGRAM}
            grid = (tile_count(sums.numel(), SUMS_PER_PROGRAM),)
            arguments = {"x": getattr(made, f"d{name}"), "sums": sums, **sizes, "num_warps": 4}
            launch(delta_add_heads_kernel, grid, **arguments)
            added = added._replace(**{f"d{name}": sums})
        made = added
    found = _added_up(x, made)
    return found | (_gate_gradient(x, d_sums, d_total) if wants("g") else {})


def _memory(x: CallOperands, tiles: int, heads: int) -> KeyGradients:
    """Memory for dq, dk and da, with this many `heads`, and for dbeta, in the layout of `_added_up`."""
    tokens = x.tokens
    dq, dk, da = (
        None if given is None else tokens.per_token(heads, tokens.K, dtype=tokens.dtype)
        for given in (x.q, x.k, x.a)
    )
    return KeyGradients(dq, dk, da, tokens.per_token(tiles, tokens.H, dtype=torch.float32))


def _sums(x: CallOperands, gates: GateSums, tiles: int) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the gradients of sums of gates, in the layout of `_gate_gradient`."""
    tokens = x.tokens
    if gates.sums is None:
        return None, None
    return tokens.per_chunk(3 * tiles, tokens.H, tokens.C), tokens.per_chunk(tokens.H, tokens.K)


def _gate_gradient(x: CallOperands, d_sums: Tensor | None, d_total: Tensor | None) -> dict[str, Tensor]:
    """The gradient of gates of heads, by its name."""
    assert d_sums is not None and d_total is not None
    tiles = d_sums.shape[1] // 3
    return {"g": head_decay.gate_gradient(x.tokens, d_sums, (tiles,) * 3, d_total, 1.0, torch.float32)}


def _added_up(x: CallOperands, made: KeyGradients) -> dict[str, Tensor]:
    """The gradients of queries, keys, `a` and `beta`: sums over heads of values, and over tiles of the key axis."""
    H, found = x.q.shape[2], {}
    for name, gradient in made._asdict().items():
        if gradient is None:
            continue
        gradient = x.tokens.batched(gradient)
        if name == "dbeta":
            gradient = gradient.squeeze(2) if gradient.shape[2] == 1 else gradient.sum(2)
        elif gradient.shape[2] != H:
            gradient = gradient.unflatten(2, (H, -1))
            # PyTorch's sum of two takes twice as long as an addition.
            of_two = x.tokens.H == 2 * H
            gradient = gradient[:, :, :, 0] + gradient[:, :, :, 1] if of_two else gradient.sum(3)
        found[name.removeprefix("d")] = gradient
    return found
