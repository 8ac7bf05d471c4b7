"""RWKV-4: an op computes its time mixing, and both mixings mix tokens of the same sequence only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from flacompose._torch import is_exporting
from flacompose.integrations.modeling.arguments import PACKED, bounds_of, is_step, refuse_packed
from flacompose.integrations.modeling.forward import (
    Forward,
    ModuleWith,
    called_with,
    dtype_of_states,
    layer_forward,
    making_cache,
    module_forward,
)
from flacompose.layers.token_shift import token_shift
from flacompose.ops import chunk_rwkv4, fused_recurrent_rwkv4


@layer_forward
def rwkv_time_mixing_forward(
    forward: Forward, layer: Any, _: Any, /,
    hidden: Tensor, state: list[Tensor] | None = None, use_cache: bool | None = False, **kwargs: Any,
) -> tuple[Tensor, list[Tensor] | None]:  # fmt: skip
    """Time mixing by an op, in place of the loop over tokens.

    The states are where transformers keeps them. In decoding, transformers mixes a token with the previous tokens of
    all rows; here it is mixed with its own row.
    """
    mixed, x, pads, bounds = _with_shift(layer, hidden, state, 1, kwargs)
    r, k, v, _ = type(layer).extract_key_value(mixed, x)
    if pads is not None:
        k = k.masked_fill(pads, max(-1e9, torch.finfo(k.dtype).min))  # so low that any token outweighs a pad
    # Copies, since the states are overwritten below and a backward needs them.
    before: Any = None if state is None else tuple(s[:, :, layer.layer_id].clone() for s in state[2:])
    wkv = fused_recurrent_rwkv4 if is_step(hidden) else chunk_rwkv4
    o, after = wkv(-layer.time_decay.exp(), layer.time_first, k, v, before, state is not None, bounds)
    if state is not None and after is not None:
        for kept, new in zip(state[2:], after, strict=True):
            kept[:, :, layer.layer_id] = new
    return layer.output(r * o), state


@module_forward
def rwkv_channel_mixing_forward(
    forward: Forward, layer: Any, _: Any, /, hidden: Tensor, state: list[Tensor] | None = None, **kwargs: Any
) -> tuple[Tensor, list[Tensor] | None]:
    """Channel mixing that never mixes a token with a pad or another sequence."""
    mixed, x, _, _ = _with_shift(layer, hidden, state, 0, kwargs)
    return forward(mixed, x)[0], state


def _with_shift(
    layer: Any, hidden: Tensor, state: list[Tensor] | None, index: int, kwargs: dict[str, Any]
) -> tuple[Any, Tensor, Tensor | None, Tensor | None]:
    """A layer of RWKV with a correct ``time_shift``, `hidden` with zeros at pads, the mask of pads, and the bounds.

    The token before a sequence comes from `state` at `index`, or is zeros, and the last token is written there. The
    mask and the bounds of packed sequences may be None.
    """
    bounds, mask, pads = bounds_of(kwargs), kwargs.get("attention_mask"), None
    if state is not None:
        refuse_packed(kwargs)
    if mask is not None:
        pads = (mask[:, -hidden.shape[1] :] == 0).unsqueeze(2)
        hidden = hidden.masked_fill(pads, 0)
    before = None if state is None else state[index][:, :, layer.layer_id]
    shifted, last = token_shift(hidden, before, cu_seqlens=bounds)
    if state is not None:
        state[index][:, :, layer.layer_id] = last
    return ModuleWith(layer, time_shift=lambda _: shifted), hidden, pads, bounds


def _passing_to(
    *names: str, make: Callable[[Any, Tensor], Any] | None = None
) -> Callable[[Forward], Forward]:
    """For a module that drops the mask and the bounds. They are passed on to its children `names`.

    `make` makes the states, in the module that is responsible for them.
    """

    def of(forward: Forward) -> Forward:
        takes_mask = "attention_mask" in inspect.signature(forward).parameters

        @wraps(forward)
        def passing(self: Any, *args: Any, **kwargs: Any) -> Any:
            if takes_mask and len(args) > 1:
                kwargs["attention_mask"], args = args[1], (args[0], None, *args[2:])
            given = {
                key: kwargs.pop(key) for key in (*PACKED, "attention_mask") if kwargs.get(key) is not None
            }
            rescales = hasattr(self, "layers_are_rescaled") and self.layers_are_rescaled == self.training
            if rescales and self.config.rescale_every > 0 and is_exporting():
                raise ValueError(
                    "model must have been called once before it is exported, in evaluation or training as then, since "
                    f"the first call of an {type(self).__name__} changes its weights"
                )
            called = {name: called_with(getattr(self, name), given) for name in names}
            out = forward(ModuleWith(self, **called), *args, **kwargs)
            if isinstance(getattr(out, "state", None), list):
                out.state = RwkvState(out.state)
            return out

        return passing if make is None else making_cache(make, in_training=False)(passing)

    return of


class RwkvState(list[Tensor]):
    """A list of the five states of RWKV, ``[B, D, layers]`` each, whose rows beam search can reorder."""

    def reorder_cache(self, rows: Tensor) -> None:
        self[:] = [x.index_select(0, rows) for x in self]


def _first_state(model: Any, x: Tensor) -> RwkvState:
    """The states before the first token. Transformers gives all of them `hidden_size` channels."""
    sizes = [model.config.hidden_size] * 2 + [model.config.attention_hidden_size] * 3
    wide = dtype_of_states(model, x)
    dtypes = [model.get_input_embeddings().weight.dtype] * 2 + [wide] * 3
    state = RwkvState(
        [
            torch.zeros(x.shape[0], size, model.config.num_hidden_layers, dtype=dtype, device=x.device)
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
    )
    state[4] -= 1e30
    return state


FORWARDS = {
    "RwkvForCausalLM": _passing_to("rwkv"),
    "RwkvModel": _passing_to("blocks", make=_first_state),
    "RwkvBlock": _passing_to("attention", "feed_forward"),
    "RwkvSelfAttention": rwkv_time_mixing_forward,
    "RwkvFeedForward": rwkv_channel_mixing_forward,
}
