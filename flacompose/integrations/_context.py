"""Models of transformers whose tokens are shared out among ranks, for `flacompose.distributed.context_parallel`.

Their recurrent layers call ops of this library, which hand on states, and their convolutions, from rank to rank. What
is between these layers does not mix tokens, but for softmax attention. PyTorch's own `context_parallel` computes that
across the same ranks, where a model calls `scaled_dot_product_attention` within it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.integrations import _modeling
from flacompose.integrations.transformers import recurrent_layers, runs_on
from flacompose.ops._ranks import Ranks, bounds_of_rank, check_device, gathered, shared

# Layers that mix tokens with their neighbours by modules of their own beside the ops.
MIXING = ("ZayaCCAProjection", "Glm5NextTextAttention", "Inkling2DynamicShortConvolution")


def share(model: nn.Module, ranks: Ranks) -> None:
    """Compute the recurrent layers of `model` across `ranks`, in place."""
    rows = runs_on(model)
    if not rows:
        raise ValueError(f"target must contain a recurrent layer, got {type(model).__name__}")
    for row in rows:
        if row.why:
            raise ValueError(
                f"target must run on the ops of this library: call enable() or accelerate() first, got {row.function} "
                f"of the {row.kind} at {row.layer!r} on {row.runs_on} ({row.why})"
            )
    layers = list(recurrent_layers(model))
    for path, _, owner in layers:
        if owner.__name__ in MIXING:
            raise ValueError(
                f"target must hand on tokens by ops alone, got the {owner.__name__} at {path!r}, "
                "which mixes neighbours itself"
            )
    own = {id(layer) for _, layer, _ in layers}
    attention = [
        path
        for path, part in model.named_modules()
        if getattr(part, "is_causal", False) and id(part) not in own
    ]
    for _, layer, _ in layers:
        vars(layer)["forward"] = _shared_forward(layer, ranks)
    vars(model)["forward"] = _numbered_forward(model, ranks, attention[0] if attention else None)


def _shared_forward(layer: nn.Module, ranks: Ranks) -> Callable[..., Any]:
    """The forward of a recurrent layer of this rank's tokens."""
    forward, cache_in = layer.forward, _modeling.finder_of_caches()

    @wraps(forward)
    def shared_forward(*args: Any, **kwargs: Any) -> Any:
        if cache_in(args, kwargs) is not None or kwargs.get("state") is not None:
            raise ValueError("a cache must not be given across ranks (use_cache=False), got one")
        x = args[0] if args else kwargs.get("hidden_states")
        check_device(ranks, "hidden_states", x)
        with shared(ranks):
            for key in ("cu_seq_lens_q", "cu_seqlens"):
                if kwargs.get(key) is not None and isinstance(x, Tensor):
                    kwargs[key] = bounds_of_rank(ranks, kwargs[key], x.shape[1])
            return forward(*args, **kwargs)

    return shared_forward


def _numbered_forward(model: nn.Module, ranks: Ranks, attention: str | None) -> Callable[..., Any]:
    """The forward of the model, whose positions begin with those of this rank's tokens."""
    forward = model.forward
    takes_positions = "position_ids" in inspect.signature(forward).parameters

    @wraps(forward)
    def numbered_forward(*args: Any, **kwargs: Any) -> Any:
        if (
            attention is not None
            and F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        ):
            raise ValueError(
                f"softmax attention ({attention!r}) must be computed across the ranks too: call the model within "
                "torch.distributed.tensor.experimental.context_parallel, and with attn_implementation='sdpa'"
            )
        x = args[0] if args else kwargs.get("input_ids")
        x = kwargs.get("inputs_embeds") if x is None else x
        if takes_positions and len(args) < 3 and kwargs.get("position_ids") is None and isinstance(x, Tensor):
            T = x.shape[1]
            lengths = gathered(ranks, torch.full((1,), T, dtype=torch.int64, device=x.device))
            kwargs["position_ids"] = (lengths[: ranks.rank].sum() + torch.arange(T, device=x.device))[None]
        return forward(*args, **kwargs)

    return numbered_forward
