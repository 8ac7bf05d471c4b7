"""Attributes of modules that are constants of compiled graphs."""

from __future__ import annotations

from typing import Any

from torch import nn


def number(name: str) -> Any:
    """A property for the number `name` of a module, which is a constant of graphs, with a guard.

    With ``dynamic=True`` Dynamo takes a float of a module for an input of the graph. Where an operator needs its value,
    such as `clamp`, it has to trace again. A number in a tuple is a constant, so the property keeps it in a tuple.
    """
    held = f"_{name}"

    def get(module: nn.Module) -> Any:
        # Modules that an older version pickled have the number itself.
        return module.__dict__[name] if name in module.__dict__ else getattr(module, held)[0]

    def put(module: nn.Module, value: float | None) -> None:
        setattr(module, held, (value,))

    return property(get, put)
