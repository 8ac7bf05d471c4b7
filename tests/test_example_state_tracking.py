"""examples/state_tracking.py as a user runs it, small: who goes on counting modulo 2 beyond the trained length."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from helpers.examples import ROOT, run_example

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


def test_parity(tmp_path: Path) -> None:
    options = ["--tasks", "2", "--layers", "gla", "deltanet-neg", "--steps", "120", "--length", "12"]
    result = run_example("state_tracking.py", *options, "--out", str(tmp_path / "plot.svg"))
    assert result.returncode == 0, result.stderr
    right = dict(re.findall(r"Parity, (\S+): .* ([\d.]+)% at 24", result.stdout))
    assert float(right["gla"]) < 60 and float(right["deltanet-neg"]) > 80
    assert "allow_neg_eigval" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


def test_refused_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "state_tracking.py"))["main"]
    with pytest.raises(SystemExit) as refused:
        main(["--length", "3"])
    assert refused.value.code == 2
    assert "argument --length: expected an integer, at least 4, got '3'" in capsys.readouterr().err
