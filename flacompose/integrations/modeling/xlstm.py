"""xLSTM: an op computes the recurrence of its layer, and the model takes long sequences and pads."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import (
    PACKED,
    bounds_of,
    is_step,
    refuse_packed,
    tokens_of,
    unwritten,
)
from flacompose.integrations.modeling.forward import (
    Forward,
    ModuleWith,
    dtype_of_states,
    layer_forward,
    making_cache,
    module_forward,
    passing_to,
)
from flacompose.ops import chunk_mlstm, fused_recurrent_mlstm


@layer_forward
def xlstm_layer_forward(
    forward: Forward, layer: Any, _: Any, /, x: Tensor, state: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Call an op in place of the layer's backend, which is a loop over chunks and tokens.

    The state is a tuple of tensors of the cache, which the model overwrites. A pad does not change it.
    """
    bounds, mask, T = bounds_of(kwargs), kwargs.get("attention_mask"), x.shape[1]
    if state is not None:
        refuse_packed(kwargs)
        heads = layer.config.num_heads
        expected = x.shape[0], heads, layer.qk_dim // heads, layer.v_dim // heads
        if tuple(state[0].shape) != expected:
            raise ValueError(
                f"the cache of an xLSTM must have states of shape {expected} here, got {tuple(state[0].shape)}; the "
                "xLSTMCache of transformers rounds up the sizes of heads: leave it out, and the model makes its own"
            )
        state = [unwritten(part) for part in state]

    def backend(query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any) -> Any:
        q, k, v, i, f = (y.transpose(1, 2) for y in (query, key, value, igate, fgate))
        if mask is not None:
            pads = (mask[:, -T:] == 0).unsqueeze(2)
            i, f = i.masked_fill(pads, -torch.inf), f.masked_fill(pads, torch.inf)
        initial: Any = None if state is None else (*state[:2], state[2].squeeze(-1))
        mlstm: Any = fused_recurrent_mlstm if is_step(x) else chunk_mlstm
        o, (C, n, m) = mlstm(
            q, k, v, i, f,
            initial_state=initial, output_final_state=True, cu_seqlens=bounds, eps=layer.config.eps,
        )  # fmt: skip
        return o.transpose(1, 2), (C, n, m.unsqueeze(-1))

    return forward(ModuleWith(layer, mlstm_backend=backend), x, state, *args)


@module_forward
def xlstm_unchunked_forward(forward: Forward, model: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute a long sequence at once. Transformers splits it, without gradients."""
    config = ModuleWith(model.config, max_inference_chunksize=sys.maxsize)
    return forward(ModuleWith(model, config=config), *args, **kwargs)


def xlstm_model_forward(forward: Forward) -> Forward:
    """Pass pads and bounds of packed sequences on to the blocks, and make a cache that beam search can reorder."""
    from transformers.models.xlstm import modeling_xlstm

    if modeling_xlstm.external_xlstm:
        return forward  # the blocks are from the package xlstm
    from flacompose.integrations.modeling.caches import BeamCache

    told = xlstm_unchunked_forward(passing_to("blocks", keys=(*PACKED, "attention_mask"))(forward))

    @making_cache(lambda model, x: BeamCache(model, x.shape[0], dtype_of_states(model, x), x.device))
    @wraps(forward)
    def model_forward(self: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return told(self, attention_mask=tokens_of(attention_mask), **kwargs)

    return model_forward


FORWARDS = {
    "xLSTMForCausalLM": xlstm_unchunked_forward,
    "xLSTMModel": xlstm_model_forward,
    "xLSTMBlock": passing_to("mlstm_layer", keys=(*PACKED, "attention_mask")),
    "xLSTMLayer": xlstm_layer_forward,
}
