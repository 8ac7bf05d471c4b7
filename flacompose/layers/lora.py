"""Projections of low rank as RWKV6 and RWKV7 have them, under their names in checkpoints."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from flacompose.layers.first_values import orthogonal_, with_first_values
from flacompose.layers.recurrent import Factory


def lora(
    inputs: int,
    rank: int,
    outputs: int,
    activation: nn.Module,
    factory: Factory,
    bias: Callable[[Tensor], Any] | None = nn.init.zeros_,
) -> nn.Sequential:
    r"""$\operatorname{activation}(x W_1)\, W_2 + b$; `bias` fills $b$ with its first values, None stands for no $b$.

    At first the projection is its bias for every input, since $W_1$ is 0; $W_2$ is orthogonal.
    """
    down = with_first_values(nn.Linear(inputs, rank, bias=False, **factory), weight=nn.init.zeros_)
    inits: dict[str, Callable[[Tensor], Any]] = {
        "weight": partial(orthogonal_, gain=0.1 * math.sqrt(max(rank / outputs, 1)))
    }
    if bias is not None:
        inits["bias"] = bias
    up = with_first_values(nn.Linear(rank, outputs, bias=bias is not None, **factory), **inits)
    return named("lora", nn.Sequential(down, activation, up))


def named(name: str, module: nn.Module) -> nn.Sequential:
    """`module` under the name that it has in checkpoints."""
    return nn.Sequential(OrderedDict({name: module}))
