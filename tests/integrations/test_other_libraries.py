"""Nothing of flash-linear-attention, causal-conv1d and mamba-ssm runs if they are installed, `kernels` or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from helpers.other_libraries import LIBRARIES, outcomes, write_libraries
from helpers.tiny import DOORS

# One of each function that is replaced; without `kernels`, where no function is decorated, one of each library.
NAMES = {"with": [*DOORS, "mamba"], "without": ["mamba2", "qwen3_next"]}
TESTS = Path(__file__).parents[1]
# Without torchao, which transformers imports where it is installed, and which prints that its kernels are for a GPU.
START = """
import runpy, sys

sys.modules["torchao"] = None
runpy.run_module("helpers.other_libraries", run_name="__main__", alter_sys=True)
"""
STAND_INS = {
    f"{m}.{f}" for modules in LIBRARIES.values() for m, functions in modules.items() for f in functions
}


@pytest.mark.parametrize("kernels", ["with", "without"])
def test_others_are_not_called(kernels: str, tmp_path: Path) -> None:
    """All is computed without them, and nothing is printed. Before and after, calls reach them, as `runs_on` says."""
    write_libraries(tmp_path)
    path = [str(tmp_path), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path / "out.pt"), kernels, *NAMES[kernels]],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    out = torch.load(tmp_path / "out.pt", weights_only=False)
    assert out["modules"] == (kernels == "with")

    for name in NAMES[kernels]:
        alone, with_libraries = outcomes(name), out["models"][name]
        first, *later = with_libraries["as it is"]
        assert all(again == first for again in later)
        assert [row[:3] for row in first["runs_on"]] == [row[:3] for row in alone["as it is"][0]["runs_on"]]
        if name != "minimax":  # which has no function for its recurrence
            others = {row.runs_on for row in first["runs_on"]}
            assert others <= STAND_INS and all(row.why for row in first["runs_on"])
            assert first["error"] in {f"the stand-in of {other} was called" for other in others}
        for actual, expected in zip(with_libraries["replaced"], alone["replaced"], strict=True):
            assert actual["runs_on"] == expected["runs_on"] and not any(row.why for row in actual["runs_on"])
            assert torch.equal(actual["tokens"], expected["tokens"])
            for key in expected.keys() - {"runs_on", "tokens"}:
                torch.testing.assert_close(actual[key], expected[key], atol=1e-6, rtol=1e-5)
