"""Measure ops beside another implementation: prints a table, and writes it with its figures as JSON.

python -m benchmarks.run --ops gla                       both libraries in one process, on a GPU
python -m benchmarks.run --parts host                    the host's time per call, beside softmax attention
python -m benchmarks.run --parts model                   whole models: compilation, training steps
python -m benchmarks.run --parts public                  models of transformers: prompts, training steps, decoding
python -m benchmarks.run --parts mamba2 mamba3 mlstm     scans beside mamba-ssm's and mlstm_kernels', on a GPU
python -m benchmarks.run --parts flashqla                the gated delta rule beside FlashQLA's, on a GPU
python -m benchmarks.run --parts generation              a model that reads prompts, writes and checks tokens
python -m benchmarks.run --parts context                 a long row on several GPUs and on one

Inputs beside flash-linear-attention are those of its own benchmark: q, k, v standard normal, gates
``logsigmoid(normal)``, all bfloat16. The forward has gradients enabled.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import cases, context, cuda, generation, host, mamba, model, models, peer, public, report, tuned, warm
from .cases import OPS, Op, Shape
from .environment import commit, environment

DEFAULT_PARTS = ("training", "decode", "accuracy", "cold", "host")
PARTS = (*DEFAULT_PARTS, *mamba.PARTS, "model", "public", "generation", "context")

ANYWHERE = {"host", "model", "public", "generation", "context"}
"""Parts that run in other processes, without flash-linear-attention and also on a CPU."""
APART = ANYWHERE | {*mamba.PARTS}
"""Parts with results files of their own."""
TUNING = "the other side's tuning times each of its candidates for {:g} ms, not 100"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group: Any = p

    def add(name: str, *, many: Sequence[str] = (), default: Any = None, **options: Any) -> None:
        """Add an option. It takes one or more of the words `many`, by default all."""
        if many:
            options |= {"nargs": "+", "choices": many}
            options.setdefault("metavar", name.strip("-").split("-")[-1].rstrip("s").upper())
            default = list(default or many)
            options.setdefault("help", f"of {', '.join(many)} (default: {', '.join(default)})")
        group.add_argument(name, default=default, **options)

    add("--ops", many=list(OPS))
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--shapes", nargs="+", type=Shape.parse, metavar="BxTxHxKxV", help="training shapes to take instead")
    add("--parts", many=PARTS, default=DEFAULT_PARTS)
    help = "another checkout, whose flacompose the parts host and model measure beside this one's"
    add("--before", type=Path, metavar="PATH", help=help)
    add("--out", type=Path, default=report.RESULTS, help="folder for the results (default: %(default)s)")
    group = p.add_argument_group("the host's time per call")
    add("--host-shape", type=Shape.parse, default=cases.HOST_BOUND, metavar="BxTxHxKxV")
    add("--host-rounds", type=int, default=5, help="turns of each side (default: %(default)s)")
    add("--host-calls", type=float, default=1.0, help="factor on the number of calls that are timed together")
    group = p.add_argument_group("whole models")
    add("--models", many=models.NAMES)
    add("--quantities", many=model.QUANTITIES, metavar="QUANTITY")
    add("--backend", default="inductor", help="torch.compile's (default: %(default)s)")
    add("--model-timeout", type=float, default=400.0, metavar="S", help="seconds for a model (default: 400)")
    model.add_size(group.add_argument)
    group = p.add_argument_group("models of transformers, and generation")
    add("--public-models", many=list(public.MODELS))
    add("--sides", many=public.SIDES)
    add("--generation", many=generation.QUANTITIES, metavar="QUANTITY")
    add("--modes", many=generation.MODES, default=generation.DEFAULT_MODES)
    add("--small", action="store_true", help="tiny ones, to look at the benchmark itself")
    group = p.add_argument_group("a long row")
    add("--context-models", many=list(context.MODELS))
    context.add_options(group.add_argument)
    group = p.add_argument_group("the peer")
    add("--peer-configs", type=Path, metavar="PATH", help="its launch configurations, as a run saved them")
    add("--warm-peer", action="store_true", help="compile its candidates in parallel before it tunes")
    add("--tune-ms", type=float, metavar="MS", help="time each candidate this long, not Triton's 100 ms")
    add("--warm-timeout", type=float, default=120.0, metavar="S", help="seconds for that (default: 120)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes for that (default: one a core)")
    add("--cold-peer", action="store_true", help="its first step with empty caches too: minutes")
    add("--cold-timeout", type=float, default=300.0, metavar="S", help="seconds for one (default: 300)")
    return p


class Run:
    """A run in progress. Every row is printed and saved at once."""

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


def apart(part: str, ops: list[Op], device: str, argv: list[str], arguments: argparse.Namespace) -> None:
    """Run one of the parts `APART`."""
    names, other = {
        "host": ([op.name for op in ops], "softmax attention"),
        "model": (arguments.models, "softmax attention"),
        "public": (arguments.public_models, public.PEER),
        "generation": ([generation.MODEL], "eager mode"),
        "context": (arguments.context_models, context.ONE),
        **{name: ([packaged.side], packaged.side) for name, packaged in mamba.PARTS.items()},
    }[part]
    path = arguments.out / f"{'-'.join([part, *names, device])}.json"
    run = Run(report.Results(other, environment(device, argv)), path)
    if arguments.before is not None:
        run.results.environment["before"] = commit(arguments.before) or arguments.before.name
    timeout_s = arguments.model_timeout
    try:
        if part == "host":
            options = {"rounds": arguments.host_rounds, "calls": arguments.host_calls}
            options["configs"] = arguments.peer_configs
            run.take(host.take(ops, device, arguments.host_shape, arguments.before, **options))
        elif part == "public":
            of_transformers(run, device, arguments)
        elif part == "generation":
            asked = arguments.generation, arguments.modes, device, arguments.backend, arguments.small
            rows = functools.partial(generation.rows, small=arguments.small)
            follow(run, generation.take(*asked, timeout_s), rows)
        elif part == "context":
            run.results.environment["ranks"] = str(arguments.ranks)
            taken = context.take(names, context.passed_on(arguments, device), timeout_s=timeout_s)
            follow(run, taken, functools.partial(context.rows, ranks=arguments.ranks))
        elif part == "model":
            options = {"before": arguments.before, "backend": arguments.backend, "timeout_s": timeout_s}
            size = model.size_of(arguments)
            follow(run, model.take(names, size, arguments.quantities, device, **options), model.rows)
        else:
            of_mamba(run, part, arguments)
    finally:
        run.finish()


def of_mamba(run: Run, name: str, arguments: argparse.Namespace) -> None:
    """Compare a scan with another package."""
    part, other = mamba.PARTS[name], mamba.load(name)
    run.results.environment[part.side] = mamba.version(part.package)
    run.note(part.note)
    shorten_tuning(run, arguments, part.package)
    if arguments.warm_peer:
        limits = arguments.warm_timeout, arguments.workers
        run.say(mamba.compile_candidates(name, arguments.shapes, *limits))
    ours = importlib.import_module("flacompose.ops")
    run.take(mamba.take(part, ours, other, arguments.shapes, run.results.notes))


def of_transformers(run: Run, device: str, arguments: argparse.Namespace) -> None:
    """Models of transformers."""
    run.results.environment["transformers"] = metadata.version("transformers")
    options = ["--device", device, "--backend", arguments.backend, *(["--small"] if arguments.small else [])]
    options += ["--peer-configs", str(configs_of(arguments).resolve())]
    taken = public.take(arguments.public_models, arguments.sides, options, timeout_s=arguments.model_timeout)
    follow(run, taken, public.rows)


def follow(run: Run, taken: Iterable[Any], rows: Callable[[list[Any]], list[report.Row]]) -> None:
    """Save rows of figures, and notes, as soon as they are taken."""
    figures: list[Any] = []
    for figure in taken:
        if isinstance(figure, str):
            run.note(figure)
        else:
            figures.append(figure)
            run.say(f"{figure.model} {figure.side}  {figure.case}  {figure.quantity}: {figure.value:.4g}")
        run.results.rows = rows(figures)
        run.results.save(run.path)


def configs_of(arguments: argparse.Namespace) -> Path:
    """The file for the launch configurations that the peer has chosen."""
    return arguments.out / "peer-configs.json"


def shorten_tuning(run: Run, arguments: argparse.Namespace, package: str = "fla") -> None:
    if arguments.tune_ms is not None:
        tuned.shorten(arguments.tune_ms, package)
        run.note(TUNING.format(arguments.tune_ms))


def on_cuda(run: Run, ops: list[Op], arguments: argparse.Namespace) -> None:
    parts, configs = arguments.parts, arguments.peer_configs
    both: cuda.Sides = {"flacompose": importlib.import_module("flacompose.ops"), "fla": peer.load()}
    run.results.environment["fla"] = peer.version()
    installed = set() if configs is None else tuned.install(configs)
    if configs is not None:
        run.note(f"{tuned.origin(configs)}; the peer tunes what that file lacks")
    shorten_tuning(run, arguments)

    def save() -> None:
        tuned.save(configs_of(arguments), run.results.environment["device"], peer.version())

    for op in ops:
        shapes = arguments.shapes or op.training
        shared = hasattr(both["fla"], op.chunk)
        sides = both if shared else {"flacompose": both["flacompose"]}
        if arguments.warm_peer and shared:
            limits = arguments.warm_timeout, arguments.workers
            run.say(warm.compile_candidates(op.name, [*shapes, cases.ACCURACY], configs, *limits))
        if "training" in parts:
            for shape in shapes:
                taken = cuda.training if shared else cuda.beside_floor
                run.take(taken(op, sides, shape, run.results.notes))
                save()
        if "decode" in parts:
            run.take(cuda.decode(op, sides))
        if "accuracy" in parts:
            run.take(cuda.accuracy(op, sides))
        save()
        if "cold" in parts:
            peer_timeout = arguments.cold_timeout if arguments.cold_peer and shared else None
            timeouts = {"flacompose": arguments.cold_timeout, "fla": peer_timeout}
            run.take(cuda.cold(op, shapes[0], timeouts))
    run.note(f"{len(tuned.cached() - installed)} launch configurations tuned by the peer in this run")


def main(argv: list[str] | None = None) -> None:
    p = parser()
    argv = sys.argv[1:] if argv is None else argv
    arguments = p.parse_args(argv)
    device, ops = arguments.device, [OPS[name] for name in arguments.ops]
    parts = [part for part in PARTS if part in arguments.parts]
    if device == "cpu" and not ANYWHERE.issuperset(parts):
        p.error(f"on a CPU only --parts {', '.join(sorted(ANYWHERE))}, got {', '.join(parts)}")
    if device == "cuda" and not torch.cuda.is_available():
        p.error(f"a GPU is needed; --device cpu is for --parts {', '.join(sorted(ANYWHERE))}")
    if not APART.issuperset(parts):
        path = arguments.out / f"{'-'.join([*arguments.ops, 'fla', device])}.json"
        run = Run(report.Results("fla", environment(device, argv)), path)
        try:
            on_cuda(run, ops, arguments)
        finally:
            run.finish()
    for part in parts:
        if part in APART:
            apart(part, ops, device, argv, arguments)


if __name__ == "__main__":
    # A stopped run ends its processes and writes its table.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    main()
