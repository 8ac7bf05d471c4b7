"""ZAYA: its projection to queries, keys and values mixes the tokens of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import PACKED, bounds_of
from flacompose.integrations.modeling.forward import Forward, ModuleWith, layer_forward, passing_to
from flacompose.ops import causal_conv1d


@layer_forward
def zaya_projection_forward(forward: Forward, layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Keep packed sequences apart in three modules of the projection that mix tokens.

    The first is a depthwise convolution, computed by an op. The second convolves each head. The third delays a part of
    the values by one token.
    """
    bounds, depthwise, heads = bounds_of(kwargs), layer.conv_qk_depthwise, layer.conv_qk_grouped
    weight, bias = depthwise.weight.squeeze(1), depthwise.bias
    if bounds is None:

        def convolved(x: Tensor) -> Tensor:
            y, _ = causal_conv1d(x.mT, weight, bias)
            return y[:, weight.shape[1] - 1 :].mT  # drop the tokens before the sequence

        return forward(ModuleWith(layer, conv_qk_depthwise=convolved), *args, **kwargs)

    kwargs = {key: x for key, x in kwargs.items() if key not in PACKED}

    def sequences(T: int) -> Tensor:
        """The number of each token's sequence."""
        return torch.searchsorted(bounds[1:], torch.arange(T, device=bounds.device), right=True)

    def convolved_packed(x: Tensor) -> Tensor:
        y, _ = causal_conv1d(x[..., layer.conv_kernel_size :].mT, weight, bias, cu_seqlens=bounds)
        return y.mT

    def of_heads(x: Tensor) -> Tensor:
        # Before a sequence, as before a row, the inputs are the first convolution of zeros, which is its bias.
        T, W = x.shape[-1], heads.weight.shape[-1]
        number, past = sequences(T), bias[:, None].expand(-1, W - 1)[None]
        history, numbers = torch.cat([past, x], -1), torch.nn.functional.pad(number, (W - 1, 0), value=-1)
        taps = [
            torch.nn.functional.conv1d(
                torch.where(numbers[w : w + T] == number, history[..., w : w + T], bias[:, None]),
                heads.weight[..., w : w + 1],
                heads.bias if w == 0 else None,
                groups=heads.groups,
            )
            for w in range(W)
        ]
        return torch.stack(taps).sum(0)

    def delayed(x: Tensor) -> Tensor:
        number = sequences(x.shape[1])
        ends = torch.nn.functional.pad(number[1:] != number[:-1], (0, 1), value=False)
        return layer.v_proj_delayed(x.masked_fill(ends[:, None], 0))

    modules = {"conv_qk_depthwise": convolved_packed, "conv_qk_grouped": of_heads, "v_proj_delayed": delayed}
    return forward(ModuleWith(layer, **modules), *args, **kwargs)


FORWARDS = {"ZayaAttention": passing_to("qkv_proj"), "ZayaCCAProjection": zaya_projection_forward}
