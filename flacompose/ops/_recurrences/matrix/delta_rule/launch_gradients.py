"""Launches of the gradients of queries, keys, `a`, `beta` and gates of each chunk, from the stored states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import tile_count
from flacompose.ops._recurrences.matrix.delta_rule.gradients import delta_add_heads_kernel
from flacompose.ops._recurrences.matrix.delta_rule.launch_factors import Gates
from flacompose.ops._recurrences.matrix.delta_rule.launch_state_passing import Factors, starts_of_gradients
from flacompose.ops._recurrences.matrix.delta_rule.operands import Operands, launch_step
from flacompose.ops._recurrences.matrix.delta_rule.plan import Plan
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay

ADDED = 2048  # sums over heads that a program of `delta_add_heads_kernel` computes


class Passed(NamedTuple):
    """The results of state passing, and `do`; None if unwanted. Without `d_states` queries alone have gradients."""

    do: Tensor
    r: Tensor
    dv: Tensor | None
    states: Tensor
    d_states: Tensor | None


def gradients(x: Operands, plan: Plan, gates: Gates, passed: Passed, wants_gates: bool) -> dict[str, Tensor]:
    """The gradients of queries and, with `d_states`, of keys, `a`, `beta` and wanted gates.

    The table of `channel_kernels` says which kernel computes which chunks and tiles where gates are of channels.
    """
    tokens, H, HV = x.tokens, x.q.shape[2], x.tokens.H
    BK = plan.gradients[-1].config["BK"]
    tiles = tile_count(tokens.K, BK)
    products: dict[str, Tensor | None] = {}
    if plan.products is not None:
        sizes, dtype = plan.products
        products = {
            "pairs": tokens.per_chunk(HV, *sizes, dtype=dtype),
            "diagonal": tokens.per_chunk(HV, tokens.C),
            "of_before": tokens.per_chunk(HV, tokens.C) if x.read_before else None,
        }
    marks: dict[str, Tensor | None] = {}
    if x.gk is not None:
        marks = {
            "mild": tokens.per_chunk(HV, tiles, dtype=torch.int8),
            "factorisable_chunks": gates.factorisable,
        }
    heads = H if plan.adds_heads else HV
    outputs = _memory(x, tiles, heads)
    # Always allocated, so that the bits of other gradients do not depend on whether those of gates are wanted.
    d_sums, d_total = _sums(x, gates, tiles)
    dgk = None
    if x.gk is not None and wants_gates:
        dgk = tokens.per_token(HV, tokens.K, dtype=x.gk.dtype)
    if passed.d_states is None:
        passed = passed._replace(dv=None)
        outputs, d_sums, d_total = dict.fromkeys(outputs) | {"dq": outputs["dq"]}, None, None
    vectors = {"q": x.q, "k": x.k, "a": x.a, "beta": x.beta, "gk": x.gk, "H": H}
    of_gates = {"sums": gates.sums, "rest": gates.rest, "d_sums": d_sums, "d_total": d_total, "dgk": dgk}
    for step in plan.gradients:
        # The stored products do not depend on the tile of keys.
        programs = (tiles if "BK" in step.config else 1) * tokens.chunks * heads
        launch_step(
            step,
            (programs,),
            tokens,
            **vectors,
            **passed._asdict(),
            **outputs,
            **products,
            **marks,
            **of_gates,
            READ_BEFORE=x.read_before,
        )
    made = _added_up(x, outputs)
    if dgk is not None:
        made["gk"] = tokens.batched(dgk)
    return made | (_gate_gradient(x, d_sums, d_total) if wants_gates and x.gk is None else {})


class Joint(NamedTuple):
    """The results of `with_state_passing`: gradients for each head of values, and those of sums of gates."""

    outputs: dict[str, Tensor]
    d_sums: Tensor | None
    d_total: Tensor | None


def with_state_passing(
    x: Operands,
    plan: Plan,
    factors: Factors,
    passed: Passed,
    d_final: Tensor | None,
    d_initial: Tensor | None,
) -> Joint:
    """`backwards` of state passing and the gradients of queries, keys and `beta` in one kernel.

    It overwrites `r` with dv, and W with the gradient of queries: a program has read both of a chunk when it
    stores their successors.
    """
    tokens, (step,), K = x.tokens, plan.gradients, x.tokens.K
    d_final = starts_of_gradients(factors, passed.do, d_final)
    dq = factors.W
    assert dq is not None
    outputs = {"dq": dq, "dk": tokens.per_token(tokens.H, K, dtype=tokens.dtype)}
    outputs["dbeta"] = tokens.per_token(K // 64, tokens.H, dtype=torch.float32)
    d_sums, d_total = _sums(x, Gates(sums=factors.sums), K // 64)
    vectors = {"q": x.q, "k": x.k, "beta": x.beta, "W": dq, "P": factors.P, "sums": factors.sums}
    launch_step(
        step,
        (plan.passing.segments * tokens.N * tokens.H,),
        tokens,
        **vectors,
        **passed._replace(dv=passed.r)._asdict(),
        **outputs,
        d_sums=d_sums,
        d_total=d_total,
        d_final=d_final,
        d_initial=d_initial,
        SEGMENTS=plan.passing.segments,
        GROUP=tokens.H // x.q.shape[2],
        D=K,
    )
    return Joint(outputs, d_sums, d_total)


def of_joint(x: Operands, joint: Joint, wants: Callable[..., bool]) -> dict[str, Tensor]:
    """The wanted gradients, added up over the heads that share keys.

    Each sum is rounded as in `hopper/head_gradients`, which adds to the stored sum of the heads before.
    """
    tokens, (H, K), outputs = x.tokens, x.q.shape[2:], joint.outputs
    if tokens.H != H:
        outputs = {"dbeta": outputs["dbeta"]}
        for name in filter(wants, ("q", "k")):
            sums = tokens.per_token(H, K, dtype=tokens.dtype)
            sizes = {"size": sums.numel(), "GROUP": tokens.H // H, "K": K, "BLOCK": ADDED}
            grid = (tile_count(sums.numel(), ADDED),)
            arguments = {"x": joint.outputs[f"d{name}"], "sums": sums, **sizes, "num_warps": 4}
            launch(delta_add_heads_kernel, grid, **arguments)
            outputs[f"d{name}"] = sums
    made = _added_up(x, outputs)
    return made | (_gate_gradient(x, joint.d_sums, joint.d_total) if wants("g") else {})


def _memory(x: Operands, tiles: int, heads: int) -> dict[str, Any]:
    """Memory for dq, dk and da, with this many `heads`, and for dbeta, in the layout of `_added_up`."""
    tokens = x.tokens
    outputs: dict[str, Any] = {
        name: None if given is None else tokens.per_token(heads, tokens.K, dtype=tokens.dtype)
        for name, given in (("dq", x.q), ("dk", x.k), ("da", x.a))
    }
    return outputs | {"dbeta": tokens.per_token(tiles, tokens.H, dtype=torch.float32)}


def _sums(x: Operands, gates: Gates, tiles: int) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the gradients of sums of gates, in the layout of `_gate_gradient`."""
    tokens = x.tokens
    if gates.sums is None:
        return None, None
    return tokens.per_chunk(3 * tiles, tokens.H, tokens.C), tokens.per_chunk(tokens.H, tokens.K)


def _gate_gradient(x: Operands, d_sums: Tensor | None, d_total: Tensor | None) -> dict[str, Tensor]:
    """The gradient of gates of heads, by its name."""
    assert d_sums is not None and d_total is not None
    tiles = d_sums.shape[1] // 3
    return {"g": head_decay.gate_gradient(x.tokens, d_sums, (tiles,) * 3, d_total, 1.0, torch.float32)}


def _added_up(x: Operands, outputs: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of queries, keys, `a` and `beta`: sums over heads of values, and over tiles of the key axis."""
    H, made = x.q.shape[2], {}
    for name, gradient in outputs.items():
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
        made[name.removeprefix("d")] = gradient
    return made
