"""Chunked PyTorch of the linear recurrence with a matrix state: one token, or the scheme of the arguments."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix import walk
from flacompose.ops._recurrences.matrix.channel_decay.eager import ChannelDecay
from flacompose.ops._recurrences.matrix.delta_rule.eager import DeltaRule
from flacompose.ops._recurrences.matrix.head_decay.eager import HeadDecay
from flacompose.ops._recurrences.matrix.inputs import NORM_EPS, Inputs, scheme
from flacompose.ops._recurrences.matrix.low_rank.eager import LowRank
from flacompose.ops._recurrences.matrix.token import token
from flacompose.ops._tensors.dtype import upcast

SCHEMES: dict[str, type[walk.Segment]] = {
    "channel_decay": ChannelDecay,
    "delta_rule": DeltaRule,
    "head_decay": HeadDecay,
    "low_rank": LowRank,
}


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
        return token(**inputs._asdict())
    return walk.forward(inputs, SCHEMES[scheme(inputs)])


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    return walk.backward(call, SCHEMES[scheme(call.inputs)])


def update(inputs: Inputs, normalize: int) -> tuple[Tensor, Tensor]:
    """The form "update": `forward`, after dividing queries and keys by their norms if `normalize`."""
    if normalize:
        inputs = inputs._replace(q=normalized(inputs.q), k=normalized(inputs.k))
    return forward(inputs)


def normalized(x: Tensor) -> Tensor:
    """``x [..., K]`` divided by the root of `NORM_EPS` and the sum of its squares, in the dtype of `x`."""
    wide = upcast(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).to(x.dtype)
