"""The lower bound of a training step: the time and the memory of reading its inputs and writing its results.

Ops that no other library has in kernels are compared with it. PyTorch copies tensors that have a counterpart among the
results, and sums the other tensors, which only reads them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .cases import Functions, Op

NAME = "floor"


class _Traffic(torch.autograd.Function):
    """The memory traffic of a call and its backward. Its results have only the right shapes."""

    @staticmethod
    def forward(ctx: Any, at: int, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        for i, x in enumerate(inputs):
            if i != at:
                x.sum()
        return inputs[at].clone()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        do.sum()
        return None, *(x.clone() for x in ctx.saved_tensors)


def of(op: Op) -> Functions:
    """A side whose chunk function only reads the inputs and writes the output, and likewise in the backward."""
    at = list(op.inputs).index(op.output)

    def scan(**given: Any) -> Any:
        o = _Traffic.apply(at, *(given[name] for name in op.inputs))
        return o if op.adapt else (o, None)

    return SimpleNamespace(**{op.chunk: scan})
