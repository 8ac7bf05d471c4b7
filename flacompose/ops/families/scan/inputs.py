"""What the ops of the elementwise scan take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of the forms, in the order of their schema; the backward takes these first."""

    x: Tensor  # [B, T, D]
    g: Tensor  # [B, T, D]
    initial_state: Tensor | None = None  # [N, D]
    cu_seqlens: Tensor | None = None  # [N + 1]
