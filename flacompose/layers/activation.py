"""Activations of gates and feature maps, by the names of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from flacompose.layers import _check
from flacompose.ops._tensors.gate_formulas import log_sigmoid as log_sigmoid  # for the layers


def sqrelu(x: Tensor) -> Tensor:
    """``max(x, 0)^2``."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "logsigmoid": log_sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": sqrelu,
    "gelu": partial(F.gelu, approximate="tanh"),
}


def activation(argument: str, name: str) -> Callable[[Tensor], Tensor]:
    """The activation called ``name``. Errors call the argument ``argument``."""
    why = " (bias_gelu takes a bias, which this layer does not have)" if name == "bias_gelu" else ""
    _check.one_of(argument, name, ACTIVATIONS, why)
    return ACTIVATIONS[name]
