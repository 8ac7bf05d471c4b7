"""What the op of the short convolution takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of the op, in the order of its schema; the backward takes these first."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W]
    bias: Tensor | None = None  # [D]
    initial_state: Tensor | None = None  # [N, D, W]
    cu_seqlens: Tensor | None = None  # [N + 1]
    silu: bool = False  # whether silu is applied to the sums
