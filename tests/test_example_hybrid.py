"""examples/train_hybrid.py as a user runs it, small: it learns to recall from the states that it carries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tqdm")

ROOT = Path(__file__).parents[1]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_hybrid.py"), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_learns() -> None:
    result = run("--steps", "120", "--writes", "10")
    assert result.returncode == 0, result.stderr
    (percent,) = re.findall(r"([\d.]+)% of held-out questions answered", result.stdout)
    assert float(percent) > 60


def test_refused_arguments() -> None:
    result = run("--writes", "7")
    assert result.returncode == 2
    assert "--writes at least 8" in result.stderr
