"""What the op of slot attention takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments, in the order of the schema; the backward takes these first. All are of one token."""

    q: Tensor  # [B, 1, H, G, K], the G queries that read the state of a head
    k: Tensor  # [B, 1, H, K]
    v: Tensor  # [B, 1, H, V]
    s: Tensor  # [B, 1, H, M], what each slot takes of the token
    g: Tensor  # [B, 1, H, M], natural-log decay of the slots
    initial_k: Tensor | None = None  # [B, H, K, M]
    initial_v: Tensor | None = None  # [B, H, M, V]
    scale: float = 1.0
