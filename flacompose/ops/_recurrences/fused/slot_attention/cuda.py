"""Launches of the Triton kernel on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, operand, tile_count
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.slot_attention import eager
from flacompose.ops._recurrences.fused.slot_attention.inputs import Inputs
from flacompose.ops._recurrences.fused.slot_attention.kernels import slot_attention_token_kernel
from flacompose.ops._recurrences.matrix import cuda as matrix


def token(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(o [B, 1, H, G, V], final_k [B, H, K, M], final_v [B, H, M, V])``."""
    q, k, v, s, g, initial_k, initial_v, scale = inputs
    (B, _, H, G, K), M, V = q.shape, s.shape[3], v.shape[3]
    o = torch.empty(B, 1, H, G, V, dtype=v.dtype, device=q.device)
    final_k, final_v = (
        torch.empty(B, H, *sizes, dtype=torch.float32, device=q.device) for sizes in ((K, M), (M, V))
    )
    config = token_config(K, M, V)
    tensors = *(x.contiguous() for x in (q, k, v, s)), *map(operand, (g, initial_k, initial_v))
    grid = (B * H * G * tile_count(V, config["BV"]),)
    launch(
        slot_attention_token_kernel,
        grid,
        *tensors,
        o,
        final_k,
        final_v,
        scale=scale,
        G=G,
        K=K,
        M=M,
        V=V,
        **config,
    )
    return o, final_k, final_v


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    return eager.backward(call, matrix.recurrent, matrix.backward)


def token_config(K: int, M: int, V: int) -> dict[str, int]:
    """Block sizes. Registers hold about 8192 elements of each state at a time, and all keys of a slot.

    Every further program of a head reads the state of the keys again, so a head of at most 128 values has one program.
    """
    BK = block(K, 512)
    BM = block(M, min(8192 // BK, 64))
    return {"BK": BK, "BM": BM, "BV": block(V, 128)}
