"""The arguments of a forward: its cache, the bounds of packed sequences, its mask.

The bounds come as `cu_seq_lens_q`, which transformers' collators make for attention, or as `cu_seqlens`. They come
without a cache, which has one row for each row of a batch and none for each sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._parallel.ranks import sharing

# By which of their arguments modules of transformers tell packed sequences apart.
PACKED = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")
# The names of a cache: "cache" in newer releases of transformers, which have the others still, as deprecated ones.
CACHES = ("cache", "past_key_values", "cache_params", "state")


def bounds_of(kwargs: dict[str, Any]) -> Tensor | None:
    """The bounds of packed sequences, or None if each row is one."""
    given = given_bounds(kwargs)
    if given is None and kwargs.get("seq_idx") is not None:
        raise ValueError(
            "seq_idx must come with cu_seq_lens_q, the bounds of the packed sequences, got seq_idx alone"
        )
    return given


def given_bounds(kwargs: dict[str, Any]) -> Tensor | None:
    given = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if given is None else given


def refuse_packed(kwargs: dict[str, Any]) -> None:
    """Raise an error for packed sequences; for a forward that has a cache."""
    for key in PACKED:
        if kwargs.get(key) is not None:
            raise ValueError(f"{key} must come without a cache (use_cache=False), got one")


def finder_of_caches() -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A function that returns the cache, or None, among the arguments of a forward, whatever transformers calls it."""
    from transformers.cache_utils import Cache

    def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Cache):
                return x
        return None

    return cache_in


def name_of_cache(forward: Callable[..., Any]) -> str:
    """The name of the cache among the arguments of a forward, in the transformers that is there."""
    names = inspect.signature(forward).parameters
    return next(name for name in CACHES if name in names)


def unwritten(state: Any) -> Any:
    """A state of a cache, or a copy, which the op that reads it may keep for a backward: the cache is written to."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def tokens_of(attention_mask: Any) -> Tensor | None:
    """``[B, T]``, 0 at pads, of a mask, or of one for each kind of layer, which `generate` of newer releases makes."""
    mask = attention_mask.get("linear_attention") if isinstance(attention_mask, dict) else attention_mask
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """``x [B, T, D]`` with zeros at pads."""
    return x if attention_mask is None else (x * attention_mask[:, :, None]).to(x.dtype)


def is_step(x: Tensor) -> bool:
    """Whether there is one token of ``x [B, T, ...]``, as in decoding; across ranks it is one of many."""
    return x.shape[1] == 1 and sharing() is None
