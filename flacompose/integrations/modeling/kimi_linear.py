"""Kimi Linear: its layers of KDA. The decoder, softmax attention and feed-forward networks are as in `qwen3_next`."""

from __future__ import annotations

from typing import Any

from flacompose.integrations.modeling.forward import Forward, ModuleWith, layer_forward
from flacompose.integrations.modeling.qwen3_next import (
    joined_projections,
    joined_projections_forward,
    qwen3_next_model_forward,
)


@layer_forward
def kimi_linear_delta_rule_forward(forward: Forward, layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """For a layer whose projections may be fused."""
    return forward(ModuleWith(layer, **joined_projections(layer)), *args, **kwargs)


FORWARDS = {
    "KimiLinearAttention KimiLinearMLP": joined_projections_forward,
    "KimiLinearDeltaAttention": kimi_linear_delta_rule_forward,
    "KimiLinearModel": qwen3_next_model_forward,
}
