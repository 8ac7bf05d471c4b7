"""Mamba, Falcon Mamba, Jamba and Zamba: packed sequences, and prompts in pieces.

Transformers passes neither bounds of sequences nor an initial state to its scan. Calls with one of them are computed
here. In all other calls the forward of transformers calls the functions of `mamba_scan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import bounds_of, masked, unwritten
from flacompose.integrations.modeling.convolution import convolve
from flacompose.integrations.modeling.forward import Forward, layer_forward, passing_to
from flacompose.ops import selective_scan_fn


def mamba_mixer_forward(forward: Forward) -> Forward:
    """For Mamba, Falcon Mamba and Jamba."""
    return _mixer_forward(forward, lambda xz: xz.chunk(2, -1), _mamba_parameters, ["conv1d", "dt_proj"])


def zamba_mixer_forward(forward: Forward) -> Forward:
    """For Zamba, whose input projection alternates between channels of the scan and of the gate."""
    return _mixer_forward(
        forward, lambda xz: xz.unflatten(-1, (-1, 2)).unbind(-1), _zamba_parameters, ["conv1d"]
    )


def _mamba_parameters(layer: Any, u: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The time steps before their bias, the bias, ``B`` and ``C`` of the tokens ``u [B, T, D]``."""
    project, S = layer.dt_proj, layer.ssm_state_size
    delta, B, C = layer.x_proj(u).split([layer.time_step_rank, S, S], -1)
    if hasattr(layer, "dt_layernorm"):  # Falcon Mamba and Jamba
        delta, B, C = layer.dt_layernorm(delta), layer.b_layernorm(B), layer.c_layernorm(C)
    if hasattr(layer.config, "_is_quantized"):  # then the weight is no matrix
        return project(delta) - project.bias, project.bias, B, C
    return torch.nn.functional.linear(delta, project.weight), project.bias, B, C


def _zamba_parameters(layer: Any, u: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """`_mamba_parameters` for heads with weights of their own, as groups of channels of one scan."""
    S, heads = layer.ssm_state_size, u.unflatten(-1, (layer.n_mamba_heads, -1))
    projected = torch.einsum("bthd,hpd->bthp", heads, layer.x_proj_weight)
    delta, B, C = projected.split([layer.time_step_rank, S, S], -1)
    return torch.einsum("bthr,hdr->bthd", delta, layer.dt_proj_weight).flatten(2), layer.dt_proj_bias, B, C


def _mixer_forward(
    forward: Forward,
    split: Callable[[Tensor], Any],
    parameters: Callable[[Any, Tensor], tuple[Tensor, Tensor | None, Tensor, Tensor]],
    read: list[str],
) -> Forward:
    """Compute packed sequences and prompts in pieces here, and everything else by `forward`.

    `split` splits the input projection into the input and the gate of the scan. `parameters` computes the other
    arguments of the scan. `read` names modules whose weights are read without a call: accelerate may have to load them.
    """
    from transformers.integrations.accelerate import force_accelerate_hooks

    @force_accelerate_hooks(read)
    def scanned(layer: Any, x: Tensor, mask: Tensor | None, cache: Any, bounds: Tensor | None) -> Tensor:
        dtype, T, conv = x.dtype, x.shape[1], layer.conv1d
        state: Any = None
        u, z = split(layer.in_proj(masked(x, mask)))
        u = u.mT
        if cache is not None:
            state = cache.layers[layer.layer_idx].recurrent_states[0]
            u = cache.update_conv_state(u, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
        u = convolve(u, conv.weight.squeeze(1), conv.bias, layer.activation, cu_seqlens=bounds)
        u = masked(u[..., -T:].mT, mask)
        delta, bias, B, C = parameters(layer, u)
        A = -layer.A_log.float().exp().flatten(0, -2)
        y = selective_scan_fn(
            u, delta, A, B.to(u.dtype), C.to(u.dtype), layer.D.float().flatten(), z,
            None if bias is None else bias.float(), True, cache is not None,
            None if state is None else unwritten(state).flatten(1, -2), bounds,
        )  # fmt: skip
        if isinstance(y, tuple):
            y, after = y
            cache.update_recurrent_state(after.view(state.shape), layer.layer_idx)
        return layer.out_proj(y.to(dtype))

    @layer_forward
    def mixer(
        forward: Forward, layer: Any, cache: Any, /, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        bounds, T = bounds_of(kwargs), hidden_states.shape[1]
        if len(args) > 1:  # the cache and the mask were given by position
            kwargs["attention_mask"], args = args[1], args[:1]
        mask = kwargs.get("attention_mask")
        continued = cache is not None and cache.has_previous_state(layer.layer_idx)
        if continued and mask is not None:
            kwargs["attention_mask"] = mask = mask[:, -T:]  # the mask of Mamba covers cached tokens too
        if bounds is None and (not continued or T == 1):
            return forward(layer, hidden_states, *args, **kwargs)
        return scanned(layer, hidden_states, mask, cache, bounds)

    return mixer(forward)


FORWARDS = {
    "MambaForCausalLM FalconMambaForCausalLM": passing_to("backbone"),
    "MambaModel FalconMambaModel": passing_to("layers"),
    "MambaBlock FalconMambaBlock": passing_to("mixer"),
    "MambaMixer FalconMambaMixer JambaMambaMixer": mamba_mixer_forward,
    "JambaMambaDecoderLayer": passing_to("mamba"),
    "ZambaMambaMixer": zamba_mixer_forward,
}
