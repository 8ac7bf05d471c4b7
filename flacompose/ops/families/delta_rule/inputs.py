"""What the ops of the delta rule take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of the forms, in the order of their schema; the backward takes these first."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    beta: Tensor  # [B, T, HV], how much of a value is replaced
    g: Tensor | None = None  # [B, T, HV], a decay per token and head
    gk: Tensor | None = None  # [B, T, HV, K], a decay per token, head and channel of the key
    initial_state: Tensor | None = None  # [N, HV, K, V]
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
