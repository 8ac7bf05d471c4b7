"""What the launches of all families share."""

from __future__ import annotations

import torch
from torch import Tensor


def block(D: int, largest: int) -> int:
    """The power of two, 16 at least, that holds `D`, or `largest`."""
    return min(max(1 << (D - 1).bit_length(), 16), largest)


def tile_count(D: int, B: int) -> int:
    return (D + B - 1) // B


def operand(x: Tensor) -> Tensor:
    """float16 overflows where a state or a sum of products is large; it is computed with in float32."""
    return x.to(torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32).contiguous()


def given(x: Tensor | None) -> Tensor | None:
    return None if x is None else operand(x)


def segment_count(NT: int, programs: int) -> int:
    """Parts in which to sweep a sequence of `NT` chunks, `programs` to a part: enough to fill a large chip.

    By the shape of one row, so that its bits do not depend on the batch size.
    """
    # Not `max` and `min`, which would ask a symbolic length and so bound it.
    return torch.sym_max(1, torch.sym_min(NT // 64, 512 // programs))
