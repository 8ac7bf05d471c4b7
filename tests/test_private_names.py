"""Private names of PyTorch stand in two files, and one that is gone is reported with the releases that have it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flacompose
from flacompose import _torch

PACKAGE = Path(flacompose.__file__).parent
HOLDERS = {"_torch.py", "_inductor.py"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_private_names_are_imported_in_two_files() -> None:
    private = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for name in imported(ast.parse(path.read_text()))
        if re.match(r"torch\.(.*\.)?_", name) and not name.startswith("torch.__")
    }
    assert private == HOLDERS


def test_a_private_name_that_is_gone_is_reported() -> None:
    code = "import torch; del torch._C._any_requires_grad; import flacompose"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    *_, error = done.stderr.splitlines()
    assert error.startswith(f"ImportError: flacompose is tested with PyTorch {_torch.TESTED}")
    assert "_any_requires_grad" in error
