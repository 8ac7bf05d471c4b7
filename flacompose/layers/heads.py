"""How many heads a layer has and how large they are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flacompose.layers import _check
from flacompose.ops._check import MAX_HEAD_SIZE


class Heads(NamedTuple):
    """Heads of queries, and as many or fewer of keys and values, each with its number of channels."""

    H: int  # heads of queries
    HKV: int  # heads of keys and values
    K: int  # channels of a query and of a key
    V: int  # channels of a value


def heads_of(
    hidden_size: int, num_heads: int, num_kv_heads: int | None, expand_k: float, expand_v: float
) -> Heads:
    """Check these arguments of a layer; the heads of queries have all of ``hidden_size * expand_k`` channels."""
    _check.count("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    _check.integer("num_kv_heads", num_kv_heads)
    if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
    K = _head_size("expand_k", hidden_size, expand_k, num_heads)
    V = _head_size("expand_v", hidden_size, expand_v, num_heads)
    return Heads(num_heads, num_kv_heads, K, V)


def expanded_heads(
    hidden_size: int, num_heads: int | None, expand_ratio: int | None, agree: bool = False
) -> Heads:
    """The heads of a layer whose heads have `expand_ratio` keys each; either number follows from the other.

    With `agree` they must still follow from each other where both are given.
    """
    if num_heads is None and expand_ratio is None:
        raise ValueError("num_heads or expand_ratio must be given, got None for both")
    follows = num_heads is None
    if num_heads is not None:
        _check.count("num_heads", num_heads)
        # A user who gives num_heads alone still has the default of expand_ratio, and reads of an argument never given.
        hint = f" (128 is the default; expand_ratio=None means hidden_size // num_heads = {hidden_size // num_heads})"
    else:
        hint = " (128 is the default; give expand_ratio, the number of keys of a head)"
    if expand_ratio is not None:
        _check.head_size("expand_ratio", expand_ratio)
        if (agree or num_heads is None) and expand_ratio > hidden_size:
            raise ValueError(
                f"expand_ratio must be at most hidden_size = {hidden_size}, got {expand_ratio}{hint}"
            )
        if num_heads is None:
            num_heads = hidden_size // expand_ratio
        elif agree and num_heads != hidden_size // expand_ratio:
            raise ValueError(
                f"num_heads must be hidden_size // expand_ratio = {hidden_size // expand_ratio}, "
                f"got {num_heads} with expand_ratio = {expand_ratio}{hint}"
            )
    assert num_heads is not None
    if hidden_size % num_heads != 0:
        raise ValueError(
            f"hidden_size must be a multiple of num_heads = {num_heads}, got {hidden_size}{hint if follows else ''}"
        )
    V = hidden_size // num_heads
    if V > MAX_HEAD_SIZE:
        raise ValueError(f"hidden_size / num_heads must be at most {MAX_HEAD_SIZE}, got {V}")
    return Heads(num_heads, num_heads, V if expand_ratio is None else expand_ratio, V)


def check_even(K: int) -> None:
    """Check that rotary positions can turn the two halves of a key against each other."""
    if K % 2 != 0:
        raise ValueError(f"hidden_size * expand_k / num_heads must be even, for rotary positions, got {K}")


def shared(x: Tensor, groups: int) -> Tensor:
    """``[B, T, H, D]`` as ``[B, T, H * groups, D]``, each head repeated for `groups` neighbouring heads of queries."""
    return x if groups == 1 else x.unsqueeze(3).expand(-1, -1, -1, groups, -1).flatten(2, 3)


def _head_size(argument: str, hidden_size: int, ratio: float, num_heads: int) -> int:
    """``hidden_size * ratio / num_heads``, which must be an int."""
    _check.number(argument, ratio)
    dim = _check.whole(hidden_size * ratio)
    if dim < 1 or dim % num_heads != 0:
        raise ValueError(
            f"hidden_size * {argument} must be a positive multiple of num_heads = {num_heads}, "
            f"got {hidden_size * ratio}"
        )
    if dim // num_heads > MAX_HEAD_SIZE:
        raise ValueError(
            f"hidden_size * {argument} / num_heads must be at most {MAX_HEAD_SIZE}, got {dim // num_heads}"
        )
    return dim // num_heads
