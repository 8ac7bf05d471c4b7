"""The registered ops of the short convolution: `inputs` lists their arguments, `eager` computes them in PyTorch."""

from __future__ import annotations

from math import prod

from torch import Tensor

from flacompose.ops._dtype import state_dtype
from flacompose.ops._varlen import sequence_count
from flacompose.ops.families._op import define_forms
from flacompose.ops.families.short_conv import eager
from flacompose.ops.families.short_conv.inputs import Inputs


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, weight = inputs.x, inputs.weight
    N = sequence_count(x, inputs.cu_seqlens)
    return x.new_empty(x.shape), x.new_empty(N, *weight.shape, dtype=state_dtype(x.dtype))


def _flops(x, weight, *_, **__) -> int:
    """A multiplication and an addition for each element and column of the weight."""
    return 2 * prod(x) * weight[1]


(forward,) = define_forms(
    "short_conv",
    eager,
    Inputs,
    forms=("forward",),
    arguments="Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, bool silu",
    gradients="Tensor dx, Tensor dweight, Tensor dbias, Tensor d_initial_state",
    axes={
        "x": "B T D",
        "weight": "D W",
        "bias": "D",
        "o": "B T D",
        "initial_state": "N D W",
        "final_state": "N D W",
    },
    autocast={"x": None},
    fake=_fake,
    flops=_flops,
)
