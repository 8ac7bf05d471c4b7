"""The functions of a recurrence as functions of the arguments of its operators.

A recurrence with a matrix state is named by its scheme: its operators are those of all schemes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from flacompose.ops import _recurrences
from flacompose.ops._operators.signature import Signature
from flacompose.ops._recurrences.matrix.eager import SCHEMES

ROOT = Path(_recurrences.__file__).parent
# The package of each recurrence, by its name.
PACKAGES = {
    file.parent.name: ".".join([_recurrences.__name__, *file.relative_to(ROOT).parts[:-1]])
    for file in ROOT.rglob("op.py")
}
# The arguments that choose a scheme with its reference.
CHOICES = {"delta_rule": {"delta_rule": True}, "low_rank": {"read_before": True}}
SHARES_HEADS = ("head_decay", "delta_rule")


def part(recurrence: str, name: str) -> ModuleType:
    of_matrix = recurrence in (*SCHEMES, operator("matrix"))
    return import_module(f"{PACKAGES['matrix' if of_matrix else recurrence]}.{name}")


def operator(recurrence: str) -> str:
    """The first part of the names of the operators."""
    return "matrix_recurrence" if recurrence in (*SCHEMES, "matrix") else recurrence


def reference(recurrence: str) -> Callable[..., Any]:
    function = getattr(part(recurrence, "reference"), operator(recurrence))
    return partial(function, **CHOICES[recurrence]) if recurrence in CHOICES else function


def axes(recurrence: str) -> dict[str, str]:
    """The axes of arguments and results. Only some schemes share heads of queries and keys."""
    of_operator = part(recurrence, "inputs").SIGNATURE.axes
    shared = recurrence not in SCHEMES or recurrence in SHARES_HEADS
    return {x: y if shared else y.replace("HV", "H") for x, y in of_operator.items()}


def signature_of(module: ModuleType) -> Signature[Any]:
    """That of the recurrence whose `eager` or `cuda` this module is."""
    return part(module.__name__.split(".")[-2], "inputs").SIGNATURE


def flat(module: ModuleType, form: str) -> Callable[..., Any]:
    """A form or the "backward" of an `eager` or `cuda`, as a function of the operator's arguments."""
    signature, function = signature_of(module), getattr(module, form)
    return signature.flat_backward(function) if form == "backward" else signature.flat(function)
