"""Launches of the Triton kernel on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import by_token, tile_count, token_blocks
from flacompose.ops._recurrences.fused.mamba3.inputs import SIGNATURE, Inputs
from flacompose.ops._recurrences.fused.mamba3.kernels import mamba3_token_kernel

SLICES = ("V", "Trap", "Angles", "Z")  # may be slices of a projection, so they have strides


def token(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(o [B, 1, HV, P], final_angle [B, HV, A], final_state, final_k [B, HV, S], final_v [B, HV, P])``."""
    Q, K, V, Angles = inputs.Q, inputs.K, inputs.V, inputs.Angles
    (B, _, HV, P), (H_Q, S), (H_ANGLES, A) = V.shape, Q.shape[2:], Angles.shape[2:]
    shapes = {"o": ((1, HV, P), V), "final_k": ((HV, S), K), "final_v": ((HV, P), V)}
    results = {
        name: torch.empty(B, *shape, dtype=x.dtype, device=x.device) for name, (shape, x) in shapes.items()
    }
    for name, shape in (("final_angle", (HV, A)), ("final_state", inputs.initial_state.shape[1:])):
        results[name] = torch.empty(B, *shape, dtype=torch.float32, device=V.device)
    given: dict[str, Any] = inputs._asdict()
    values_first = given.pop("values_first")
    for name in (x for x in tuple(given) if given[x] is not None):
        if name in SLICES:
            x = given[name]
            given[name], given[f"{name}_token"] = by_token(x if x.ndim == 4 else x.unsqueeze(2))
        else:
            given[name] = given[name].contiguous()
    BS, BP = token_blocks(S, P)
    launch(
        mamba3_token_kernel, (B * HV * tile_count(P, BP),), **{"Z_token": None} | given, **results, HV=HV, H_Q=H_Q,
        H_ANGLES=H_ANGLES, S=S, P=P, A=A, VALUES_FIRST=values_first, BS=BS, BP=BP,
    )  # fmt: skip
    return tuple(results[name] for name in SIGNATURE.outputs._fields)
