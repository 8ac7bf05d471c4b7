"""The functions of a family as functions of the arguments of its operators."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from flacompose.ops import _recurrences
from flacompose.ops._operators.signature import Signature

ROOT = Path(_recurrences.__file__).parent
# The package of each family, by its name.
PACKAGES = {
    file.parent.name: ".".join([_recurrences.__name__, *file.relative_to(ROOT).parts[:-1]])
    for file in ROOT.rglob("op.py")
}


def part(family: str, name: str) -> ModuleType:
    return import_module(f"{PACKAGES[family]}.{name}")


def signature_of(module: ModuleType) -> Signature[Any]:
    """That of the family whose `eager` or `cuda` this module is."""
    return part(module.__name__.split(".")[-2], "inputs").SIGNATURE


def flat(module: ModuleType, form: str) -> Callable[..., Any]:
    """A form or the "backward" of a family's `eager` or `cuda`, as a function of the operator's arguments."""
    signature, function = signature_of(module), getattr(module, form)
    return signature.flat_backward(function) if form == "backward" else signature.flat(function)
