"""Numbers of modules that compiled graphs have as constants."""

from __future__ import annotations

from typing import Any

from torch import nn


def number(name: str) -> Any:
    """A property for the attribute `name` of a module: a number that is fixed in a graph, and guarded.

    With ``dynamic=True`` Dynamo takes a float of a module for an input of the graph. Where an operator needs its value,
    as the clamp does, Dynamo learns this from the backend, and traces again. A number in a tuple of a module is a
    constant, so the property keeps it there.
    """
    held = f"_{name}"

    def get(module: nn.Module) -> Any:
        # Modules that were saved whole by an older version have the number itself.
        return module.__dict__[name] if name in module.__dict__ else getattr(module, held)[0]

    def put(module: nn.Module, value: float | None) -> None:
        setattr(module, held, (value,))

    return property(get, put)
