"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch, launches_into_graph
from flacompose.ops._launch.operands import tile_count
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.cumulative_angle import eager
from flacompose.ops._recurrences.elementwise.cumulative_angle.inputs import Inputs
from flacompose.ops._recurrences.elementwise.cumulative_angle.kernels import (
    cumulative_angle_gradient_kernel,
    cumulative_angle_kernel,
)
from flacompose.ops._tensors.sizes import always_true

# Tokens and angles of a tile, as wide as a memory transaction; warps.
CONFIG = {"C": 256, "BA": 8, "num_warps": 4}
ONE_TOKEN = {"C": 2, "BA": 64, "num_warps": 1}


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, A], final_state [N, HV, A])``."""
    x, dt, initial_state, cu_seqlens = inputs
    one_token = always_true(x.shape[1] == 1)
    # In a graph, Inductor fuses the few products of one token into its own kernels.
    if one_token and cu_seqlens is None and launches_into_graph():
        return eager.forward(inputs)
    rows, HV, A = Sequences(x, cu_seqlens), dt.shape[2], x.shape[3]
    o, final = rows.per_token(HV, A, dtype=torch.float32), rows.per_sequence(HV, A)
    config = ONE_TOKEN if one_token else CONFIG
    initial = None if initial_state is None else initial_state.contiguous()
    launch(
        cumulative_angle_kernel, (rows.N * HV * tile_count(A, config["BA"]),), x.contiguous(), dt.contiguous(), initial,
        o, final, **rows.arguments, H=x.shape[2], HV=HV, A=A, **config,
    )  # fmt: skip
    return rows.batched(o), final


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    x, dt, _, cu_seqlens = call.inputs
    d_state = call.arriving.final_state
    rows, HV, (H, A) = Sequences(x, cu_seqlens), dt.shape[2], x.shape[2:]
    tiles = tile_count(A, CONFIG["BA"])
    dx = rows.per_token(HV, A, dtype=x.dtype if H == HV else torch.float32) if call.wants("x") else None
    # Tokens in no sequence have zeros, as in `per_token`.
    new = dt.new_empty if cu_seqlens is None else dt.new_zeros
    d_dt = new(tiles, rows.B * rows.T, HV, dtype=torch.float32) if call.wants("dt") else None
    state = call.wanted_input("initial_state")
    d_initial = None if state is None else rows.per_sequence(HV, A, dtype=state.dtype)
    launch(
        cumulative_angle_gradient_kernel, (rows.N * HV * tiles,), x.contiguous(), dt.contiguous(), call.do.contiguous(),
        None if d_state is None else d_state.contiguous(), dx, d_dt, d_initial,
        **rows.arguments, H=H, HV=HV, tokens=rows.B * rows.T, A=A, **CONFIG,
    )  # fmt: skip
    if dx is not None:
        dx = rows.batched(dx)
        dx = dx if H == HV else dx.unflatten(2, (H, -1)).sum(3)
    return call.select(x=dx, dt=None if d_dt is None else d_dt.sum(0).view(dt.shape), initial_state=d_initial)
