"""The errors of wrong arguments: Python's own, which `torch.compile` shows by their text.

An error in code that Dynamo traces is reported as "Observed exception", under explanations of Dynamo and hints that do
not help, with its text at the end. Of these, the report begins with the text. A file whose errors users see while their
code is compiled imports both from here, under the names of Python's, and raises them as ever. Outside a trace they are
no more than subclasses of Python's, whose `__new__` keeps the message.
"""

from __future__ import annotations

import builtins

import torch

from flacompose._torch import report_from_trace


class ValueError(builtins.ValueError):
    """A tensor, a number or a choice that is not what the function takes."""

    def __init__(self, message: str = "") -> None:
        if torch.compiler.is_dynamo_compiling():
            report_from_trace("ValueError", message)


class TypeError(builtins.TypeError):
    """Something of a type or a dtype that the function does not take."""

    def __init__(self, message: str = "") -> None:
        if torch.compiler.is_dynamo_compiling():
            report_from_trace("TypeError", message)
