"""The registered ops of scalar decay: a chunked form and a recurrent one, of the same function, with one backward.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

`v`, `g` and states may have a multiple of the heads of `q` and `k`. `gate_gradient` says what the
gradient of `g` is for, as `eager` explains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._define import define_op
from flacompose.ops.families.scalar_decay import eager
from flacompose.ops.families.scalar_decay.eager import CONSTANT, PER_TOKEN, SUMMED

__all__ = ["CONSTANT", "PER_TOKEN", "SUMMED", "chunk", "recurrent"]

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, "
    "float scale, int gate_gradient"
)
_HEADS = {"q": 2, "k": 2, "v": 2, "g": 2, "o": 2, "initial_state": 1, "final_state": 1}
_BATCH = dict.fromkeys(_HEADS, 0)


def _forward_fake(q, k, v, g, initial_state, cu_seqlens, scale, gate_gradient):
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return v.new_empty(v.shape), q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)


def _backward_fake(q, k, v, g, initial_state, cu_seqlens, scale, gate_gradient, do, d_final_state):
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, g, initial_state))


def _forward_flops(q, k, v, *_, **__) -> int:
    """The recurrence's own products: one write and one read of the state a token."""
    B, T, H, V = v
    return 4 * B * T * H * q[-1] * V


def _backward_flops(q, k, v, *_, **__) -> int:
    return 2 * _forward_flops(q, k, v)


def _chunk_triton(*args) -> tuple[Tensor, ...]:
    from flacompose.ops.families.scalar_decay import cuda

    return cuda.chunk(*args)


def _recurrent_triton(*args) -> tuple[Tensor, ...]:
    from flacompose.ops.families.scalar_decay import cuda

    return cuda.recurrent(*args)


def _backward_triton(*args) -> tuple[Tensor, ...]:
    from flacompose.ops.families.scalar_decay import cuda

    return cuda.backward(*args)


backward = define_op(
    "scalar_decay_backward",
    f"({_INPUTS}, Tensor? do, Tensor? d_final_state) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor d_initial_state)",
    eager=eager.backward,
    triton=_backward_triton,
    fake=_backward_fake,
    heads=_HEADS,
    batch=_BATCH,
    flops=_backward_flops,
)


def _define_form(name: str, triton):
    return define_op(
        name,
        f"({_INPUTS}) -> (Tensor o, Tensor final_state)",
        eager=eager.forward,
        triton=triton,
        fake=_forward_fake,
        backward=backward,
        heads=_HEADS,
        batch=_BATCH,
        autocast=("q", "k", "v"),
        flops=_forward_flops,
    )


chunk = _define_form("scalar_decay_chunk", _chunk_triton)
recurrent = _define_form("scalar_decay_recurrent", _recurrent_triton)
