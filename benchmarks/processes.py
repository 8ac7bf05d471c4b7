"""Processes for figures that need one of their own: empty compilation caches, or another checkout's flacompose.

``python -m benchmarks.processes PATH MODULE ARGUMENTS...`` runs a module of this package with the flacompose of the
checkout at PATH.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
"""Where ``python -m benchmarks...`` finds this package."""

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """The environment of a process that finds nothing compiled; the folders go when the block ends."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield {**os.environ, **{name: os.path.join(folder, name.lower()) for name in CACHES}}


def command(module: str, arguments: Sequence[str], package: Path | None = None) -> list[str]:
    """The command that runs a module with the flacompose of the checkout `package`, by default this one."""
    checkout = str((package or ROOT).resolve())
    return [sys.executable, "-m", "benchmarks.processes", checkout, f"benchmarks.{module}", *arguments]


class Process:
    """A running command that answers in lines of JSON. What else it prints is left out."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def send(self, request: Mapping[str, Any]) -> None:
        assert self.popen.stdin is not None
        # A process that has ended says so when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(json.dumps(request) + "\n")
            self.popen.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next answer, or ``None`` at the process's end; raises if it failed or took too long."""
        assert self.popen.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.popen.kill()

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        try:
            for line in self.popen.stdout:
                if line.startswith("{"):
                    return json.loads(line)
            code = self.popen.wait()
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if code:
            self.errors.seek(0)
            raise RuntimeError(_error(self.errors.read()) or f"it ended with status {code}")
        return None

    def close(self) -> None:
        """End the process if it still runs."""
        self.popen.kill()
        self.popen.wait()
        for file in (self.popen.stdin, self.popen.stdout, self.errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()


Found = TypeVar("Found")
Task = Callable[[Callable[..., Process]], Iterator[Found]]


def side_by_side(tasks: Sequence[Task[Found]], jobs: int) -> Iterator[Found]:
    """What the tasks give, as it comes, `jobs` of them at the same time.

    A task gets what it starts a `Process` with. These are killed when no more is asked for.
    """
    todo: queue.SimpleQueue[Task[Found]] = queue.SimpleQueue()
    for task in tasks:
        todo.put(task)
    found: queue.SimpleQueue[tuple[Found] | None] = queue.SimpleQueue()
    running: list[Process] = []

    def start(*args: Any) -> Process:
        running.append(Process(*args))
        return running[-1]

    def work() -> None:
        try:
            while not todo.empty():
                for each in todo.get_nowait()(start):
                    found.put((each,))
        except queue.Empty:
            pass
        finally:
            found.put(None)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            while (each := found.get()) is not None:
                yield each[0]
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                todo.get_nowait()
        for process in running:
            process.popen.kill()
        for worker in workers:
            worker.join(10)


def _error(text: str) -> str:
    """The line that names the error in what a process wrote, or its last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Unsupported|Exit)\b", line)]
    return (named or lines or [""])[-1]


def answer(**content: object) -> None:
    """Print one line that `Process.receive` returns in the process that started this one."""
    print(json.dumps(content), flush=True)


def main() -> None:
    checkout, module, *arguments = sys.argv[1:]
    sys.path.insert(0, checkout)
    flacompose = importlib.import_module("flacompose")
    # All else, this package's imports among it, is of this checkout.
    sys.path.remove(checkout)
    found = Path(flacompose.__file__ or "").parents[1]
    if found != Path(checkout):
        raise SystemExit(f"expected the flacompose of {checkout}, got that of {found}")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
