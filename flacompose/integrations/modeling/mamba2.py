"""Mamba-2, Granite hybrid, Nemotron-H and Zamba2: the limits of time steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.integrations.modeling.forward import Forward, layer_forward, passing_to


@layer_forward
def mamba2_mixer_forward(
    forward: Forward, layer: Any, cache: Any, /, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Pass the limits of time steps to the function for one token. Transformers passes them for several tokens only.

    The forward passes unknown keywords on to this function.
    """
    if is_decoding(layer, cache, hidden_states):
        kwargs["dt_limit"] = layer.time_step_limit
    return forward(layer, hidden_states, *args, **kwargs)


def is_decoding(layer: Any, cache: Any, hidden_states: Tensor) -> bool:
    """Whether a mixer of transformers would compute one token from the states in its cache."""
    return cache is not None and hidden_states.shape[1] == 1 and cache.has_previous_state(layer.layer_idx)


FORWARDS = {
    "GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer Zamba2MambaMixer": mamba2_mixer_forward,
    "Mamba2ForCausalLM": passing_to("backbone"),
}
