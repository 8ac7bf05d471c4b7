"""Qwen3-Next, Qwen3.5, Qwen4 and OLMo hybrid: grouped value heads, masks, and fused projections."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose._torch import is_exporting
from flacompose.integrations.modeling.arguments import PACKED
from flacompose.integrations.modeling.forward import Forward, ModuleWith, layer_forward, module_forward
from flacompose.layers.fused_projections import fusible_paths


@layer_forward
def qwen3_next_delta_rule_forward(forward: Forward, layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Do not repeat queries and keys, since the op takes grouped value heads.

    The forward reads ``num_v_heads`` only to repeat queries and keys for each value head.
    """
    return forward(
        ModuleWith(layer, num_v_heads=layer.num_k_heads, **joined_projections(layer)), *args, **kwargs
    )


@module_forward
def qwen3_next_model_forward(forward: Forward, model: Any, cache: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compile a decoder without a mask if its sequences need only a causal mask.

    PyTorch's softmax attention is causal without a mask. While it is traced, transformers makes a mask of all pairs of
    tokens, with which kernels do not skip the masked pairs.
    """
    given = [cache, *(kwargs.get(key) for key in ("attention_mask", "position_ids", *PACKED))]
    only_causal = len(args) <= 1 and all(x is None for x in given)
    config = model.config
    by_itself = config._attn_implementation == "sdpa" and getattr(config, "is_causal", True)
    # An exported program may be called with one token and a cache, even if the example had no cache.
    if only_causal and by_itself and torch.compiler.is_compiling() and not is_exporting():
        kwargs["attention_mask"] = dict.fromkeys(config.layer_types)
    return forward(model, *args, **kwargs)


@module_forward
def joined_projections_forward(forward: Forward, module: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """For softmax attention or a feed-forward network whose projections may be fused."""
    given = joined_projections(module)
    return forward(ModuleWith(module, **given) if given else module, *args, **kwargs)


def joined_projections(layer: Any) -> dict[str, Any]:
    """Replacements of the projections that `join_projections` has fused, for one call of the layer's forward.

    The forward calls all of them with the same input, so the first call computes them all.
    """
    parts: list[Tensor] = []

    def part(i: int, x: Tensor) -> Tensor:
        if not parts:
            parts.extend(layer.joint_proj(x).split(layer.joint_sizes, -1))
        return parts[i]

    names = fusible_paths(layer) if getattr(layer, "joint_sizes", ()) else []
    return {name: partial(part, i) for i, name in enumerate(names)}


FORWARDS = {
    "Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet "
    "OlmoHybridGatedDeltaNet": qwen3_next_delta_rule_forward,
    "Qwen3NextModel Qwen3_5TextModel Qwen3_5MoeTextModel OlmoHybridModel": qwen3_next_model_forward,
    "Qwen3NextAttention Qwen3NextMLP Qwen3_5Attention Qwen3_5MLP": joined_projections_forward,
}
