"""RecurrentGemma: ops compute its recurrent block, and its states are in a cache, which the models return."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import (
    bounds_of,
    finder_of_caches,
    is_step,
    name_of_cache,
    tokens_of,
)
from flacompose.integrations.modeling.forward import Forward, ModuleWith, layer_forward, making_cache
from flacompose.ops import causal_conv1d, chunk_rg_lru, fused_recurrent_rg_lru


@layer_forward
def recurrent_gemma_block_forward(
    forward: Forward, layer: Any, cache: Any, /,
    input_states: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, *args: Any,
    layer_idx: int | None = None, tokens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The recurrent block by ops, in place of its convolution and its loop over tokens.

    Its states are in a cache layer. Transformers keeps them in the module, where beam search cannot reorder them and a
    prompt in pieces loses the state of the convolution. `tokens` is 0 at pads, which transformers ignores: a pad does
    not change the state, and the convolution reads zeros there. A sequence begins at a token of position 0, at the
    first token after pads, and at the first token of a packed sequence.
    """
    from flacompose.integrations.modeling.caches import recurrent_layer

    bounds, T = bounds_of(kwargs), input_states.shape[1]
    cached = None if cache is None else recurrent_layer(cache, cast(int, layer_idx))
    conv, state = (None, None) if cached is None else (cached.conv_states[0], cached.recurrent_states[0])
    if position_ids is None:
        position_ids = torch.arange(T, device=input_states.device)[None]
    reset = (position_ids == 0).expand(input_states.shape[:2])
    x = layer.linear_x(input_states)
    if tokens is not None:
        is_token = tokens[:, -T:] != 0
        reset = is_token & (reset | ((tokens != 0).cumsum(1)[:, -T:] == 1))
        x = x.masked_fill(~is_token.unsqueeze(2), 0)
    if bounds is not None:
        first = torch.zeros(T + 1, dtype=torch.bool, device=x.device)
        reset = reset | first.index_fill(0, bounds[:-1].long(), True)[:T]

    weight, bias = layer.conv_1d.weight.squeeze(1), layer.conv_1d.bias
    x, conv = causal_conv1d(x, weight, bias, None, conv, output_final_state=True, cu_seqlens=bounds)
    unit = layer.rg_lru
    heads = x.unflatten(-1, (unit.num_attention_heads, -1))
    r, i = (
        (torch.einsum("bthd,hde->bthe", heads, weight) + bias).flatten(2)
        for weight, bias in (
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
            (unit.input_gate_weight, unit.input_gate_bias),
        )
    )
    if tokens is not None:  # a pad does not change the state
        r = r.masked_fill(~is_token.unsqueeze(2), -torch.inf)
    rg_lru = fused_recurrent_rg_lru if is_step(x) else chunk_rg_lru
    o, state = rg_lru(x, r, i, unit.recurrent_param, reset, state, output_final_state=True, cu_seqlens=bounds)
    if cached is not None:
        assert state is not None
        cached.keep(state, conv)
    return layer.linear_out(o * layer.act_fn(layer.linear_y(input_states))), None


def recurrent_gemma_model_forward(forward: Forward) -> Forward:
    """Pass the recurrent blocks their index and the mask of pads, and return the cache, unlike transformers."""
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

    cache_in, name = finder_of_caches(), name_of_cache(forward)

    @making_cache(lambda model, _: DynamicCache(config=model.config))
    @wraps(forward)
    def model_forward(self: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        tokens = tokens_of(attention_mask)
        layers = [
            partial(layer, layer_idx=i, tokens=tokens) if hasattr(layer.temporal_block, "rg_lru") else layer
            for i, layer in enumerate(self.layers)
        ]
        out = forward(ModuleWith(self, layers=layers), attention_mask=attention_mask, **kwargs)
        if torch.compiler.is_compiling() or not isinstance(out, BaseModelOutput):
            return out  # the compiler cannot return the caches of older releases, which have bound methods
        return BaseModelOutputWithPast(**out, **{name: cache_in((), kwargs)})

    return model_forward


def recurrent_gemma_lm_forward(forward: Forward) -> Forward:
    """Return the cache of the decoder."""
    from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

    name = name_of_cache(forward)

    @wraps(forward)
    def lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        caches = []

        def model(*args: Any, **kwargs: Any) -> Any:
            out = self.model(*args, **kwargs)
            caches.append(getattr(out, name, None))
            return out

        out = forward(ModuleWith(self, model=model), *args, **kwargs)
        return CausalLMOutputWithPast(**out, **{name: caches[0]}) if isinstance(out, CausalLMOutput) else out

    return lm_forward


FORWARDS = {
    "RecurrentGemmaForCausalLM": recurrent_gemma_lm_forward,
    "RecurrentGemmaModel": recurrent_gemma_model_forward,
    "RecurrentGemmaRecurrentBlock": recurrent_gemma_block_forward,
}
