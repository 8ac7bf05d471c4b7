"""Models under torch.compile: the first step with empty caches, and later steps.

Each model runs in a fresh process with empty caches. Weights and activations are plain bfloat16, without autocast. A
training step is the forward, the cross-entropy and the backward; no optimizer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import measure
from .models import NAMES, SOFTMAX, build
from .processes import Figure, answer, attempt, command, empty_caches, figures, give
from .report import Row

QUANTITIES = ("compile", "step")
BEFORE = "before"
FIRST, SECOND = "first step, cold caches", "first step at a second shape"
STEP, MEMORY = "step", "peak memory of a step"
LIMITS = {FIRST: 1.3, SECOND: 1.3}
"""Upper limits of the ratios to softmax attention."""


@dataclass(frozen=True)
class Size:
    """The common sizes of all models, and the training shapes, each a batch and a length."""

    layers: int = 12
    width: int = 1024
    vocabulary: int = 32_000
    shapes: tuple[tuple[int, int], ...] = ((8, 2048), (1, 16384))

    def arguments(self) -> list[str]:
        shapes = [f"{B}x{T}" for B, T in self.shapes]
        sizes = {"--layers": self.layers, "--width": self.width, "--vocabulary": self.vocabulary}
        return [*(str(x) for pair in sizes.items() for x in pair), "--model-shapes", *shapes]


def add_size(add: Callable[..., Any]) -> None:
    """The options of a model's size, to a parser."""
    add("--layers", type=int, default=Size.layers, help="blocks of a model (default: %(default)s)")
    add("--width", type=int, default=Size.width, help="its width (default: %(default)s)")
    add("--vocabulary", type=int, default=Size.vocabulary, help="its vocabulary (default: %(default)s)")
    add(
        "--model-shapes",
        nargs="+",
        type=_shape,
        default=Size.shapes,
        metavar="BxT",
        help="its training shapes",
    )


def _shape(text: str) -> tuple[int, int]:
    B, T = map(int, text.split("x"))
    return B, T


def size_of(arguments: argparse.Namespace) -> Size:
    shapes = tuple(arguments.model_shapes)
    return Size(arguments.layers, arguments.width, arguments.vocabulary, shapes)


def loss_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits, _ = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


def train(model: nn.Module, size: Size, wanted: Sequence[str], device: str, backend: str) -> None:
    """Give the first step at each shape and, if wanted, the time and memory of later steps."""
    inputs = [torch.randint(size.vocabulary, (2, B, T), device=device) for B, T in size.shapes]
    measure.synchronize()
    start = time.perf_counter()
    compiled = torch.compile(loss_of(model), fullgraph=True, backend=backend)
    for (B, T), (tokens, targets), quantity in zip(size.shapes, inputs, (FIRST, SECOND), strict=False):

        def step(tokens: torch.Tensor = tokens, targets: torch.Tensor = targets) -> None:
            model.zero_grad(set_to_none=True)
            compiled(tokens, targets).backward()

        step()
        measure.synchronize()
        case = f"B{B} T{T}"
        seconds = time.perf_counter() - start
        if "compile" in wanted:
            give(case, quantity, "s", seconds)
        if "step" in wanted:
            give(case, STEP, "ms", measure.wall_us(step, calls=5, rounds=3) / 1e3)
            if device == "cuda":
                model.zero_grad(set_to_none=True)
                give(case, MEMORY, "MiB", measure.peak_mib(step))
        measure.synchronize()
        start = time.perf_counter()
    model.zero_grad(set_to_none=True)


def take(
    names: Sequence[str],
    size: Size,
    wanted: Sequence[str],
    device: str,
    before: Path | None = None,
    *,
    backend: str = "inductor",
    timeout_s: float = 400.0,
) -> Iterator[Figure | str]:
    """Figures and notes of every model in its own process, and of the flacompose in `before`."""
    options = ["--device", device, "--backend", backend, "--quantities", *wanted, *size.arguments()]
    for name in names:
        sides: dict[str, Path | None] = {"flacompose": None}
        if before is not None and name != SOFTMAX:
            sides[BEFORE] = before
        for side, package in sides.items():
            asked = command("model", [name, *options], package)
            with empty_caches() as env:
                yield from figures(asked, name, side, timeout_s, env)


def rows(taken: Sequence[Figure]) -> list[Row]:
    """One row per figure, beside softmax attention; figures of another checkout are beside the model."""
    values = {(f.model, f.side, f.case, f.quantity): f.value for f in taken}
    found = []
    for f in taken:
        baseline = BEFORE if f.side == BEFORE else SOFTMAX
        ours = None if f.model == SOFTMAX else values.get((f.model, "flacompose", f.case, f.quantity))
        softmax = values.get((SOFTMAX, "flacompose", f.case, f.quantity))
        other = f.value if f.side == BEFORE else softmax
        limit = LIMITS.get(f.quantity) if baseline == SOFTMAX != f.model else None
        name = f"{f.model} model"
        found.append(Row(name, f.case, f.quantity, f.unit, ours, other, max_ratio=limit, beside=baseline))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One model in this process, which has to be a fresh one.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quantities", nargs="+", choices=QUANTITIES, default=["compile", "step"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", default="inductor")
    add_size(parser.add_argument)
    arguments = parser.parse_args()
    size, device, dtype = size_of(arguments), arguments.device, torch.bfloat16
    torch.manual_seed(0)
    model = build(arguments.name, size.layers, size.width, size.vocabulary).to(device=device, dtype=dtype)
    answer(note=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    # Start the device, its matrix products and autograd's thread before compilation is timed.
    x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)
    compiled = partial(train, model, size, arguments.quantities, device, arguments.backend)
    attempt("the compiled step", compiled)


if __name__ == "__main__":
    main()
