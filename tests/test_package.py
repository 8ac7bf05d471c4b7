"""What is installed: its metadata and its files."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from helpers.operators import operator, part

import flacompose

ROOT = Path(__file__).parents[1]


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


def test_version_is_the_newest_of_the_changelog() -> None:
    """Versions fall from the top, and all but the first have the date of their release."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    versions = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - (\d{4}-\d\d-\d\d|unreleased)", x) for x in headings]
    assert all(versions), headings
    numbers = [tuple(map(int, version.groups()[:3])) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)
    assert ".".join(map(str, numbers[0])) == flacompose.__version__
    assert all(version[4] != "unreleased" for version in versions[1:])


def test_links_of_the_readme_work_on_an_index(metadata: Message) -> None:
    """All are absolute, and the text of the others stays."""
    page, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets and all(target.startswith("https://") for target in targets)
    assert targets == [target for target in re.findall(r"\]\(([^)]*)\)", readme) if "://" in target]
    assert "Getting started, choosing, building a\n  model." in page


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


def test_torch_is_recent_enough() -> None:
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


@pytest.mark.parametrize("recurrence", ["matrix", "scan", "selective_scan", "short_conv"])
def test_schemas_have_the_inputs_in_their_order(recurrence: str) -> None:
    inputs = part(recurrence, "inputs").Inputs
    one_form = recurrence in ("selective_scan", "short_conv")
    for form in ("forward", "backward") if one_form else ("chunk", "recurrent", "backward"):
        schema = getattr(torch.ops.flacompose, f"{operator(recurrence)}_{form}").default._schema
        names = tuple(argument.name for argument in schema.arguments)
        assert names == inputs._fields + ("do", "d_final_state", "output_mask") * (form == "backward")
