"""Weights that two processes make alike, so that expected logits can be stored without them."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

_PRIME = 1_000_003


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """A float32 parameter of pseudo-random numbers that follow from its name: in integers, so they are exact."""
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    seed = zlib.crc32(name.encode()) % _PRIME
    uniform = (
        (i * i % _PRIME * 7919 + i * 104_729 + seed) % _PRIME
    ).double() / _PRIME * 2 - 1  # from -1 to 1
    if "norm" in name and name.endswith(".weight"):
        values = 1 + 0.4 * uniform
    elif len(shape) == 1 or "embeddings" in name or name.endswith(("bonus", "x_bias", "lower_bounds")):
        values = uniform
    else:
        values = uniform * 3 / math.sqrt(math.prod(shape[1:]))
    return values.float().reshape(shape)


def tokens(batch: int, length: int, vocab_size: int) -> Tensor:
    """Pseudo-random tokens, likewise, ``[B, T]``."""
    i = torch.arange(batch * length, dtype=torch.int64)
    return ((i * i * 31 + i * 17 + 5) % 101 % vocab_size).reshape(batch, length)
