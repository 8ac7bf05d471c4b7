"""LFM2 and LFM2-MoE: layers that consist of a short convolution."""

from __future__ import annotations

from typing import Any

from flacompose.integrations.modeling.arguments import PACKED, given_bounds
from flacompose.integrations.modeling.convolution import Bounds
from flacompose.integrations.modeling.forward import Forward, layer_forward, passing_to


@layer_forward
def lfm2_convolution_forward(forward: Forward, layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Pass the bounds of packed sequences in `seq_idx`, the only such argument that the forward passes on."""
    bounds = given_bounds(kwargs)
    if bounds is not None:
        kwargs = {key: x for key, x in kwargs.items() if key not in PACKED}
        kwargs["seq_idx"] = Bounds(bounds)
    return forward(layer, *args, **kwargs)


FORWARDS = {
    "Lfm2ShortConv Lfm2MoeShortConv": lfm2_convolution_forward,
    "Lfm2DecoderLayer Lfm2MoeDecoderLayer": passing_to("conv"),
}
