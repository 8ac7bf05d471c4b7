"""Numbers and sizes of heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.ops._tensors.dtensor import flatten, shards, unflatten
from flacompose.ops._tensors.sizes import MAX_HEAD_SIZE


def heads_of(
    hidden_size: int,
    heads: int,
    kv_heads: int | None,
    expand_k: float,
    expand_v: float,
    rotary: bool = False,
    wide_keys: bool = False,
) -> tuple[int, int, int, int]:
    """Check these arguments; return the number of query heads, of key heads, and the head sizes K and V.

    Query heads have ``hidden_size * expand_k`` channels in all. With a `rotary` embedding, K must be even. Without
    `wide_keys`, K is at most the largest size of one call of an op.
    """
    _check.count("num_heads", heads)
    kv_heads = heads if kv_heads is None else kv_heads
    _check.integer("num_kv_heads", kv_heads)
    if kv_heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"num_kv_heads must divide num_heads = {heads}, got {kv_heads}")
    K = _head_size("expand_k", hidden_size, expand_k, heads)
    V = _head_size("expand_v", hidden_size, expand_v, heads)
    if K > MAX_HEAD_SIZE and not wide_keys:
        raise ValueError(f"hidden_size * expand_k / num_heads must be at most {MAX_HEAD_SIZE}, got {K}")
    if rotary and K % 2 != 0:
        raise ValueError(f"hidden_size * expand_k / num_heads must be even, for rotary positions, got {K}")
    return heads, kv_heads, K, V


def expanded_heads(
    hidden_size: int, num_heads: int | None, expand_ratio: int | None, agree: bool = False
) -> tuple[int, int, int]:
    """Check these arguments; return the number of heads and the head sizes K, which is `expand_ratio`, and V.

    Each of `num_heads` and `expand_ratio` follows from the other. With `agree`, both must agree if both are given.
    """
    if num_heads is None and expand_ratio is None:
        raise ValueError("num_heads or expand_ratio must be given, got None for both")
    hint = "give expand_ratio, the number of keys of a head"
    if num_heads is not None:
        _check.count("num_heads", num_heads)
        # If only num_heads is given, the error is about a default, which needs an explanation.
        hint = f"expand_ratio=None means hidden_size // num_heads = {hidden_size // num_heads}"
    hint = f" (128 is the default; {hint})"
    H = num_heads
    if expand_ratio is not None:
        _check.head_size("expand_ratio", expand_ratio)
        if agree or H is None:
            if expand_ratio > hidden_size:
                raise ValueError(
                    f"expand_ratio must be at most hidden_size = {hidden_size}, got {expand_ratio}{hint}"
                )
            H = hidden_size // expand_ratio
            if num_heads not in (None, H):
                raise ValueError(
                    f"num_heads must be hidden_size // expand_ratio = {H}, "
                    f"got {num_heads} with expand_ratio = {expand_ratio}{hint}"
                )
    assert H is not None
    if hidden_size % H != 0:
        why = hint if num_heads is None else ""
        raise ValueError(f"hidden_size must be a multiple of num_heads = {H}, got {hidden_size}{why}")
    V = hidden_size // H
    K = V if expand_ratio is None else expand_ratio
    if K > MAX_HEAD_SIZE:
        raise ValueError(f"hidden_size / num_heads must be at most {MAX_HEAD_SIZE}, got {K}")
    return H, K, V


def value_heads(
    num_heads: int, num_v_heads: int | None, head_dim: int, expand_v: float
) -> tuple[int, int, int]:
    """Check these arguments of a layer of the delta rule; return the number of value heads HV, their size V and parts.

    Ops take heads of at most 512 values. The values of a head are independent in the delta rule, so a larger head
    is computed as several heads, equal parts of its values with the same keys.
    """
    _check.count("num_heads", num_heads)
    HV = num_heads if num_v_heads is None else num_v_heads
    _check.integer("num_v_heads", HV)
    if HV < 1 or HV % num_heads != 0:
        raise ValueError(f"num_v_heads must be a multiple of num_heads = {num_heads}, got {HV}")
    _check.head_size("head_dim", head_dim)
    _check.number("expand_v", expand_v)
    V = _check.positive_int("head_dim * expand_v", head_dim * expand_v)
    parts = -(-V // MAX_HEAD_SIZE)
    if V % parts != 0:
        raise ValueError(
            f"head_dim * expand_v must have {parts} equal parts of at most {MAX_HEAD_SIZE}, got {V}"
        )
    return HV, V, parts


def in_heads(x: Tensor, heads: int) -> Tensor:
    """``[..., heads * D]`` as ``[..., heads, D]``, also if the number of ranks does not divide `heads`."""
    return unflatten(x, -1, (heads, -1))


def rows_in_heads(x: Tensor, like: Tensor, heads: int) -> Tensor:
    """``x``, rows as `rows_of` makes them, as ``[B, T, heads, D]``, where ``like [B, T, ...]`` has the tokens."""
    return in_heads(x, heads) if x.ndim == 3 else x.view(*like.shape[:2], heads, x.shape[1] // heads)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """``[B, T, H, ...]`` as ``[B, T, H * groups, ...]``, each head repeated for `groups` neighbouring heads."""
    if groups == 1:
        return x
    return flatten(x.unsqueeze(3).expand(-1, -1, -1, groups, *[-1] * (x.ndim - 3)), 2, 3)


def sharded_like_values(x: Tensor, like: Any, heads: int) -> Tensor:
    """``x [B, T, H, K]``, queries or keys, for an op that takes `heads` heads of values.

    Value heads are sharded like ``like [B, T, ...]``. If the number of ranks does not divide the ``H`` heads of `x`,
    each rank gets one head of `x` for each of its own value heads.
    """
    ranks = shards(like, 2)
    if ranks == 1 or x.shape[2] == 1 or x.shape[2] % ranks == 0:  # one head serves all value heads
        return x
    repeated: Any = repeat_heads(x, heads // x.shape[2])
    placements = [p if p.is_shard(2) else own for p, own in zip(like.placements, repeated.placements)]
    return repeated.redistribute(placements=placements)


def _head_size(argument: str, hidden_size: int, ratio: float, num_heads: int) -> int:
    """``hidden_size * ratio / num_heads``, which must be an int."""
    _check.number(argument, ratio)
    name = f"hidden_size * {argument}"
    return _check.positive_int(name, hidden_size * ratio, "num_heads", num_heads) // num_heads
