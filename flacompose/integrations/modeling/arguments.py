"""The arguments of a forward: its cache, the bounds of packed sequences, its mask.

The bounds are `cu_seq_lens_q`, which transformers' collators make for attention, or `cu_seqlens`. They exclude a cache,
which has one row per row of the batch, not per sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._parallel.ranks import sharing

# The arguments that describe packed sequences in transformers.
PACKED = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")
# The names of a cache: "cache" in newer releases of transformers, where the other names are deprecated.
CACHES = ("cache", "past_key_values", "cache_params", "state")


def bounds_of(kwargs: dict[str, Any]) -> Tensor | None:
    """The bounds of packed sequences, or None if each row is one sequence."""
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
    """Raise an error for packed sequences. It is for a forward with a cache."""
    for key in PACKED:
        if kwargs.get(key) is not None:
            raise ValueError(f"{key} must come without a cache (use_cache=False), got one")


def finder_of_caches() -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A function that finds the cache, or None, among the arguments of a forward."""
    from transformers.cache_utils import Cache

    def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Cache):
                return x
        return None

    return cache_in


def name_of_cache(forward: Callable[..., Any]) -> str:
    """The name of the cache argument of a forward in the installed version of transformers."""
    names = inspect.signature(forward).parameters
    return next(name for name in CACHES if name in names)


def unwritten(state: Any) -> Any:
    """A state of a cache, copied if a backward may need it: the cache is overwritten later."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def tokens_of(attention_mask: Any) -> Tensor | None:
    """The mask ``[B, T]``, 0 at pads. `generate` of newer releases makes one for each kind of layer."""
    mask = attention_mask.get("linear_attention") if isinstance(attention_mask, dict) else attention_mask
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """``x [B, T, D]`` with zeros at pads."""
    return x if attention_mask is None else (x * attention_mask[:, :, None]).to(x.dtype)


def is_step(x: Tensor) -> bool:
    """Whether ``x [B, T, ...]`` is one token, as in decoding. Across ranks a single token is one of many."""
    return x.shape[1] == 1 and sharing() is None
