"""Measure ops beside another implementation: prints a table, writes JSON and a plot.

python -m benchmarks.run --ops gla --against fla         both libraries in one process, on a GPU
python -m benchmarks.run --ops gla --against reference   the CPU path beside the recurrence itself
python -m benchmarks.run --against transformers          Mamba-2's scan on a CPU beside transformers' PyTorch one
python -m benchmarks.run --parts host                    the host's time per call, beside softmax attention
python -m benchmarks.run --parts model                   whole models: compilation, training steps, decoding
python -m benchmarks.run --parts public                  models of transformers: prompts, training steps, decoding
python -m benchmarks.run --parts heads --ops gla         heads of more than 256 keys or values beside the peer
python -m benchmarks.run --parts mamba2 mamba3 mlstm     scans beside mamba-ssm's and mlstm_kernels', on a GPU
python -m benchmarks.run --parts flashqla                the gated delta rule beside FlashQLA's, on a GPU
python -m benchmarks.run --parts generation              a model that reads prompts, writes and checks tokens
python -m benchmarks.run --parts context                 a long row on several GPUs and on one

Against flash-linear-attention, inputs are what its own benchmark takes: q, k, v standard normal, gates
``logsigmoid(normal)``, all bfloat16. Forward is that of a training step, gradients enabled.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import (
    cases,
    context,
    cpu,
    cuda,
    generation,
    host,
    mamba,
    model,
    models,
    peer,
    public,
    report,
    tuned,
    warm,
)
from .cases import OPS, Op, Shape
from .environment import commit, environment

DEVICE = {"fla": "cuda", "reference": "cpu", "transformers": "cpu"}

DEFAULT_PARTS = ("training", "decode", "accuracy", "cold", "host")
PARTS = (*DEFAULT_PARTS, "more", "heads", *mamba.PARTS, "model", "public", "generation", "context")

ANYWHERE = {"host", "model", "public", "generation", "context"}
"""Parts whose figures are taken in other processes than this one, without the peer and on a CPU too."""
APART = ANYWHERE | {"heads", *mamba.PARTS}
"""Parts that have results files of their own."""
TUNING = "the other side's tuning times each of its candidates for {:g} ms, not 100"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP", help=f"of {', '.join(OPS)}")
    add("--against", choices=DEVICE, default="fla")
    add("--device", choices=["cuda", "cpu"], help="default: cuda for fla, cpu for the others")
    add("--shapes", nargs="+", type=Shape.parse, metavar="BxTxHxKxV", help="training shapes to take instead")
    add(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(DEFAULT_PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)}; more is flacompose alone at more shapes (default: {', '.join(DEFAULT_PARTS)})",
    )
    add(
        "--before",
        type=Path,
        metavar="PATH",
        help="another checkout, whose flacompose the parts host and model measure beside this one's",
    )
    add("--out", type=Path, default=report.RESULTS, help="folder for the results (default: %(default)s)")
    add = p.add_argument_group("the host's time per call").add_argument
    add("--host-shape", type=Shape.parse, default=cases.HOST_BOUND, metavar="BxTxHxKxV")
    add("--host-rounds", type=int, default=5, help="turns of each side (default: %(default)s)")
    add("--host-calls", type=float, default=1.0, help="factor on the number of calls that are timed together")
    add = p.add_argument_group("whole models").add_argument
    add("--models", nargs="+", choices=models.NAMES, default=list(models.NAMES), metavar="MODEL")
    add(
        "--peer-model", action="store_true", help="the peer's models of gla and rwkv7 too, of those asked for"
    )
    add("--quantities", nargs="+", choices=model.QUANTITIES, default=["compile", "step"])
    add(
        "--jobs",
        type=int,
        default=1,
        help="models at the same time; with --parts model only for --quantities compile",
    )
    add("--backend", default="inductor", help="torch.compile's (default: %(default)s)")
    add("--model-timeout", type=float, default=400.0, metavar="S", help="seconds for a model (default: 400)")
    model.add_size(add)
    add = p.add_argument_group("models of transformers").add_argument
    add("--public-models", nargs="+", choices=public.MODELS, default=list(public.MODELS), metavar="MODEL")
    add("--sides", nargs="+", choices=public.SIDES, default=list(public.SIDES), metavar="SIDE")
    add(
        "--small",
        action="store_true",
        help="tiny ones, here and in generation, to look at the benchmark itself",
    )
    add = p.add_argument_group("generation").add_argument
    for name, choices, default, metavar in (
        ("--generation", generation.QUANTITIES, generation.QUANTITIES, "QUANTITY"),
        ("--modes", generation.MODES, generation.DEFAULT_MODES, "MODE"),
    ):
        told = f"of {', '.join(choices)} (default: {', '.join(default)})"
        add(name, nargs="+", choices=choices, default=list(default), metavar=metavar, help=told)
    add(
        "--inductor",
        nargs="+",
        type=generation.option,
        default=[],
        metavar="NAME=VALUE",
        help="options of Inductor, as cpp_wrapper=True",
    )
    add = p.add_argument_group("a long row").add_argument
    add("--context-models", nargs="+", choices=context.MODELS, default=list(context.MODELS), metavar="MODEL")
    context.add_options(add)
    add = p.add_argument_group("the peer").add_argument
    add("--peer-configs", default="shipped", help="shipped (default), none, or a file saved by a run")
    add("--warm-peer", action="store_true", help="compile its candidates in parallel before it tunes")
    add("--tune-ms", type=float, metavar="MS", help="time each candidate this long, not Triton's 100 ms")
    add("--warm-timeout", type=float, default=120.0, metavar="S", help="seconds for that (default: 120)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes for that (default: one a core)")
    add("--cold-peer", action="store_true", help="its first step with empty caches too: minutes")
    add(
        "--cold-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds for one (default: 300)",
    )
    return p


class Run:
    """A run in progress: every row is printed when it is taken, and the file is complete after each."""

    def __init__(self, results: report.Results, path: Path) -> None:
        self.results, self.path = results, path
        self.start = time.monotonic()

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.start:5.0f} s] {line}", flush=True)

    def note(self, line: str) -> None:
        self.results.notes.append(line)
        self.say(line)

    def take(self, rows: Iterable[report.Row]) -> None:
        for row in rows:
            self.results.rows.append(row)
            self.results.save(self.path)
            case, quantity, ours, other, ratio, target, verdict = report.cells(row)
            self.say(f"{row.op}  {case}  {quantity}: {ours} / {other} = {ratio}  {target}  {verdict}")

    def finish(self) -> None:
        self.results.save(self.path)
        self.path.with_suffix(".md").write_text(report.section(self.results))
        print("\n" + report.table(self.results), flush=True)
        try:
            report.plot(self.results, self.path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            self.say(f"no plot: {error}")


def apart(part: str, ops: list[Op], device: str, argv: list[str], arguments: argparse.Namespace) -> None:
    """One of the parts `APART`, with a results file of its own."""
    before = arguments.before
    ops = [op for op in ops if op.has_heads] if part == "heads" else ops
    names = [op.name for op in ops]
    if part == "model":
        peers = [name for name in models.PEERS if name.removeprefix("fla-") in arguments.models]
        names = [*arguments.models, *(peers if arguments.peer_model else [])]
    if part == "public":
        names = arguments.public_models
    of_packages = {name: packaged.side for name, packaged in mamba.PARTS.items()}
    names = {"generation": [generation.MODEL], **{k: [v] for k, v in of_packages.items()}}.get(part, names)
    if part == "context":
        names = arguments.context_models
    others = {"heads": "fla", **of_packages, "public": public.SIDES[1], "generation": "eager mode"}
    others["context"] = context.ONE
    compiled = ["compiled"] if part == "context" and arguments.compiled else []
    path = arguments.out / f"{'-'.join([part, *compiled, *names, device])}.json"
    run = Run(report.Results(others.get(part, "softmax attention"), environment(device, argv)), path)
    if before is not None:
        run.results.environment["before"] = commit(before) or before.name
    try:
        if part == "host":
            rounds, calls = arguments.host_rounds, arguments.host_calls
            run.take(host.take(ops, device, arguments.host_shape, before, rounds=rounds, calls=calls))
        elif part == "heads":
            larger_heads(run, ops, arguments)
        elif part in mamba.PARTS:
            of_mamba(run, part, arguments)
        elif part == "public":
            of_transformers(run, device, arguments)
        elif part == "generation":
            options = (
                arguments.generation,
                arguments.modes,
                device,
                arguments.backend,
                arguments.inductor,
                arguments.small,
                arguments.model_timeout,
            )
            follow(run, generation.take(*options), functools.partial(generation.rows, small=arguments.small))
        elif part == "context":
            run.results.environment["ranks"] = str(arguments.ranks)
            options_of_ranks = context.passed_on(arguments, device)
            taken = context.take(names, options_of_ranks, timeout_s=arguments.model_timeout)
            follow(run, taken, functools.partial(context.rows, ranks=arguments.ranks))
        else:
            of_ours(run, names, device, arguments)
    finally:
        run.finish()


def of_mamba(run: Run, name: str, arguments: argparse.Namespace) -> None:
    """A scan beside that of a package of its own."""
    part, other = mamba.PARTS[name], mamba.load(name)
    run.results.environment[part.side] = mamba.version(part.package)
    run.note(part.note)
    shorten_tuning(run, arguments, part.package)
    if arguments.warm_peer:
        limits = arguments.warm_timeout, arguments.workers
        run.say(mamba.compile_candidates(name, arguments.shapes, *limits))
    ours = importlib.import_module("flacompose.ops")
    run.take(mamba.take(part, ours, other, arguments.shapes, run.results.notes))


def of_ours(run: Run, names: list[str], device: str, arguments: argparse.Namespace) -> None:
    """Models around this library's layers."""
    options = {name: getattr(arguments, name) for name in ("before", "jobs", "backend")}
    options["warm_peer"] = (arguments.warm_timeout, arguments.workers) if arguments.warm_peer else None
    size, timeout_s, tune_ms = model.size_of(arguments), arguments.model_timeout, arguments.tune_ms
    if tune_ms is not None and any(name in models.PEERS for name in names):
        run.note(TUNING.format(tune_ms))
    taken = model.take(
        names, size, arguments.quantities, device, timeout_s=timeout_s, tune_ms=tune_ms, **options
    )
    follow(run, taken, model.rows)


def of_transformers(run: Run, device: str, arguments: argparse.Namespace) -> None:
    """Models of transformers."""
    run.results.environment["transformers"] = metadata.version("transformers")
    options = ["--device", device, "--backend", arguments.backend, *(["--small"] if arguments.small else [])]
    options += ["--peer-configs", str((arguments.out / "peer-configs.json").resolve())]
    warm_peer = (arguments.warm_timeout, arguments.workers) if arguments.warm_peer else None
    names, sides, timeout_s = arguments.public_models, arguments.sides, arguments.model_timeout
    if arguments.jobs > 1:
        run.note("all sides compile side by side, and take turns where times are taken")
    taken = public.take(names, sides, options, jobs=arguments.jobs, warm_peer=warm_peer, timeout_s=timeout_s)
    follow(run, taken, public.rows)


def follow(run: Run, taken: Iterable[Any], rows: Callable[[list[Any]], list[report.Row]]) -> None:
    """Save the rows of the figures, and the notes among these, as they come."""
    figures: list[Any] = []
    for figure in taken:
        if isinstance(figure, str):
            run.note(figure)
        else:
            figures.append(figure)
            run.say(f"{figure.model} {figure.side}  {figure.case}  {figure.quantity}: {figure.value:.4g}")
        run.results.rows = rows(figures)
        run.results.save(run.path)


def tuned_file(choice: str) -> Path | None:
    """The file with the peer's configurations. The shipped one is for Hopper; on other GPUs the peer tunes."""
    if choice == "none" or (choice == "shipped" and torch.cuda.get_device_capability() != (9, 0)):
        return None
    return tuned.H100 if choice == "shipped" else Path(choice)


@contextlib.contextmanager
def beside_the_peer(
    run: Run, arguments: argparse.Namespace
) -> Iterator[tuple[cuda.Sides, Path | None, Callable[[], None]]]:
    """Both sides, the file with the peer's configurations, and a function that saves those that it has chosen."""
    configs = tuned_file(arguments.peer_configs)
    sides: cuda.Sides = {"flacompose": importlib.import_module("flacompose.ops"), "fla": peer.load()}
    run.results.environment["fla"] = peer.version()
    installed: set = set()
    if configs is not None:
        installed = tuned.install(configs)
        run.note(f"{tuned.origin(configs)}; the peer tunes what that file lacks")
    shorten_tuning(run, arguments)
    device = run.results.environment["device"]
    yield (
        sides,
        configs,
        functools.partial(tuned.save, run.path.with_name("peer-configs.json"), device, peer.version()),
    )
    run.note(f"{len(tuned.cached() - installed)} launch configurations tuned by the peer in this run")


def shorten_tuning(run: Run, arguments: argparse.Namespace, package: str = "fla") -> None:
    if arguments.tune_ms is not None:
        tuned.shorten(arguments.tune_ms, package)
        run.note(TUNING.format(arguments.tune_ms))


def larger_heads(run: Run, ops: list[Op], arguments: argparse.Namespace) -> None:
    shapes = arguments.shapes or cases.LARGER_HEADS
    with beside_the_peer(run, arguments) as (sides, configs, save):
        for op in ops:
            taken = [shape for shape in shapes if op.peer_keys is None or shape.K <= op.peer_keys]
            if arguments.warm_peer and taken:
                limits = arguments.warm_timeout, arguments.workers
                run.say(warm.compile_candidates(op.name, taken, configs, *limits, only_steps=True))
            run.take(cuda.larger_heads(op, sides, cases.HEADS_OF_256, shapes, run.results.notes))
            save()


def on_cuda(run: Run, ops: list[Op], arguments: argparse.Namespace) -> None:
    parts = arguments.parts
    if "more" in parts:
        run.note("no figure of the peer at other widths and grouped heads: it would tune for minutes at each")
    with beside_the_peer(run, arguments) as (sides, configs, save):
        both = sides
        for op in ops:
            shapes = arguments.shapes or op.training
            shared = hasattr(both["fla"], op.chunk)
            sides = both if shared else {"flacompose": both["flacompose"]}
            if arguments.warm_peer and shared:
                every = [*shapes, cases.ACCURACY]
                limits = arguments.warm_timeout, arguments.workers
                run.say(warm.compile_candidates(op.name, every, configs, *limits))
            if "training" in parts:
                for shape in shapes:
                    taken = cuda.training if shared else cuda.beside_floor
                    run.take(taken(op, sides, shape, run.results.notes))
                    save()
            if "more" in parts:
                alone: cuda.Sides = {"flacompose": sides["flacompose"]}
                for shape in cases.more_shapes(op, shapes if "training" in parts else ()):
                    run.take(cuda.training(op, alone, shape, run.results.notes))
            if "decode" in parts:
                run.take(cuda.decode(op, sides))
            if "accuracy" in parts:
                run.take(cuda.accuracy(op, sides))
            save()
            if "cold" in parts:
                peer_timeout = arguments.cold_timeout if arguments.cold_peer and shared else None
                timeouts = {"flacompose": arguments.cold_timeout, "fla": peer_timeout}
                run.take(cuda.cold(op, shapes[0], timeouts))


def main(argv: list[str] | None = None) -> None:
    p = parser()
    argv = sys.argv[1:] if argv is None else argv
    arguments = p.parse_args(argv)
    device = DEVICE[arguments.against]
    parts = [part for part in PARTS if part in arguments.parts]
    only_apart = arguments.against == "fla" and APART.issuperset(parts)
    if only_apart and ANYWHERE.issuperset(parts):
        device = arguments.device or device
    elif arguments.device not in (None, device):
        p.error(f"--against {arguments.against} is not measured on {arguments.device}")
    if device == "cuda" and not torch.cuda.is_available():
        p.error("a GPU is needed; on a CPU: --against reference, or --parts host model --device cpu")
    timed = "model" in parts and arguments.quantities != ["compile"]
    if arguments.jobs < 1 or (arguments.jobs > 1 and timed):
        p.error("--jobs above 1 needs --quantities compile: steps that run side by side cannot be timed")
    ops = [OPS[name] for name in arguments.ops]
    if not only_apart:
        in_this_process(ops, device, argv, arguments)
    if arguments.against == "fla":
        for part in parts:
            if part in APART:
                apart(part, ops, device, argv, arguments)


def in_this_process(ops: list[Op], device: str, argv: list[str], arguments: argparse.Namespace) -> None:
    """All parts but those `APART`, and the CPU's figures."""
    measured = ["mamba2"] if arguments.against == "transformers" else arguments.ops
    name = "-".join([*measured, arguments.against, device])
    run = Run(report.Results(arguments.against, environment(device, argv)), arguments.out / f"{name}.json")
    try:
        if device == "cuda":
            on_cuda(run, ops, arguments)
        elif arguments.against == "transformers":
            run.results.environment["transformers"] = metadata.version("transformers")
            module = importlib.import_module("flacompose.ops")
            for shape in arguments.shapes or [cases.MAMBA2]:
                run.take(cpu.mamba2(module, shape))
        else:
            module = importlib.import_module("flacompose.ops")
            for op in ops:
                for shape in arguments.shapes or [cases.CPU]:
                    run.take(cpu.training(op, module, shape))
    finally:
        run.finish()


if __name__ == "__main__":
    # A run that is stopped ends its processes and writes its table.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    main()
