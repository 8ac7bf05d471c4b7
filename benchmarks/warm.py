"""Compile the peer's candidate kernels in parallel, so that its tuning only has to time them.

Each worker process makes the same calls but launches no kernel. For every kernel that is about to be tuned, it
compiles its share of the candidates into Triton's disk cache. The measuring process tunes afterwards, alone on the
device: workers that time candidates side by side disturb each other, and would choose at random.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import cuda, measure, peer, tuned
from .cases import DECODE_HOST, OPS, Functions, Op, Shape
from .processes import ROOT


def compile_candidates(
    op: str, shapes: Sequence[Shape], configs: Path | None, timeout_s: float, workers: int
) -> str:
    """Compile the candidates of an op's calls in worker processes; return a line about the outcome."""
    asked = [op, ",".join(map(str, shapes)), str(configs or "none")]
    return side_by_side([sys.executable, "-m", "benchmarks.warm", *asked], timeout_s, workers)


def side_by_side(command: Sequence[str], timeout_s: float, workers: int) -> str:
    """Run a command in worker processes for at most ``timeout_s``; return a line about the outcome.

    The last arguments of each worker are its index and the number of workers.
    """
    start = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # one core for each worker
    late, failed = 0, []
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        processes = [
            subprocess.Popen([*command, str(i), str(workers)], cwd=ROOT, env=env, stdout=log, stderr=log)
            for i, log in enumerate(logs)
        ]
        try:
            for process, log in zip(processes, logs, strict=True):
                try:
                    code = process.wait(max(0.1, timeout_s - (time.monotonic() - start)))
                except subprocess.TimeoutExpired:
                    late += 1
                    continue
                if code:
                    log.seek(0)
                    failed.append((log.read().strip().splitlines() or ["no message"])[-1])
        finally:
            for process in processes:
                process.kill()  # no effect if it has ended
                process.wait()
    line = (
        f"compiled the other side's candidates in {time.monotonic() - start:.0f} s with {workers} processes"
    )
    if late:
        line += f", {late} stopped at {timeout_s:.0f} s"
    if failed:
        line += f", {len(failed)} failed ({failed[0]})"
    return line


def compile_only(tuner: Any, index: int, workers: int) -> None:
    """Make the autotuner compile every ``workers``-th candidate, and launch none."""
    # The first candidate goes to a worker that depends on the kernel, so that kernels with few candidates do not all
    # go to the same workers.
    first = (index + zlib.crc32(tuner.base_fn.__name__.encode())) % workers
    tuned_keys = set()

    def run(*args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        arguments = {name: x for name, x in {**tuner.nargs, **kwargs}.items() if name in tuner.arg_names}
        key = tuple(arguments[name] for name in tuner.keys if name in arguments)
        key += tuple(str(x.dtype) for x in arguments.values() if hasattr(x, "dtype"))
        if key in tuner.cache:
            candidates = [tuner.cache[key]]
        elif key in tuned_keys:
            return  # it will have been tuned by the call before, whatever else differs in this one
        else:
            candidates = list(tuner.prune_configs(kwargs))
            tuned_keys.add(key)
        for config in itertools.islice(candidates, first, None, workers):
            try:
                tuner.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())
            except Exception as error:  # tuning will reject it too
                print(f"{tuner.base_fn.__name__} {config}: {error}", file=sys.stderr)
        # Some callers read the chosen configuration.
        tuner.best_config = candidates[0]

    tuner.run = run


def steps(op: Op, module: Functions, shapes: Sequence[Shape], states: bool) -> None:
    """A training step at each shape, with `states` also one with states."""
    chunk = op.chunk_of(module)
    for shape in dict.fromkeys(shapes):
        inputs = op.draw(shape, torch.bfloat16, cuda.DEVICE, grad=True)
        do = op.draw_do(shape, torch.bfloat16, cuda.DEVICE)
        peer.first_call(measure.step(chunk, inputs, do))
        if not states:
            continue
        given = [x.requires_grad_(op.state_gradients) for x in op.draw_states(shape, cuda.DEVICE).values()]
        o, final = chunk(**inputs, initial_state=op.packed(given), output_final_state=True)
        results = [x for x in (o, *op.unpacked(final)) if x.requires_grad]
        leaves = [*inputs.values(), *(x for x in given if x.requires_grad)]
        torch.autograd.grad(results, leaves, [torch.randn_like(x) for x in results])


def token(op: Op, module: Functions) -> None:
    """One recurrent step."""
    recurrent = op.recurrent_of(module)
    with torch.no_grad():
        inputs = op.for_recurrent(op.draw(DECODE_HOST, torch.bfloat16, cuda.DEVICE))
        state = op.packed([*op.draw_states(DECODE_HOST, cuda.DEVICE).values()])
        recurrent(**inputs, initial_state=state, output_final_state=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="one worker of compile_candidates")
    for name in ("op", "shapes", "configs", "index", "workers"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    op, module = OPS[arguments.op], peer.load()
    if arguments.configs != "none":
        tuned.install(Path(arguments.configs))
    for tuner in tuned.autotuners():
        compile_only(tuner, int(arguments.index), int(arguments.workers))
    # Short inputs leave memory for every worker, and beyond one chunk the choice does not depend on the length.
    shapes = [Shape.parse(text)._replace(T=256) for text in arguments.shapes.split(",")]
    steps(op, module, shapes, states=True)
    token(op, module)


if __name__ == "__main__":
    main()
