"""Inkling and Inkling 2: packed sequences in their convolutions. Some of Inkling 2 refuse them."""

from __future__ import annotations

from flacompose.integrations.modeling.forward import passing_to, unpacked_forward
from flacompose.integrations.modeling.lfm2 import lfm2_convolution_forward

FORWARDS = {
    "InklingShortConvolution Inkling2ShortConvolution": lfm2_convolution_forward,
    "InklingAttention Inkling2FullAttention Inkling2SlidingAttention": passing_to("k_sconv", "v_sconv"),
    "InklingDecoderLayer": passing_to("attn_sconv", "mlp_sconv"),
    "Inkling2FullDecoderLayer Inkling2SlidingDecoderLayer": passing_to(
        "post_attention_convolution", "post_mlp_convolution"
    ),
    "Inkling2DynamicShortConvolution": unpacked_forward,
}
