"""ValueError and TypeError whose message `torch.compile` shows first.

Dynamo reports an error in traced code as "Observed exception" with explanations and hints, and puts the message
at the end. The report of these errors begins with the message. A file whose errors users see while they compile
imports both from here, by Python's names. Outside a trace they are just subclasses of Python's errors, whose
`__new__` keeps the message.
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
