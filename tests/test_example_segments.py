"""examples/train_segments.py as a user runs it, small: exact gradients learn what truncated ones cannot."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable

import pytest
from helpers.examples import ROOT, run_example

pytest.importorskip("tqdm")

SCRIPT = ROOT / "examples" / "train_segments.py"
SMALL = ["--segments", "2", "--length", "4", "--steps", "100"]


def run(*options: str) -> str:
    result = run_example("train_segments.py", *SMALL, *options)
    assert result.returncode == 0, result.stderr
    assert "100/100" in result.stderr  # progress
    return re.sub(r" in \d+ s", "", result.stdout)


def test_what_each_learns() -> None:
    """A run with one kind of gradients prints the same numbers as the run with both."""
    said = run()
    recalled = dict(re.findall(r"(\w+): ([\d.]+)% of held-out cues", said))
    assert float(recalled["truncated"]) < 25 < 90 < float(recalled["exact"])
    reached = re.findall(r"(\w+): gradient at each segment (\S+) (\S+)", said)
    (truncated, first, last), (exact, *norms) = reached
    assert (truncated, exact) == ("truncated", "exact")
    assert float(first) == 0 < float(last)
    assert all(float(norm) > 0 for norm in norms)

    lines = run("--gradients", "truncated").splitlines()
    assert not [line for line in lines if "exact" in line]
    assert [line for line in lines if "truncated" in line] == [
        line for line in said.splitlines() if line.startswith("truncated")
    ]


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], None]:
    return runpy.run_path(str(SCRIPT))["main"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gradients", "none"], "argument --gradients: invalid choice: 'none'"),
        (["--segments", "1"], "argument --segments: expected an integer, at least 2, got '1'"),
        (["--steps", "x"], "argument --steps: expected an integer, at least 1, got 'x'"),
    ],
)
def test_bad_option(
    main: Callable, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(options)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
