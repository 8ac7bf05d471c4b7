"""Conditions on sizes that a graph leaves open or that only the data know."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_HEAD_SIZE = 512  # of keys and of values


def always_true(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` holds for all values of its symbols; asking adds no guard."""
    # By identity: under torch.compile a condition on symbols is a bool for isinstance, too.
    if condition is True or condition is False:
        return condition
    if isinstance(condition, Tensor):  # as sizes are under torch.jit.trace, where no condition always holds
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(condition)


def is_known(size: int | torch.SymInt) -> bool:
    """Whether `size` is one number, not left open by a graph; asking adds no guard."""
    if not torch.compiler.is_compiling():  # in a trace a symbol is an int for isinstance
        return isinstance(size, int)  # not a tensor, as sizes are under torch.jit.trace
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

    return has_static_value(size)


def violated(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` on sizes is false.

    For a size that a graph leaves open, the answer holds for the current size, which then guards the graph.
    If only the data know a size, the answer is no, and the graph asserts the condition when it runs.
    """
    if condition is True or condition is False:
        return not condition
    if isinstance(condition, Tensor):  # as sizes are under torch.jit.trace
        return not bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true  # slow to import

    if guard_or_false(condition):
        return False
    if not guard_or_true(condition):
        return True
    torch._check(condition)
    return False
