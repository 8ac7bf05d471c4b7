"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch, launches_into_graph
from flacompose.ops._launch.operands import block, by_token
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.rotary import eager
from flacompose.ops._recurrences.fused.rotary.inputs import Inputs
from flacompose.ops._recurrences.fused.rotary.kernels import rotary_gradient_kernel, rotary_kernel
from flacompose.ops._tensors.sizes import always_true

TILE = 1024  # pairs of a chunk, or half the number of its values
WARPS, BACKWARD_WARPS = 4, 2


def forward(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(q_turned, k_before [B, T, R, HV, S], v_before [B, T, HV, P], products [B, T, HV, R, R], last_k, last_v)``."""
    q, k, v = inputs[:3]
    # In a graph, Inductor fuses the few products of one token into its own kernels.
    if always_true(q.shape[1] == 1) and inputs.cu_seqlens is None and launches_into_graph():
        return eager.forward(inputs)
    run = _Launches(inputs)
    q_turned, k_before = (run.per_token(run.R, run.HV, run.S, dtype=x.dtype) for x in (q, k))
    v_before = run.per_token(run.HV, run.P, dtype=v.dtype)
    products = run.per_token(run.HV, run.R, run.R, dtype=torch.float32)
    last_k = run.per_sequence(run.R, run.HV, run.S, dtype=k.dtype)
    last_v = run.per_sequence(run.HV, run.P, dtype=v.dtype)
    v, v_token = by_token(v)
    launch(
        rotary_kernel, (run.chunks * run.HV * run.R,), v=v, **run.given,
        initial_k=_dense(inputs.initial_k), initial_v=_dense(inputs.initial_v), q_turned=q_turned, k_before=k_before,
        v_before=v_before, products=products, last_k=last_k, last_v=last_v, v_token=v_token, num_warps=WARPS,
        **run.arguments,
    )  # fmt: skip
    return *map(run.batched, (q_turned, k_before, v_before, products)), last_k, last_v


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, wanted = call.inputs, call.wanted_input
    run = _Launches(inputs)
    R, HV, S, P, A = run.R, run.HV, run.S, run.P, run.arguments["A"]
    q, k, v, q_bias, k_bias, angle, initial_k, initial_v = map(wanted, call.signature.differentiable)
    dq, dk = (None if x is None else run.per_token(R, run.H, S, dtype=x.dtype) for x in (q, k))
    dv = None if v is None else run.per_token(HV, P, dtype=v.dtype)
    sums = [None if x is None else run.per_chunk(HV, R, S) for x in (q_bias, k_bias)]
    dangle = None if angle is None else run.per_token(R, HV, A, dtype=torch.float32)
    of_k = None if initial_k is None else run.per_sequence(R, HV, S, dtype=initial_k.dtype)
    of_v = None if initial_v is None else run.per_sequence(HV, P, dtype=initial_v.dtype)
    arriving = {f"d_{name}": _dense(x) for name, x in call.arriving._asdict().items()}
    launch(
        rotary_gradient_kernel, (run.chunks * run.H * R,), **run.given, **arriving, dq=dq, dk=dk, dv=dv,
        d_q_bias=sums[0], d_k_bias=sums[1], dangle=dangle, d_initial_k=of_k, d_initial_v=of_v,
        num_warps=BACKWARD_WARPS, **run.arguments,
    )  # fmt: skip
    dq, dk, dv, dangle = (None if x is None else run.batched(x) for x in (dq, dk, dv, dangle))
    d_q_bias, d_k_bias = (None if x is None else x[: run.chunks].sum(0) for x in sums)
    if dangle is not None:
        dangle = dangle.squeeze(2) if R == 1 else dangle.sum(2)
    found = {"q": dq, "k": dk, "v": dv, "q_bias": d_q_bias, "k_bias": d_k_bias, "angle": dangle}
    return call.made(**found, initial_k=of_k, initial_v=of_v)


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs) -> None:
        q, k, v, q_bias, k_bias, angle, *_, cu_seqlens, halves = inputs
        (self.R, self.H, self.S), (self.HV, self.P) = q.shape[2:], v.shape[2:]
        BI, BP = block(self.S // 2, 256), block(self.P, 512)
        super().__init__(q, cu_seqlens, min(64, 2 * TILE // max(2 * BI, BP)))
        (q, q_token), (k, k_token) = (by_token(x.flatten(2, 3)) for x in (q, k))
        self.given: dict[str, Any] = {"q": q, "k": k, "angle": angle.contiguous(), "q_token": q_token}
        self.given |= {"q_bias": q_bias.contiguous(), "k_bias": k_bias.contiguous(), "k_token": k_token}
        self.arguments |= {"H": self.H, "HV": self.HV, "A": angle.shape[3], "R": self.R, "S": self.S}
        self.arguments |= {"P": self.P, "HALVES": halves, "C": self.C, "BI": BI, "BP": BP}


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
