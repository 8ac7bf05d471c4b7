"""The registered ops of the short convolution: `inputs` lists their arguments, `eager` computes them in PyTorch."""

from __future__ import annotations

from math import prod

import torch

from flacompose.ops._recurrences.forms import define_ops
from flacompose.ops._recurrences.short_conv import eager
from flacompose.ops._recurrences.short_conv.inputs import MAX_WIDTH, SIGNATURE
from flacompose.ops._recurrences.short_conv.inputs import Inputs as Inputs  # for the public functions


def _flops(x, weight, *_, **__) -> int:
    """A multiplication and an addition for each element and column of the weight."""
    return 2 * prod(x) * weight[1]


def has_kernel(dtype: torch.dtype, W: int) -> bool:
    """Whether a GPU computes the op of this dtype and width with kernels, not with PyTorch."""
    return dtype != torch.float64 and W <= MAX_WIDTH


_ops = define_ops(SIGNATURE, eager, forms=("forward", "update"), flops=_flops)
forward, update = _ops["forward"], _ops["update"]
