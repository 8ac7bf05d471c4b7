"""The environment of a run, with which a reader can repeat it."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from .processes import ROOT


def _output(*command: str, cwd: Path = ROOT) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.machine()


def commit(checkout: Path = ROOT) -> str:
    """The commit of a checkout, or nothing for files without a repository of their own."""
    if not (checkout / ".git").exists():
        return ""
    return _output("git", "rev-parse", "--short=12", "HEAD", cwd=checkout)


def environment(device: str, argv: Sequence[str]) -> dict[str, str]:
    """Device, versions, date, commit and command line, in the order in which they are printed."""
    facts: dict[str, str] = {}
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["driver"] = driver.split("\n")[0]
    else:
        facts["device"] = f"{_cpu()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    facts["python"] = platform.python_version()
    facts["torch"] = torch.__version__
    try:
        facts["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        facts["triton"] = ""
    facts["commit"] = commit()
    facts["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts["command"] = shlex.join(["python", "-m", "benchmarks.run", *argv])
    return {name: value for name, value in facts.items() if value}
