"""Launches of the Triton kernel on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import tile_count
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._recurrences.elementwise.stabilizer.eager import backward as backward
from flacompose.ops._recurrences.elementwise.stabilizer.inputs import Inputs
from flacompose.ops._recurrences.elementwise.stabilizer.kernels import stabilizer_kernel

# (tokens, channels, warps) of a tile: for few channels, mostly the heads of mLSTM, and for many.
HEADS_CONFIG, CHANNELS_CONFIG = (2048, 2, 8), (256, 16, 4)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(gates [B, T, D], m [B, T, D], final_state [N, D])``."""
    x, g, initial_state, cu_seqlens = inputs
    rows, D = Sequences(x, cu_seqlens), x.shape[2]
    C, BD, num_warps = HEADS_CONFIG if D <= 64 else CHANNELS_CONFIG
    gates, m = (rows.per_token(D, dtype=torch.float32) for _ in range(2))
    final = rows.per_sequence(D)
    initial = None if initial_state is None else initial_state.contiguous()
    launch(
        stabilizer_kernel, (rows.N * tile_count(D, BD),), x.contiguous(), g.contiguous(), initial, gates, m, final,
        cu_seqlens=rows.cu_seqlens, T=rows.T, D=D, C=C, BD=BD, num_warps=num_warps,
    )  # fmt: skip
    return rows.batched(gates), rows.batched(m), final
