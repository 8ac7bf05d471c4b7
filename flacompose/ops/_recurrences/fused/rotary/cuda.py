"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch, launches_into_graph
from flacompose.ops._launch.operands import block, by_token
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.rotary import eager, kernels
from flacompose.ops._recurrences.fused.rotary.inputs import Inputs, Outputs
from flacompose.ops._recurrences.fused.rotary.kernels import Vectors, rotary_gradient_kernel, rotary_kernel
from flacompose.ops._tensors.sizes import always_true

TILE = 1024  # the number of pairs of a chunk, and half the number of its values
WARPS, BACKWARD_WARPS = 4, 2


def forward(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(q_turned, k_before [B, T, R, HV, S], v_before [B, T, HV, P], products [B, T, HV, R, R], last_k, last_v)``."""
    q, k, v = inputs.q, inputs.k, inputs.v
    # In a graph, Inductor fuses the few products of one token with its neighbours.
    if always_true(q.shape[1] == 1) and inputs.cu_seqlens is None and launches_into_graph():
        return eager.forward(inputs)
    run = _Launches(inputs)
    R, HV, S, P = run.R, run.HV, run.S, run.P
    made = Outputs(
        run.per_token(R, HV, S, dtype=q.dtype),
        run.per_token(R, HV, S, dtype=k.dtype),
        run.per_token(HV, P, dtype=v.dtype),
        run.per_token(HV, R, R, dtype=torch.float32),
        run.per_sequence(R, HV, S, dtype=k.dtype),
        run.per_sequence(HV, P, dtype=v.dtype),
    )
    v, v_token = by_token(v)
    given = run.vectors, v, _dense(inputs.initial_k), _dense(inputs.initial_v), made
    launch(rotary_kernel, (run.chunks * HV * R,), *given, v_token=v_token, num_warps=WARPS, **run.arguments)
    return *map(run.batched, made[:4]), *made[4:]


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    run = _Launches(call.inputs)
    R, HV, S, P = run.R, run.HV, run.S, run.P
    q, k, v, q_bias, k_bias, angle, initial_k, initial_v = map(
        call.wanted_input, call.signature.differentiable
    )
    d = kernels.Gradients(
        None if q is None else run.per_token(R, run.H, S, dtype=q.dtype),
        None if k is None else run.per_token(R, run.H, S, dtype=k.dtype),
        None if v is None else run.per_token(HV, P, dtype=v.dtype),
        None if q_bias is None else run.per_chunk(HV, R, S),
        None if k_bias is None else run.per_chunk(HV, R, S),
        None if angle is None else run.per_token(R, HV, angle.shape[3], dtype=torch.float32),
        None if initial_k is None else run.per_sequence(R, HV, S, dtype=initial_k.dtype),
        None if initial_v is None else run.per_sequence(HV, P, dtype=initial_v.dtype),
    )
    given = run.vectors, call.arriving._make(map(_dense, call.arriving)), d
    grid = (run.chunks * run.H * R,)
    launch(rotary_gradient_kernel, grid, *given, num_warps=BACKWARD_WARPS, **run.arguments)
    dq, dk, dv, dangle = (None if x is None else run.batched(x) for x in (d.q, d.k, d.v, d.angle))
    d_q_bias, d_k_bias = (None if x is None else x[: run.chunks].sum(0) for x in (d.q_bias, d.k_bias))
    if dangle is not None:
        dangle = dangle.squeeze(2) if R == 1 else dangle.sum(2)
    found = {"q": dq, "k": dk, "v": dv, "q_bias": d_q_bias, "k_bias": d_k_bias, "angle": dangle}
    return call.select(**found, initial_k=d.initial_k, initial_v=d.initial_v)


class _Launches(Sequences):
    """The sizes and arguments of the launches of one call."""

    def __init__(self, inputs: Inputs) -> None:
        q, k, v, angle = inputs.q, inputs.k, inputs.v, inputs.angle
        (self.R, self.H, self.S), (self.HV, self.P) = q.shape[2:], v.shape[2:]
        BI, BP = block(self.S // 2, 256), block(self.P, 512)
        super().__init__(q, inputs.cu_seqlens, min(64, 2 * TILE // max(2 * BI, BP)))
        (q, q_token), (k, k_token) = (by_token(x.flatten(2, 3)) for x in (q, k))
        q_bias, k_bias, angle = (x.contiguous() for x in (inputs.q_bias, inputs.k_bias, angle))
        self.vectors = Vectors(q, k, q_bias, k_bias, angle, q_token, k_token)
        sizes: dict[str, Any] = {"H": self.H, "HV": self.HV, "A": angle.shape[3], "R": self.R, "S": self.S}
        self.arguments |= sizes | {"P": self.P, "HALVES": inputs.halves, "C": self.C, "BI": BI, "BP": BP}


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
