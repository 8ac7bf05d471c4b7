"""The low-rank projections of RWKV6 and RWKV7, with the names of checkpoints."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from flacompose.layers.initialization import orthogonal_, with_initializers
from flacompose.layers.recurrent import Factory


def lora(
    inputs: int,
    rank: int,
    outputs: int,
    activation: nn.Module,
    factory: Factory,
    bias: Callable[[Tensor], Any] | None = nn.init.zeros_,
) -> nn.Sequential:
    r"""$\operatorname{activation}(x W_1)\, W_2 + b$. `bias` initializes $b$; with None there is no $b$.

    $W_1$ is initialized with 0, so that the output is $b$ at first, and $W_2$ is orthogonal.
    """
    down = with_initializers(nn.Linear(inputs, rank, bias=False, **factory), weight=nn.init.zeros_)
    inits: dict[str, Callable[[Tensor], Any]] = {
        "weight": partial(orthogonal_, gain=0.1 * math.sqrt(max(rank / outputs, 1)))
    }
    if bias is not None:
        inits["bias"] = bias
    up = with_initializers(nn.Linear(rank, outputs, bias=bias is not None, **factory), **inits)
    return named("lora", nn.Sequential(down, activation, up))


def named(name: str, module: nn.Module) -> nn.Sequential:
    """`module` with the `name` that it has in checkpoints."""
    return nn.Sequential(OrderedDict({name: module}))
