"""What the ops of vector decay take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of the forms, in the order of their schema; the backward takes these first."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    gk: Tensor | None = None  # [B, T, H, K]
    gv: Tensor | None = None  # [B, T, H, V]
    u: Tensor | None = None  # [H, K], the bonus of the current token
    initial_state: Tensor | None = None  # [N, H, K, V]
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
    softmax: bool = False  # q are logits, of any dtype, and the state is read with their softmax
    full_precision: bool = False  # the output has the dtype of states, whatever that of the inputs
