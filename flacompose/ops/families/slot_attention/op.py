"""The registered op of one token of slot attention, and its backward.

The op is the same function as two calls of vector decay's. What it has for itself is the kernel: it reads and writes
both states in one launch, where the calls take one each.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor

from flacompose.ops._define import define_op
from flacompose.ops._dtype import state_dtype
from flacompose.ops.families._op import on_cuda
from flacompose.ops.families.slot_attention import eager
from flacompose.ops.families.slot_attention.inputs import Inputs

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor s, Tensor g, Tensor? initial_k, Tensor? initial_v, float scale"
)
_AXES = {
    "q": "B T H G K",
    "k": "B T H K",
    "v": "B T H V",
    "s": "B T H M",
    "g": "B T H M",
    "initial_k": "N H K M",
    "initial_v": "N H M V",
    "o": "B T H G V",
    "final_k": "N H K M",
    "final_v": "N H M V",
}


def _fake(*args: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*args)
    q, v = inputs.q, inputs.v
    (B, _, H, G, K), M, V = q.shape, inputs.s.shape[3], v.shape[3]
    dtype = state_dtype(q.dtype)
    o = v.new_empty(B, 1, H, G, V)
    return o, q.new_empty(B, H, K, M, dtype=dtype), q.new_empty(B, H, M, V, dtype=dtype)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    wanted = [x if want else None for x, want in zip(args, args[-1])]
    return tuple(args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _flops(q: Any, k: Any, v: Any, s: Any, *_: Any, **__: Any) -> int:
    """Those of one write and one read of each state for every query."""
    B, T, H, G, K = q
    return 4 * B * T * H * G * s[-1] * (K + v[-1])


_backward = define_op(
    "slot_attention_token_backward",
    f"({_ARGUMENTS}, Tensor? do, Tensor? d_final_k, Tensor? d_final_v, bool[] output_mask) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor ds, Tensor dg, Tensor d_initial_k, Tensor d_initial_v)",
    eager=lambda *args: eager.backward(Inputs(*args[:-4]), *args[-4:]),
    triton=cache(partial(on_cuda, "slot_attention", "backward")),
    fake=_backward_fake,
    axes=_AXES,
    flops=lambda *args, **kwargs: 2 * _flops(*args, **kwargs),
)
token = define_op(
    "slot_attention_token",
    f"({_ARGUMENTS}) -> (Tensor o, Tensor final_k, Tensor final_v)",
    eager=lambda *args: eager.forward(Inputs(*args)),
    triton=cache(partial(on_cuda, "slot_attention", "token")),
    one_launch=lambda *_: True,
    fake=_fake,
    backward=_backward,
    axes=_AXES,
    autocast={"q": None, "k": None, "v": None, "s": None},
    flops=_flops,
)
