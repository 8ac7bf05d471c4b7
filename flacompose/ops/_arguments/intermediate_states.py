"""Intermediate states: recurrent forms return the states after each of the last tokens on request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._arguments import require
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._tensors.sizes import violated

MAX_STATES = 16

Form = Callable[..., tuple[Tensor, Any]]


def recurrent_form(
    op: ModuleType,
    x: Any,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    output_states: int | None,
    stride: int = 1,
) -> tuple[Form, bool]:
    """The recurrent form of an op, and whether to return its states.

    With `output_states`, the form returns that number of states, one after every `stride` tokens of the op.
    """
    require.flags(output_final_state=output_final_state)
    if sharing() is not None:
        raise ValueError(
            "a function that computes token by token must not be called across ranks: use its chunk form"
        )
    if output_states is None:
        return op.recurrent, output_final_state
    check(output_states, x, cu_seqlens)
    return partial(op.steps, count=output_states, stride=stride), True


def windows(history: Tensor, W: int, n: int) -> Tensor:
    """The states ``[N, n, D, W]`` of a convolution after each of the last ``n`` tokens of ``history [N, W + T, D]``."""
    first = history.shape[1] - W - n + 1
    states = torch.stack([history[:, first + i : first + i + W] for i in range(n)], 1)
    return states.mT.clone(memory_format=torch.contiguous_format)


def check(n: Any, x: Any, cu_seqlens: Tensor | None, name: str = "output_states") -> None:
    """Check the argument `name`, the number `n` of states of ``x [B, T, ...]``. `x` may not be checked yet."""
    require.integer(name, n)
    n = int(n)  # comparisons of NumPy's integers return bools of NumPy
    if not 1 <= n <= MAX_STATES:
        raise ValueError(f"{name} must be from 1 to {MAX_STATES}, got {n}")
    if sharing() is not None:
        raise ValueError(f"{name} must not be given across ranks, which share the last tokens too, got {n}")
    if cu_seqlens is not None:
        raise ValueError(
            f"{name} must not be given with cu_seqlens, whose sequences would have to be rows of a batch, got {n}"
        )
    # If `x` is no batch of tokens, the checks that follow report it.
    if isinstance(x, Tensor) and not x.is_nested and x.dim() > 1 and violated(n <= x.shape[1]):
        raise ValueError(f"{name} must be at most the number of tokens T = {x.shape[1]}, got {n}")
