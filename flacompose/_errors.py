"""The errors of wrong arguments: Python's own, whose text `torch.compile` shows first.

An error in code that Dynamo traces is reported as "Observed exception", after explanations of Dynamo and
hints that do not help, with its text at the end. The report of these errors begins with the text. A file
whose errors users see while their code is compiled imports both from here, under Python's names, and raises
them as usual. Outside a trace they are just subclasses of Python's, whose `__new__` keeps the message.
"""

from __future__ import annotations

import builtins

import torch

from flacompose._torch import report_from_trace


class ValueError(builtins.ValueError):
    """A tensor, a number or a choice that the function does not accept."""

    def __init__(self, message: str = "") -> None:
        if torch.compiler.is_dynamo_compiling():
            report_from_trace("ValueError", message)


class TypeError(builtins.TypeError):
    """A type or dtype that the function does not accept."""

    def __init__(self, message: str = "") -> None:
        if torch.compiler.is_dynamo_compiling():
            report_from_trace("TypeError", message)
