"""What the op of the selective scan takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of the op, in the order of its schema; the backward takes these first."""

    x: Tensor  # [B, T, D]
    dt: Tensor  # [B, T, D], any float dtype
    A: Tensor  # [D, S], any float dtype
    B: Tensor  # [B, T, G, S]; each of the G groups of channels has its own
    C: Tensor  # [B, T, G, S]
    initial_state: Tensor | None = None  # [N, D, S]
    cu_seqlens: Tensor | None = None  # [N + 1]
