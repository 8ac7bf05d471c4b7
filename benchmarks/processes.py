"""Processes for figures that need one of their own: empty compilation caches, or another checkout's flacompose.

``python -m benchmarks.processes PATH MODULE ARGUMENTS...`` runs a module of this package with the flacompose of the
checkout at PATH.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
"""The folder from which ``python -m benchmarks...`` runs."""

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """The environment of a process with empty caches, which are deleted at the end of the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield {**os.environ, **{name: os.path.join(folder, name.lower()) for name in CACHES}}


def command(module: str, arguments: Sequence[str], package: Path | None = None) -> list[str]:
    """The command that runs a module with the flacompose of the checkout `package`, by default this one."""
    checkout = str((package or ROOT).resolve())
    return [sys.executable, "-m", "benchmarks.processes", checkout, f"benchmarks.{module}", *arguments]


class Process:
    """A running command that answers with lines of JSON. Other output is ignored."""

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
        # `receive` reports a process that has ended.
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(json.dumps(request) + "\n")
            self.popen.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next answer, or ``None`` at the end of the process. It raises if the process failed or was too slow."""
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


def _error(text: str) -> str:
    """The line of the output that names the error, or the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Unsupported|Exit)\b", line)]
    return (named or lines or [""])[-1]


def answer(**content: object) -> None:
    """Print a line that `Process.receive` of the parent process returns."""
    print(json.dumps(content), flush=True)


def give(case: str, quantity: str, unit: str, value: float) -> None:
    """Answer with one figure."""
    answer(case=case, quantity=quantity, unit=unit, value=value)


def attempt(what: str, take: Callable[[], None]) -> None:
    """Call `take`. A failure becomes a note."""
    try:
        take()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        answer(note=f"{what} failed: {type(error).__name__}: {lines[0] if lines else ''}")


@dataclass(frozen=True)
class Figure:
    """One number of one model. `side` is ``flacompose`` or the other side."""

    model: str
    side: str
    case: str
    quantity: str
    unit: str
    value: float


def figures(
    command: Sequence[str], model: str, side: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> Iterator[Figure | str]:
    """The figures and notes of a model from a process. A failure is a note too."""
    label = model if side == "flacompose" else f"{model} {side}"
    with contextlib.closing(Process(command, env)) as process:
        end = time.monotonic() + timeout_s
        try:
            while reply := process.receive(max(1.0, end - time.monotonic())):
                yield (
                    f"{label}, {reply['note']}"
                    if "note" in reply
                    else Figure(model, **{"side": side} | reply)
                )
        except (RuntimeError, TimeoutError) as error:
            yield f"{label} failed: {error}"


def main() -> None:
    checkout, module, *arguments = sys.argv[1:]
    sys.path.insert(0, checkout)
    flacompose = importlib.import_module("flacompose")
    # Everything else is imported from this checkout.
    sys.path.remove(checkout)
    found = Path(flacompose.__file__ or "").parents[1]
    if found != Path(checkout):
        raise SystemExit(f"expected the flacompose of {checkout}, got that of {found}")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
