"""Figures on a CPU: training steps in float32, beside implementations in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from . import measure
from .cases import Functions, Op, Shape
from .report import Row

STEP = "forward + backward, float32"


def training(op: Op, module: Functions, shape: Shape) -> Iterator[Row]:
    """An op beside its reference, which goes token by token, under autograd."""
    assert op.reference is not None
    inputs = op.draw(shape, torch.float32, "cpu", grad=True)
    do = op.draw_do(shape, torch.float32, "cpu")
    ours = measure.cpu_ms(measure.step(op.chunk_of(module), inputs, do), runs=5)
    other = measure.cpu_ms(measure.step(op.reference, inputs, do), runs=3)
    yield Row(op.name, op.label(shape), STEP, "ms", ours, other, max_ratio=op.targets.cpu)


def mamba2(module: Functions, shape: Shape) -> Iterator[Row]:
    """Mamba-2's scan in chunks of 256 tokens, beside the one that transformers uses without Mamba-2's kernels."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    B, T, H, S, P = shape[:5]
    x = torch.randn(B, T, shape.HV, P)
    inputs = {
        "dt": F.softplus(torch.randn(B, T, shape.HV)),
        "A": -torch.randn(shape.HV).exp(),
        "B": torch.randn(B, T, H, S),
        "C": torch.randn(B, T, H, S),
    }
    do = torch.randn_like(x)

    def step_ms(scan) -> float:
        def fn(x, **inputs):
            return scan(x, **inputs, chunk_size=256, return_final_states=True)

        leaves = {name: y.requires_grad_() for name, y in {"x": x, **inputs}.items()}
        return measure.cpu_ms(measure.step(fn, leaves, do), runs=3)

    ours, other = step_ms(module.mamba_chunk_scan_combined), step_ms(mamba2_chunk_scan)
    yield Row("mamba_chunk_scan_combined", shape.label, STEP, "ms", ours, other, max_ratio=0.5)
