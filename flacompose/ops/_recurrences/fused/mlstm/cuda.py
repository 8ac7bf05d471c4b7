"""Launches of the Triton kernel on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import operand, tile_count, token_blocks
from flacompose.ops._recurrences.fused.mlstm import eager
from flacompose.ops._recurrences.fused.mlstm.inputs import Inputs
from flacompose.ops._recurrences.fused.mlstm.kernels import mlstm_token_kernel

backward = eager.backward


def token(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(o [B, 1, HV, V], final_C [B, HV, K, V], final_n [B, HV, K], final_m [B, HV])``."""
    *tensors, scale, eps = inputs
    (B, _, H, K), (HV, V) = inputs.q.shape, inputs.v.shape[2:]
    o = torch.empty(B, 1, HV, V, dtype=inputs.v.dtype, device=inputs.q.device)
    C, n, m = (torch.empty(B, HV, *of, dtype=torch.float32, device=o.device) for of in ((K, V), (K,), ()))
    BK, BV = token_blocks(K, V)
    grid = (B * HV * tile_count(V, BV),)
    given = (operand(x) for x in tensors)
    launch(
        mlstm_token_kernel,
        grid,
        *given,
        o,
        C,
        n,
        m,
        scale=scale,
        eps=eps,
        GROUP=HV // H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
    )
    return o, C, n, m
