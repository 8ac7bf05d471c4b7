"""Models of transformers for `flacompose.distributed.context_parallel`.

The recurrent layers call ops of this library, which pass the states of recurrences and convolutions from rank to rank.
Of the other modules, only softmax attention mixes tokens. A model is called within PyTorch's own `context_parallel`,
which computes `scaled_dot_product_attention` across the same ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from flacompose._torch import reorders_tokens, sdpa_is_plain
from flacompose.integrations.modeling.arguments import finder_of_caches
from flacompose.integrations.transformers import recurrent_layers, runs_on
from flacompose.ops._parallel.ranks import Ranks, bounds_of_rank, check_device, lengths_of_ranks, shared

# Layers that mix neighbouring tokens in modules of their own, outside the ops.
MIXING = ("ZayaCCAProjection", "Glm5NextTextAttention", "Inkling2DynamicShortConvolution")


def share(model: nn.Module, ranks: Ranks) -> bool:
    """Compute the recurrent layers of transformers in `model` across `ranks`; return whether there are any."""
    rows = runs_on(model)
    for row in rows:
        if row.why:
            raise ValueError(
                f"target must run on the ops of this library: call enable() or accelerate() first, got {row.function} "
                f"of the {row.kind} at {row.layer!r} on {row.runs_on} ({row.why})"
            )
    layers = list(recurrent_layers(model)) if rows else []
    for path, _, owner in layers:
        if owner.__name__ in MIXING:
            raise ValueError(
                f"target must hand on tokens by ops alone, got the {owner.__name__} at {path!r}, "
                "which mixes neighbours itself"
            )
    own = {id(layer) for _, layer, _ in layers}
    attention = [
        part for part in model.modules() if getattr(part, "is_causal", False) and id(part) not in own
    ]
    for part in attention if layers else ():
        kind = getattr(getattr(part, "config", None), "_attn_implementation", "sdpa")
        if kind != "sdpa":
            raise ValueError(f"target must have attn_implementation='sdpa', got {kind!r}")
    for _, layer, _ in layers:
        _wrap(layer, ranks, _shared_forward)
    if layers:
        _wrap(model, ranks, _hybrid_forward if attention else _numbered_forward)
    return bool(layers)


def _wrap(module: Any, ranks: Ranks, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the forward of the module by `made(forward)`, as a method, so that a copy calls its own forward."""
    module.ranks = ranks
    vars(module)["forward"] = MethodType(made(type(module).forward), module)


def _shared_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a recurrent layer for the tokens of this rank."""
    cache_in = finder_of_caches()

    @wraps(forward)
    def shared_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if cache_in(args, kwargs) is not None or kwargs.get("state") is not None:
            raise ValueError("a cache must not be given across ranks (use_cache=False), got one")
        x = args[0] if args else kwargs.get("hidden_states")
        check_device(self.ranks, "hidden_states", x)
        with shared(self.ranks):
            for key in ("cu_seq_lens_q", "cu_seqlens"):
                if key in kwargs and isinstance(x, Tensor):
                    kwargs[key] = bounds_of_rank(self.ranks, kwargs[key], x.shape[1])
            return forward(self, *args, **kwargs)

    return shared_forward


def _numbered_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model, with the positions of this rank's tokens."""
    signature = inspect.signature(forward)

    @wraps(forward)
    def numbered_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = list(signature.parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given.get("input_ids")
        x = given.get("inputs_embeds") if x is None else x
        if "position_ids" in names and given.get("position_ids") is None and isinstance(x, Tensor):
            before = lengths_of_ranks(self.ranks, x.shape[1], x.device)[: self.ranks.rank].sum()
            given["position_ids"] = (before + torch.arange(x.shape[1], device=x.device))[None]
            return forward(self, **given)
        return forward(self, *args, **kwargs)

    return numbered_forward


def _hybrid_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model with softmax attention, which PyTorch computes across the ranks in order."""
    numbered = _numbered_forward(forward)

    @wraps(forward)
    def hybrid_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if sdpa_is_plain():
            raise ValueError(
                "softmax attention must be computed across the ranks too, got PyTorch's of one process: call the model "
                "within torch.distributed.tensor.experimental.context_parallel"
            )
        if reorders_tokens():
            raise ValueError(
                "torch.distributed.tensor.experimental.context_parallel must keep the order of tokens, got its load "
                "balancer: set torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
            )
        return numbered(self, *args, **kwargs)

    return hybrid_forward
