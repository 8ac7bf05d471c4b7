"""Whole models under torch.compile: the first step with empty caches, the steady step, one-token decoding.

Each model runs in a fresh process with empty caches. Weights and activations are plain bfloat16, without autocast. A
training step is the forward, the cross-entropy and the backward; no optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from . import measure, tuned, warm
from .models import NAMES, PEERS, SOFTMAX, PeerModel, build, first_states
from .processes import Process, answer, command, empty_caches, side_by_side
from .public import attempt
from .report import Row

QUANTITIES = ("compile", "step", "eager", "token")
BEFORE = "before"
FIRST, SECOND = "first step, cold caches", "first step at a second shape"
STEP, EAGER, MEMORY, TOKEN = "step", "step, eager", "peak memory of a step", "one token"
LIMITS = {FIRST: 1.3, SECOND: 1.3}
"""Upper limits of the ratios to softmax attention."""


@dataclass(frozen=True)
class Size:
    """What all models have in common, and the training shapes, each a batch and a length."""

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


def give(case: str, quantity: str, unit: str, value: float) -> None:
    answer(case=case, quantity=quantity, unit=unit, value=value)


def compile_notes() -> Callable[[], str]:
    """A function that says where the compiler's time has gone since it was last called.

    The parts are nested: Dynamo's time has AOTAutograd's in it, and that has Inductor's for the forward. Backwards
    are compiled when they are first called, and Triton's kernels of Inductor in worker processes meanwhile.
    """
    own: list[float] = []
    with contextlib.suppress(ImportError, AttributeError):
        from triton import knobs

        def compiled(*, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                own.append(times.total / 1e6)

        knobs.compilation.listener = compiled
    parts = {
        "Dynamo": "dynamo_cumulative_compile_time_us",
        "AOTAutograd": "aot_autograd_cumulative_compile_time_us",
        "Inductor": "inductor_cumulative_compile_time_us",
        "Inductor's code generation": "inductor_code_gen_cumulative_compile_time_us",
        "backward": "backward_cumulative_compile_time_us",
        "waiting for Triton": "triton_compile_time_us",
    }
    from torch._dynamo.utils import calculate_time_spent, clear_compilation_metrics, get_compilation_metrics

    def note() -> str:
        metrics = get_compilation_metrics()
        sums = {
            part: sum(getattr(metric, field, None) or 0 for metric in metrics) / 1e6
            for part, field in parts.items()
        }
        clear_compilation_metrics()
        texts = [f"{part} {seconds:.1f} s" for part, seconds in sums.items()]
        texts.append(f"{len(own)} Triton kernels in the main process {sum(own):.1f} s of one core")
        own.clear()
        total = calculate_time_spent().get("total_wall_time", 0.0)
        return ", ".join(texts) + f"; torch.compile's own total so far {total:.1f} s"

    return note


def loss_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits, _ = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss


def train_eagerly(model: nn.Module, size: Size, device: str) -> None:
    """Give the steady step at each shape without a compiler."""
    loss = loss_of(model)
    for B, T in size.shapes:
        tokens, targets = torch.randint(size.vocabulary, (2, B, T), device=device)

        def step(tokens: torch.Tensor = tokens, targets: torch.Tensor = targets) -> None:
            model.zero_grad(set_to_none=True)
            loss(tokens, targets).backward()

        give(f"B{B} T{T}", EAGER, "ms", measure.wall_us(step, calls=5, rounds=3) / 1e3)
    model.zero_grad(set_to_none=True)


def train(model: nn.Module, size: Size, wanted: Sequence[str], device: str, backend: str) -> None:
    """Give the first step at each shape and, where wanted, the steady step and its memory."""
    where = compile_notes()
    inputs = [torch.randint(size.vocabulary, (2, B, T), device=device) for B, T in size.shapes]
    measure.synchronize()
    start = time.perf_counter()
    # The peer's operators are not for the compiler to see: its model is cut at each of them.
    compiled = torch.compile(loss_of(model), fullgraph=not isinstance(model, PeerModel), backend=backend)
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
        answer(note=f"{case}, first step: {where()}")
        if "step" in wanted:
            give(case, STEP, "ms", measure.wall_us(step, calls=5, rounds=3) / 1e3)
            if device == "cuda":
                model.zero_grad(set_to_none=True)
                give(case, MEMORY, "MiB", measure.peak_mib(step))
        measure.synchronize()
        start = time.perf_counter()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def decode(model: nn.Module, device: str, backend: str, dtype: torch.dtype) -> None:
    """Give the time of one token at batch 1: in eager mode, compiled, and replayed from a CUDA graph."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def time_of(step: Callable[..., tuple[torch.Tensor, list[Any]]]) -> float:
        states = first_states(model, device, dtype)

        def one() -> None:
            nonlocal states
            _, states = step(token, states)

        return measure.wall_us(one, calls=20) / 1e3

    give("B1 T1", f"{TOKEN}, eager", "ms", time_of(model))
    torch.compiler.reset()
    give("B1 T1", f"{TOKEN}, compiled", "ms", time_of(torch.compile(model, fullgraph=True, backend=backend)))
    if device == "cuda":
        torch.compiler.reset()
        give("B1 T1", f"{TOKEN}, CUDA graph", "ms", replayed_ms(model, token, dtype))


def replayed_ms(model: nn.Module, token: torch.Tensor, dtype: torch.dtype) -> float:
    """One token from a CUDA graph. The states stay where they are, and the graph writes the new ones there."""
    from torch._dynamo.utils import counters

    states = first_states(model, str(token.device), dtype)
    held = [x.clone() for x in pytree.tree_leaves(states)]
    structure = pytree.tree_structure(states)
    for x in held:
        torch._dynamo.mark_static_address(x)

    def step(token: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        logits, new = model(token, pytree.tree_unflatten(held, structure))
        for old, x in zip(held, pytree.tree_leaves(new), strict=True):
            if old is not x:
                old.copy_(x)
        return logits

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")

    def one() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(token, held)

    taken = measure.wall_us(one, calls=50) / 1e3
    if skipped := counters["inductor"]["cudagraph_skips"]:
        answer(note=f"{skipped} graphs of decoding were not recorded: {TOKEN}, CUDA graph, is without them")
    return taken


@dataclass(frozen=True)
class Figure:
    """One number of one model; `side` is ``flacompose``, or ``before`` for another checkout's."""

    model: str
    side: str
    case: str
    quantity: str
    unit: str
    value: float


def take(
    names: Sequence[str],
    size: Size,
    wanted: Sequence[str],
    device: str,
    before: Path | None = None,
    *,
    jobs: int = 1,
    backend: str = "inductor",
    timeout_s: float = 400.0,
    warm_peer: tuple[float, int] | None = None,
    tune_ms: float | None = None,
) -> Iterator[Figure | str]:
    """Figures and notes as they come, of every model in its own process, and of `before`'s flacompose beside it.

    `warm_peer` is for how many seconds, and in how many processes, the candidates of a peer's model are compiled
    beforehand, and `tune_ms` for how long it times each of them.
    """
    tasks: list[tuple[str, str, Path | None]] = []
    for name in names:
        tasks.append((name, "flacompose", None))
        if before is not None and name not in (SOFTMAX, *PEERS):
            tasks.append((name, BEFORE, before))

    def run(
        name: str, side: str, package: Path | None, start: Callable[..., Process]
    ) -> Iterator[Figure | str]:
        options = ["--device", device, "--backend", backend, "--quantities", *wanted, *size.arguments()]
        options += [] if tune_ms is None else ["--tune-ms", str(tune_ms)]
        label = name if side == "flacompose" else f"{name} {side}"
        asked = command("model", [name, *options], package)
        with contextlib.ExitStack() as stack:
            env = stack.enter_context(empty_caches())
            if name in PEERS and warm_peer is not None:
                yield f"{name}: {warm.side_by_side(asked, *warm_peer, option='--share', env=env)}"
            p = stack.enter_context(contextlib.closing(start(asked, env)))
            end = time.monotonic() + timeout_s
            try:
                while reply := p.receive(max(1.0, end - time.monotonic())):
                    yield f"{label}, {reply['note']}" if "note" in reply else Figure(name, side, **reply)
            except (RuntimeError, TimeoutError) as error:
                yield f"{label} failed: {error}"

    yield from side_by_side([partial(run, *task) for task in tasks], jobs)


def candidates_only(model: nn.Module, size: Size, device: str, index: int, workers: int) -> None:
    """Compile a share of the peer's candidates for a training step at each shape, and launch none."""
    for tuner in tuned.autotuners():
        warm.compile_only(tuner, index, workers)
    loss = loss_of(model)
    for B, T in size.shapes:
        loss(*torch.randint(size.vocabulary, (2, B, T), device=device)).backward()


def rows(figures: Sequence[Figure]) -> list[Row]:
    """One row a figure: a model's beside softmax attention's; another checkout's, or the peer's, beside the model's."""
    values = {(f.model, f.side, f.case, f.quantity): f.value for f in figures}
    found = []
    for f in figures:

        def ours_of(model: str, f: Figure = f) -> float | None:
            return values.get((model, "flacompose", f.case, f.quantity))

        ours: float | None
        other: float | None
        if f.model == SOFTMAX:
            name, baseline, ours, other = SOFTMAX, SOFTMAX, None, f.value
        elif f.model in PEERS:
            name = f.model.removeprefix("fla-")
            baseline, ours, other = "fla", ours_of(name), f.value
        elif f.side == BEFORE:
            name, baseline, ours, other = f.model, BEFORE, ours_of(f.model), f.value
        else:
            name, baseline, ours, other = f.model, SOFTMAX, f.value, ours_of(SOFTMAX)
        limit = LIMITS.get(f.quantity) if baseline == SOFTMAX != name else None
        found.append(
            Row(f"{name} model", f.case, f.quantity, f.unit, ours, other, max_ratio=limit, beside=baseline)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One model in this process, which has to be a fresh one.")
    parser.add_argument("name", choices=[*NAMES, *PEERS])
    parser.add_argument("--quantities", nargs="+", choices=QUANTITIES, default=["compile", "step"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument(
        "--tune-ms", type=float, metavar="MS", help="time the peer's candidates for this long"
    )
    parser.add_argument(
        "--share",
        nargs=2,
        type=int,
        metavar=("I", "N"),
        help="compile the I-th of N shares of its candidates",
    )
    add_size(parser.add_argument)
    arguments = parser.parse_args()
    size, device, dtype = size_of(arguments), arguments.device, torch.bfloat16
    torch.manual_seed(0)
    if arguments.share:  # layers are all alike but for the first
        size = dataclasses.replace(size, layers=min(2, size.layers), vocabulary=min(512, size.vocabulary))
    model = build(arguments.name, size.layers, size.width, size.vocabulary).to(device=device, dtype=dtype)
    if arguments.share:
        candidates_only(model, size, device, *arguments.share)
        return
    if arguments.tune_ms is not None:
        tuned.shorten(arguments.tune_ms)
    answer(note=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    # The start of the device, of its matrix products and of autograd's thread is no part of compiling.
    x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)
    parts: list[tuple[str, Callable[[], None]]] = []
    if {"compile", "step"} & set(arguments.quantities):
        compiled = partial(train, model, size, arguments.quantities, device, arguments.backend)
        parts.append(("the compiled step", compiled))
    if "eager" in arguments.quantities:
        # It compiles kernels too, and comes first where the compiler, which may fail, is not timed.
        at = len(parts) if "compile" in arguments.quantities else 0
        parts.insert(at, ("the eager step", partial(train_eagerly, model, size, device)))
    for what, part in parts:
        attempt(what, part)
    if "token" in arguments.quantities and not isinstance(model, PeerModel):
        torch.compiler.reset()
        decode(model.eval(), device, arguments.backend, dtype)


if __name__ == "__main__":
    main()
