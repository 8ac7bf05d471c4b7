"""Chunked PyTorch of the linear recurrence with a matrix state: one token, or the scheme of the arguments."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix.channel_decay import eager as channel_decay
from flacompose.ops._recurrences.matrix.delta_rule import eager as delta_rule
from flacompose.ops._recurrences.matrix.head_decay import eager as head_decay
from flacompose.ops._recurrences.matrix.inputs import NORM_EPS, Inputs, scheme
from flacompose.ops._recurrences.matrix.low_rank import eager as low_rank
from flacompose.ops._recurrences.matrix.token import token
from flacompose.ops._tensors.dtype import upcast

SCHEMES: dict[str, ModuleType] = {
    "channel_decay": channel_decay,
    "delta_rule": delta_rule,
    "head_decay": head_decay,
    "low_rank": low_rank,
}


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
        return token(**inputs._asdict())
    o, final_state = SCHEMES[scheme(inputs)].forward(inputs)
    return o, final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    gradients: Gradients = SCHEMES[scheme(call.inputs)].backward(call)
    return gradients


def update(inputs: Inputs, normalize: int) -> tuple[Tensor, Tensor]:
    """The form "update": `forward`, after dividing queries and keys by their norms if `normalize`."""
    if normalize:
        inputs = inputs._replace(q=normalized(inputs.q), k=normalized(inputs.k))
    return forward(inputs)


def normalized(x: Tensor) -> Tensor:
    """``x [..., K]`` divided by the root of `NORM_EPS` and the sum of its squares, in the dtype of `x`."""
    wide = upcast(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).to(x.dtype)
