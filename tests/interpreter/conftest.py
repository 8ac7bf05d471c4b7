"""Triton's interpreter, without its look through all of Triton's language at every call of a function."""

from __future__ import annotations

from functools import cache
from inspect import getmembers, signature
from typing import Any

import pytest
from triton.runtime import interpreter


@cache
def _names(package: Any) -> list[str]:
    """Of the builtins of a package, which has to be as it was imported."""
    return [name for name, member in getmembers(package) if interpreter.tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """What Triton's function of this name does, which is the first that changes a package."""
    for name in _names(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):  # as it is no more if a function calls another
            interpreter._patch_attr(package, name, member, builder, scope)


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> None:
    """Where the function is the one that is known."""
    if list(signature(interpreter._patch_builtin).parameters) == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
