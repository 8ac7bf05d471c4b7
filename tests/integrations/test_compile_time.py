"""One dynamic compilation under `enable` serves all lengths; its time is printed beside the untouched model's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.tiny import DOORS

pytestmark = pytest.mark.slow

LIMIT_S = 240
"""For the untouched models, some of which take minutes for each length."""


def taken(name: str, mode: str, caches: Path) -> list[tuple[int, float, int]]:
    """The length, the seconds of the first call and the number of graphs so far, of each length that was reached."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches / f"{name}-{mode}")}
    command = [sys.executable, "-m", "helpers.compile_time", name, mode]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
        text = done.stdout
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode()
    lines = [line.split() for line in text.splitlines()]
    return [(int(T), float(seconds), int(graphs)) for T, seconds, graphs in lines]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", [*DOORS, "mamba"])
@pytest.mark.timeout(3 * LIMIT_S)
def test_compile_time(name: str, tmp_path: Path) -> None:
    ours, theirs = (taken(name, mode, tmp_path) for mode in ("enabled", "untouched"))
    for mode, lines in ("enabled", ours), ("untouched", theirs):
        calls = [f"{T} tokens: {seconds:.1f} s, {graphs} graphs so far" for T, seconds, graphs in lines]
        if len(lines) < 3:
            calls.append(f"not through with the next length after {LIMIT_S} s, or failed")
        print(f"\n{name}, {mode}: {'; '.join(calls)}")
    assert [graphs for _, _, graphs in ours] == [1, 1, 1]
    # The second and third lengths are not compiled for again.
    assert all(seconds < 0.3 * ours[0][1] for _, seconds, _ in ours[1:])
