"""Running an example as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_example(name: str, *options: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """On one thread, so that sums have one order, and with this checkout rather than one that is installed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
