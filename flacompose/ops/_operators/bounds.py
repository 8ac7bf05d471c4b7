"""The check of the bounds of packed sequences as an operator, which compiled code keeps.

The operators of recurrences check their bounds themselves. This one is for code that reads bounds without
calling such an operator, or that calls one with bounds other than the user's.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from flacompose.ops._operators.checked import checking
from flacompose.ops._operators.define import define_op
from flacompose.ops._tensors.packed import check_bounds

Bounds = TypeVar("Bounds", bound=Tensor | None)


def _checked(cu_seqlens: Tensor, lengths: Tensor | None, T: int) -> tuple[Tensor, ...]:
    if cu_seqlens.is_cpu or checking():
        check_bounds(cu_seqlens, T if lengths is None else sum(lengths.tolist()))
    return (cu_seqlens.clone(),)


_op = define_op(
    "checked_bounds",
    "(Tensor cu_seqlens, Tensor? lengths, SymInt T) -> (Tensor bounds)",
    eager=_checked,
    fake=lambda cu_seqlens, lengths, T: (torch.empty_like(cu_seqlens),),
    axes={},
)


def verified(cu_seqlens: Bounds, T: int, lengths: Tensor | None = None, in_graphs: bool = True) -> Bounds:
    """`cu_seqlens` of ``T`` tokens, or of the sum of `lengths`; on a CPU wrong values are refused.

    Elsewhere no value is read except within `flacompose.checked`, and wrong values pass. If an operator is
    called with bounds computed from these, it refuses wrong ones itself, and no node is needed `in_graphs`.
    """
    if cu_seqlens is None or hasattr(cu_seqlens, "device_mesh"):
        return cu_seqlens
    if torch.compiler.is_compiling():
        return _op(cu_seqlens, lengths, T) if in_graphs and cu_seqlens.is_cpu else cu_seqlens
    if type(cu_seqlens) is Tensor:
        _checked(cu_seqlens, lengths, T)
    return cu_seqlens
