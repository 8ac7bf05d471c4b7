"""Launches of the Triton kernel on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import by_token, tile_count, token_blocks
from flacompose.ops._recurrences.fused.mamba3.inputs import Inputs, Outputs
from flacompose.ops._recurrences.fused.mamba3.kernels import Strides, mamba3_token_kernel

SLICES = ("V", "Trap", "Angles", "Z")  # may be slices of a projection, so they have strides


def token(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(o [B, 1, HV, P], final_angle [B, HV, A], final_state, final_k [B, HV, S], final_v [B, HV, P])``."""
    Q, K, V, Angles = inputs.Q, inputs.K, inputs.V, inputs.Angles
    (B, _, HV, P), (H_Q, S), (H_ANGLES, A) = V.shape, Q.shape[2:], Angles.shape[2:]
    outputs = Outputs(
        torch.empty(B, 1, HV, P, dtype=V.dtype, device=V.device),
        torch.empty(B, HV, A, dtype=torch.float32, device=V.device),
        torch.empty(B, *inputs.initial_state.shape[1:], dtype=torch.float32, device=V.device),
        torch.empty(B, HV, S, dtype=K.dtype, device=V.device),
        torch.empty(B, HV, P, dtype=V.dtype, device=V.device),
    )
    given: dict[str, Any] = {"values_first": None}  # a constant of the kernel
    strides = dict.fromkeys(Strides._fields)
    for name, x in inputs._asdict().items():
        if name in SLICES and x is not None:
            given[name], strides[f"{name}_token"] = by_token(x if x.ndim == 4 else x.unsqueeze(2))
        elif isinstance(x, Tensor):
            given[name] = x.contiguous()
    BS, BP = token_blocks(S, P)
    launch(
        mamba3_token_kernel, (B * HV * tile_count(P, BP),), inputs._replace(**given),
        Strides(**strides), outputs, HV=HV, H_Q=H_Q, H_ANGLES=H_ANGLES, S=S, P=P, A=A,
        VALUES_FIRST=inputs.values_first, BS=BS, BP=BP,
    )  # fmt: skip
    return outputs
