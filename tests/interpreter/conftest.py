"""Triton's interpreter, without its look through all of Triton's language at every call of a function."""

from __future__ import annotations

import os
from functools import cache
from inspect import getmembers, signature
from typing import Any

import pytest
from triton.runtime import interpreter

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported")


@cache
def _names(package: Any) -> list[str]:
    """Names of the builtins of a package. The first call comes before the interpreter changes the package."""
    return [name for name, member in getmembers(package) if interpreter.tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Does what Triton's function of this name does: nothing else replaces the builtins of a package."""
    for name in _names(package):
        member = getattr(package, name)
        # Where a kernel calls a function, the kernel's own call has replaced the builtins already.
        if interpreter.tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> None:
    """Replaces Triton's function, if its arguments are those that the one above was written for."""
    if list(signature(interpreter._patch_builtin).parameters) == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
