"""examples/train_hybrid.py as a user runs it, small: it learns to recall from the states that it carries."""

from __future__ import annotations

import re

import pytest
from helpers.examples import run_example

pytest.importorskip("tqdm")


def test_it_learns() -> None:
    result = run_example("train_hybrid.py", "--steps", "80", "--writes", "10")
    assert result.returncode == 0, result.stderr
    (percent,) = re.findall(r"([\d.]+)% of held-out questions answered", result.stdout)
    assert float(percent) > 60


def test_refused_arguments() -> None:
    result = run_example("train_hybrid.py", "--writes", "7")
    assert result.returncode == 2
    assert "--writes at least 8" in result.stderr
