"""The CPU's figure of one op: its training step beside the token-by-token reference under autograd."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from . import measure
from .cases import Op, Shape
from .report import Row


def training(op: Op, module: ModuleType, shape: Shape) -> Iterator[Row]:
    """Forward and backward in float32."""
    inputs = op.draw(shape, torch.float32, "cpu", grad=True)
    do = torch.randn_like(inputs["v"])
    ours = measure.cpu_ms(measure.step(getattr(module, op.chunk), inputs, do), runs=5)
    other = measure.cpu_ms(measure.step(op.reference, inputs, do), runs=3)
    limit = op.targets.cpu
    yield Row(op.name, shape.label, "forward + backward, float32", "ms", ours, other, max_ratio=limit)
