"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16.

One kernel computes time steps and gates, in place of head decay's kernel of gates. The scan then applies skip
and gate to its outputs before it stores them. In the backward, the scan that stores the states also recomputes
the output, for the gradient of the gate, and computes the gradient of its own output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import by_token, operand, operand_dtype, tile_count
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.ssd.inputs import Inputs
from flacompose.ops._recurrences.fused.ssd.kernels import ssd_time_step_gradient_kernel, ssd_time_step_kernel
from flacompose.ops._recurrences.matrix.head_decay.cuda import BH, Launches, running_sums
from flacompose.ops._recurrences.matrix.head_decay.kernels import Around, Gates
from flacompose.ops._recurrences.matrix.head_decay.plan import plan_of
from flacompose.ops._recurrences.matrix.inputs import Inputs as Scan


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    inputs = _with_contiguous_steps(inputs)
    scan, (q, k, v) = _launches_of(inputs), map(operand, (inputs.C, inputs.B, inputs.x))
    tokens = scan.tokens
    o, final_state = tokens.per_token(tokens.H, tokens.V, dtype=inputs.x.dtype), tokens.state(torch.float32)
    initial = scan.starts(k, v, operand(inputs.initial_state))
    around = Around(**_skip(inputs), **_gate(inputs))
    scan.pass_states(q, k, v, initial=initial, out=o, final=final_state, around=around)
    return tokens.batched(o), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, wanted = _with_contiguous_steps(call.inputs), call.wanted_input
    scan, (q, k, v) = _launches_of(inputs, True), map(operand, (inputs.C, inputs.B, inputs.x))
    tokens = scan.tokens
    dq, dk = (None if wanted(name) is None else scan.output_of_keys(q) for name in ("C", "B"))
    z, start, D = (wanted(name) for name in ("z", "initial_state", "D"))
    dx, dz = (
        None if u is None else tokens.per_token(tokens.H, tokens.V, dtype=u.dtype) for u in (wanted("x"), z)
    )
    d_initial = None if start is None else tokens.state(start.dtype)
    d_skip = None if D is None else tokens.per_segment(scan.row.count, tokens.H, tokens.V)
    S, dS = scan.per_chunk_state(), scan.per_chunk_state()

    do = call.do.contiguous()
    # Without a gate, the gradient of the sum is that of the output.
    dy = operand(do) if inputs.z is None else tokens.per_token(tokens.H, tokens.V, dtype=operand_dtype(do))
    given = do if inputs.z is not None or d_skip is not None else None
    skip = _skip(inputs)
    around = Around(**skip, **_gate(inputs), do=given, dy=dy, dz=dz, d_skip=d_skip)
    initial = scan.starts(k, v, operand(inputs.initial_state))
    scan.pass_states(None if dz is None else q, k, v, initial=initial, states=S, around=around)
    initial = scan.starts(q, dy, operand(call.arriving.final_state), reverse=True)
    scan.pass_states(k, q, dy, False, True, dx, Around(**skip), initial=initial, states=dS, final=d_initial)
    dg, d_delta = scan.compute_gradients(q, k, v, dy, S, dS, dq, dk, torch.float32, scan.beta)
    assert d_delta is not None
    del S, dS
    return call.select(
        x=None if dx is None else tokens.batched(dx),
        B=scan.summed_of_keys(dk, inputs.B),
        C=scan.summed_of_keys(dq, inputs.C),
        D=None if d_skip is None or D is None else d_skip[: scan.row.count].sum((0, 1)).sum_to_size(D.shape),
        z=None if dz is None else tokens.batched(dz),
        initial_state=d_initial,
        **_of_time_steps(call, inputs, tokens, dg, d_delta),
    )


def _with_contiguous_steps(inputs: Inputs) -> Inputs:
    bias = None if inputs.dt_bias is None else inputs.dt_bias.contiguous()
    return inputs._replace(dt=inputs.dt.contiguous(), A=inputs.A.contiguous(), dt_bias=bias)


def _launches_of(inputs: Inputs, has_gate_gradients: bool = False) -> Launches:
    """The launches of head decay of queries ``C``, keys ``B`` and values ``x``, with gates that are launched here."""
    # The time steps are here only to say that there are gates.
    scan = Scan(inputs.C, inputs.B, inputs.x, inputs.dt, cu_seqlens=inputs.cu_seqlens)
    plan = plan_of(scan, has_gate_gradients)
    tokens = MatrixSequences(scan.q, scan.v, scan.cu_seqlens, scan.scale, plan.C)
    sums, rest = running_sums(tokens)
    delta = tokens.per_token(tokens.H, dtype=torch.float32)
    _of_gates(ssd_time_step_kernel, inputs, tokens, delta, sums, rest)
    launches = Launches(tokens, plan, Gates(None, sums, rest), delta)
    assert launches.tiles(transpose=False)[0] == 1, (
        "a program gates what it reads, which must be all that is read"
    )
    return launches


def _skip(inputs: Inputs) -> dict[str, Any]:
    if inputs.D is None:
        return {}
    D = inputs.D.contiguous()
    return {"skip": D, "E": D.shape[1], "step": int(D.shape[1] > 1)}


def _gate(inputs: Inputs) -> dict[str, Any]:
    return {} if inputs.z is None else dict(zip(("z", "z_token"), by_token(inputs.z), strict=True))


def _of_time_steps(
    call: BackwardCall[Inputs], inputs: Inputs, tokens: MatrixSequences, dg: Tensor, d_delta: Tensor
) -> dict[str, Tensor | None]:
    """The wanted gradients of `dt`, `A` and `dt_bias`."""
    dt, A, dt_bias = map(call.wanted_input, ("dt", "A", "dt_bias"))
    ddt = None if dt is None else tokens.per_token(tokens.H, dtype=dt.dtype)
    sums = [None if x is None else tokens.per_chunk(tokens.H) for x in (A, dt_bias)]
    _of_gates(ssd_time_step_gradient_kernel, inputs, tokens, dg, d_delta, ddt, *sums)
    dA, d_bias = (None if x is None else x[: tokens.chunks].sum(0) for x in sums)
    return {"dt": None if ddt is None else tokens.batched(ddt), "A": dA, "dt_bias": d_bias}


def _of_gates(kernel: object, inputs: Inputs, tokens: MatrixSequences, *tensors: Tensor | None) -> None:
    """Launch a kernel of time steps, for all heads of each chunk."""
    sizes = {"H": tokens.H, "C": tokens.C, "BH": BH, **tokens.positions}
    limits = {"SOFTPLUS": inputs.softplus, "least": inputs.least, "most": inputs.most}
    grid, steps = (tokens.chunks, tile_count(tokens.H, BH)), (inputs.dt, inputs.A, inputs.dt_bias)
    launch(kernel, grid, *steps, *tensors, **sizes, **limits)
