"""Bamba: the positions of its decoder. `mamba2` has its mixer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.integrations.modeling.forward import Forward, module_forward
from flacompose.integrations.modeling.mamba2 import mamba2_mixer_forward


@module_forward
def bamba_model_forward(
    forward: Forward, model: Any, cache: Any, /, input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None, position_ids: Tensor | None = None, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Without `position_ids`, continue the positions of a cache. Transformers begins with 0 again."""
    x = kwargs.get("inputs_embeds") if input_ids is None else input_ids
    if position_ids is None and cache is not None and x is not None:
        position_ids = cache.get_seq_length() + torch.arange(x.shape[1], device=x.device)[None]
    return forward(model, input_ids, attention_mask, position_ids, *args, **kwargs)


FORWARDS = {"BambaMixer": mamba2_mixer_forward, "BambaModel": bamba_model_forward}
