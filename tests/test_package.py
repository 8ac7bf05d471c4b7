"""What is installed: its metadata, its files, and an import that asks for no more than torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import import_module
from pathlib import Path

import pytest
import torch

import flacompose

ROOT = Path(__file__).parents[1]

WITHOUT_TRITON = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "triton" else find_spec(name, *args)
"""

ONE_CALL = """
import torch
import flacompose
from flacompose.layers import GatedLinearAttention

torch.manual_seed(0)
layer = GatedLinearAttention(hidden_size=16, num_heads=2)
y, state = layer(torch.randn(2, 70, 16))
y.sum().backward()
assert y.isfinite().all() and layer.q_proj.weight.grad.isfinite().all()
"""


def python(code: str, *options: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "flacompose"
    assert metadata["Version"] == flacompose.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT"


def test_declared_dependencies(metadata: Message) -> None:
    required = [
        r.replace(" ", "")
        for r in metadata.get_all("Requires-Dist", [])
        if "extra==" not in r.replace(" ", "")
    ]
    assert sorted(required) == ["torch>=2.11", "triton;platform_system=='Linux'"]


def test_wheel_holds_the_package_alone(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "flacompose").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert "flacompose/py.typed" in files
    assert files == sources


def test_import_warns_of_nothing() -> None:
    python("import flacompose", "-W", "error")


def test_runs_without_triton_and_without_a_gpu() -> None:
    python(WITHOUT_TRITON + ONE_CALL, CUDA_VISIBLE_DEVICES="")


def test_triton_is_really_absent_there() -> None:
    code = "try:\n    import triton\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    assert python(WITHOUT_TRITON + code).strip() == "triton"


def test_nothing_imports_the_reference() -> None:
    """The specification serves tests and docs alone."""
    ours = "[name for name in sys.modules if name.startswith('flacompose.')]"
    assert "reference" not in python(f"import sys, flacompose; print({ours})")


def test_torch_is_recent_enough() -> None:
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


@pytest.mark.parametrize("family", ["scalar_decay", "scan", "vector_decay"])
def test_schemas_have_the_inputs_in_their_order(family: str) -> None:
    inputs = import_module(f"flacompose.ops.families.{family}.inputs").Inputs
    for form in ("chunk", "recurrent", "backward"):
        schema = getattr(torch.ops.flacompose, f"{family}_{form}").default._schema
        names = tuple(argument.name for argument in schema.arguments)
        assert names == inputs._fields + ("do", "d_final_state", "output_mask") * (form == "backward")
