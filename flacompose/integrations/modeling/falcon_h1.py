"""Falcon-H1: the single token of decoding in its mixer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.integrations.modeling.arguments import masked
from flacompose.integrations.modeling.convolution import convolve_step
from flacompose.integrations.modeling.forward import Forward, layer_forward
from flacompose.integrations.modeling.mamba2 import is_decoding
from flacompose.integrations.modeling.mamba_scan import state_space_step


def falcon_h1_mixer_forward(forward: Forward) -> Forward:
    """Compute a single token here.

    For a single token, transformers ignores the limits of time steps, and passes no argument that could carry them. In
    5.17, with `mamba_rms_norm`, it also multiplies each row by the gates of all rows.
    """
    from transformers.integrations.accelerate import force_accelerate_hooks

    step = force_accelerate_hooks("conv1d")(_step)

    @layer_forward
    def mixer(
        forward: Forward, layer: Any, cache: Any, /, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if is_decoding(layer, cache, hidden_states):
            mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
            return step(layer, hidden_states, mask, cache.layers[layer.layer_idx])
        return forward(layer, hidden_states, *args, **kwargs)

    return mixer(forward)


def _step(layer: Any, hidden_states: Tensor, mask: Tensor | None, cached: Any) -> Tensor:
    """The output ``[B, 1, D]`` of one token. It writes to the states of the cache layer."""
    H, P, G, S = layer.num_heads, layer.head_dim, layer.n_groups, layer.ssm_state_size
    conv, sizes = layer.conv1d, (layer.intermediate_size, layer.conv_dim, H)
    x = layer.in_proj(masked(hidden_states, mask) * layer.ssm_in_multiplier) * layer.mup_vector
    z, x, dt = x.split(sizes, -1)
    x = convolve_step(x.mT, cached.conv_states[0], conv.weight.squeeze(1), conv.bias, layer.activation).mT
    z, x = z.squeeze(1), masked(x, mask).squeeze(1)
    x, B, C = x.split([layer.intermediate_size, G * S, G * S], -1)
    y = state_space_step(
        cached.recurrent_states[0], x.unflatten(1, (H, P)), dt.mT.expand(-1, -1, P),
        -layer.A_log.float().exp()[:, None, None].expand(-1, P, S), B.unflatten(1, (G, S)), C.unflatten(1, (G, S)),
        layer.D[:, None].expand(-1, P), layer.dt_bias[:, None].expand(-1, P), True,
        None if layer.mamba_rms_norm else z.unflatten(1, (H, P)), layer.time_step_limit,
    ).flatten(1)  # fmt: skip
    y = layer.norm(y, z) if layer.mamba_rms_norm else y
    return layer.out_proj(y.to(hidden_states.dtype)).unsqueeze(1)


FORWARDS = {"FalconH1Mixer": falcon_h1_mixer_forward}
