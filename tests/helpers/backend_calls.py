"""What the compiler hands to its backend, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def _unchanged(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return make_boxed_func(module.forward)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """The function compiled for every size, and the numbers of nodes of the graphs that the backend was given."""
    sizes, through_autograd = [], aot_autograd(fw_compiler=_unchanged)

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        sizes.append(len(module.graph.nodes))
        return through_autograd(module, inputs)

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=True), sizes
