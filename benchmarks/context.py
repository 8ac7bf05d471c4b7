"""One row of many tokens, on one GPU and, by context parallelism, on several GPUs.

The models are RecurrentLMs with a SwiGLU in every block, weights and activations bfloat16. A training step is the
forward, the cross-entropy and the backward, and on several GPUs the sum of the gradients; no optimizer. On both sides
the backward recomputes every block from its input, and the loss in pieces of `PIECE` tokens. So memory never holds all
logits, nor the activations of more than one block.

The ranks of a model are processes that take all of its figures. They compute their parts of the row, and then, at the
same time, each the complete row by itself. So both sides see the same host and the same clocks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import measure, models
from .model import add_size, size_of
from .processes import Figure, answer, command, figures
from .report import Row

ONE, SEVERAL = "one GPU", "several"
STEP, MEMORY, LOSS = "training step", "peak memory of a rank", "loss"
FROM_TOKENS = 131_072
"""The first length with upper limits. On `n` GPUs a step takes at most 1 / (0.85 n) of the time on one."""
LIMITS = {STEP: 1 / 0.85, MEMORY: 1.1}
"""Upper limits of the ratios to one GPU, times the number of GPUs."""
TOKENS = (65_536, 131_072, 262_144)
PIECE = 2048

MODELS = {name: models.LAYERS[name] for name in ("gla", "gated_deltanet", "mamba2")}
MODELS["gated_deltanet"] = ("GatedDeltaNet", {"num_heads": 6, "head_dim": 128})
"""The layer of each model, and its arguments except for defaults."""


class Trained:
    """A model and its training step, which recomputes the blocks. If `shared`, each rank has a part of a row."""

    def __init__(self, model: Any, shared: bool) -> None:
        self.model, self.shared = model, shared
        self.head, model.lm_head = model.lm_head, nn.Identity()
        for block in model.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    def to(self, device: str) -> None:
        self.model.to(device)
        self.head.to(device)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.model.parameters(), *self.head.parameters()]

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of a row, or this rank's part of it. Every rank gets the gradients of the complete row."""
        for p in self.parameters():
            p.grad = None
        total = tokens.numel()
        if self.shared:
            ranks, rank = dist.get_world_size(), dist.get_rank()
            tokens, targets = (x.tensor_split(ranks, 1)[rank] for x in (tokens, targets))
        hidden, _ = self.model(tokens)
        losses = [
            checkpoint(self._loss, h, y, use_reentrant=False, preserve_rng_state=False)
            for h, y in zip(hidden[0].split(PIECE), targets[0].split(PIECE), strict=True)
        ]
        loss = torch.stack(losses).sum() / total
        loss.backward()
        if self.shared:
            sum_over_ranks(self.gradients())
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


def sum_over_ranks(gradients: Sequence[Tensor]) -> None:
    """Replace the gradients by their sums, sent together."""
    for dtype in dict.fromkeys(x.dtype for x in gradients):
        same = [x for x in gradients if x.dtype == dtype]
        flat = torch.cat([x.flatten() for x in same])
        dist.all_reduce(flat)
        sums = flat.split([x.numel() for x in same])
        torch._foreach_copy_(same, [y.view_as(x) for x, y in zip(same, sums, strict=True)])


def largest(value: float) -> float:
    """The largest value of all ranks, which wait for each other on the host."""
    x = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def slowest_ms(fn: Callable[[], object], rounds: int) -> float:
    """Median over the rounds of the wall-clock milliseconds of the slowest rank."""
    taken = []
    for _ in range(rounds):
        measure.synchronize()
        largest(0)
        start = time.perf_counter()
        fn()
        measure.synchronize()
        taken.append(largest(time.perf_counter() - start))
    return median(taken) * 1e3


def take_length(sides: Sequence[Trained], T: int, vocabulary: int, device: str, rounds: int) -> bool:
    """Give the figures of one length for each side with enough memory; return whether both have it."""
    fits = True
    generator = torch.Generator().manual_seed(T)
    tokens, targets = torch.randint(vocabulary, (2, 1, T), generator=generator).to(device)
    for trained in sides:
        side = SEVERAL if trained.shared else ONE
        give = partial(tell, side, f"B1 T{T}")
        trained.to(device)
        start, loss = time.perf_counter(), None
        with contextlib.suppress(torch.OutOfMemoryError):
            loss = trained.step(tokens, targets)
        measure.synchronize()
        first = time.perf_counter() - start
        if largest(loss is None):
            fits = False
            tell_note(f"{side}, B1 T{T}: out of memory")
        else:
            assert loss is not None
            norm = torch.stack([x.float().norm() for x in trained.gradients()]).norm().item()
            total = loss.clone()
            if trained.shared:
                dist.all_reduce(total)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            ms = slowest_ms(partial(trained.step, tokens, targets), rounds)
            give(STEP, "ms", ms)
            if device == "cuda":
                give(MEMORY, "MiB", largest(torch.cuda.max_memory_allocated() / 2**20))
            give(LOSS, "", total.item())
            give("norm of the gradients", "", norm)
            tell_note(f"{side}, B1 T{T}: first step in {first:.1f} s")
        for p in trained.parameters():
            p.grad = None
        trained.to("cpu")
        if device == "cuda":
            torch.cuda.empty_cache()
    return fits


def tell(side: str, case: str, quantity: str, unit: str, value: float) -> None:
    if dist.get_rank() == 0:
        answer(side=side, case=case, quantity=quantity, unit=unit, value=value)


def tell_note(note: str) -> None:
    if dist.get_rank() == 0:
        answer(note=note)


def rank_of(rank: int, ranks: int, port: int, arguments: argparse.Namespace) -> None:
    """One rank. It ends with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    device, size = arguments.device, size_of(arguments)
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
        device_id=torch.device(device, rank) if device == "cuda" else None,
    )
    mesh = dist.device_mesh.init_device_mesh(device, (ranks,))
    torch.manual_seed(0)
    layer, options = MODELS[arguments.name]
    model = models.recurrent(layer, options, size.layers, size.width, size.vocabulary)
    model.to(device, torch.bfloat16)
    for p in model.parameters():
        dist.broadcast(p.detach(), 0)
    distributed = importlib.import_module("flacompose.distributed")
    several = Trained(distributed.context_parallel(copy.deepcopy(model), mesh), True)
    sides = [several, Trained(model, False)]
    for trained in sides:
        trained.to("cpu")
    for T in arguments.tokens:
        if not take_length(sides, T, size.vocabulary, device, arguments.rounds):
            break
    dist.barrier()
    os._exit(0)  # the threads of gloo race with the shutdown of the interpreter


def take(names: Sequence[str], options: Sequence[str], *, timeout_s: float = 400.0) -> Iterator[Figure | str]:
    """Figures and notes of one model after the other."""
    for name in names:
        yield from figures(command("context", [name, *options]), name, "flacompose", timeout_s)


def rows(taken: Sequence[Figure], ranks: int) -> list[Row]:
    """Every figure of several GPUs beside the figure of one."""
    values = {(f.model, f.side, f.case, f.quantity): f.value for f in taken}
    found = []
    for f in {(f.model, f.case, f.quantity): f for f in taken}.values():
        several, one = (values.get((f.model, side, f.case, f.quantity)) for side in (SEVERAL, ONE))
        limit = LIMITS.get(f.quantity)
        is_long = int(f.case.rpartition("T")[2]) >= FROM_TOKENS
        max_ratio = round(limit / ranks, 3) if limit and is_long and one is not None else None
        found.append(Row(f"{f.model} model", f.case, f.quantity, f.unit, several, one, max_ratio=max_ratio))
    return found


def add_options(add: Callable[..., Any]) -> None:
    """The options that a run passes on, to a parser."""
    add(
        "--tokens",
        nargs="+",
        type=int,
        default=list(TOKENS),
        metavar="T",
        help="lengths of the row, up to the first that one side lacks the memory for",
    )
    add("--ranks", type=int, default=2, help="GPUs, or processes on a CPU (default: %(default)s)")
    add("--rounds", type=int, default=3, help="steps of which the median is taken (default: %(default)s)")


def passed_on(arguments: argparse.Namespace, device: str) -> list[str]:
    """The options of a process, for `main`."""
    size = size_of(arguments)
    options = ["--device", device, *size.arguments()]
    options += ["--tokens", *map(str, arguments.tokens), "--ranks", str(arguments.ranks)]
    return [*options, "--rounds", str(arguments.rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description="All ranks of one model.")
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    add_options(parser.add_argument)
    add_size(parser.add_argument)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = arguments.ranks, port, arguments
    torch.multiprocessing.start_processes(rank_of, given, arguments.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
