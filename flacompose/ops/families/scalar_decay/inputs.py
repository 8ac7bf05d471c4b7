"""What the ops of scalar decay take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of the forms, in the order of their schema; the backward takes these first."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V], HV a multiple of H
    g: Tensor | None = None  # [B, T, HV], a decay per token and head
    g_gamma: Tensor | None = None  # [HV], a decay per head, the same for every token
    beta: Tensor | None = None  # [B, T, HV], how strongly a token is written, 1 if absent
    initial_state: Tensor | None = None  # [N, HV, K, V]
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
