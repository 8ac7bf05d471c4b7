"""Language models that differ only in their token mixing."""

from __future__ import annotations

import importlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with heads of 64, without positions and without a state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = min(64, width)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: None = None, **_: Any) -> tuple[Tensor, None]:
        B, T, width = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, width)), None


SOFTMAX, RWKV7 = "softmax", "rwkv7"
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GatedLinearAttention", {}),
    "gated_deltanet": ("GatedDeltaNet", {}),
    "gsa": ("GatedSlotAttention", {"num_slots": 64}),
    "mamba2": ("Mamba2", {}),
    "rwkv6": ("RWKV6Attention", {}),
}
"""The layer of each model, and its arguments except for defaults."""
NAMES = (SOFTMAX, *LAYERS, RWKV7)


def recurrent(layer: str, options: dict[str, Any], layers: int, width: int, vocabulary: int) -> Any:
    """A `RecurrentLM` with a SwiGLU of 8/3 of the width, in multiples of 256, as in flash-linear-attention."""
    models = importlib.import_module("flacompose.models")
    config = models.RecurrentConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=-(-8 * width // 3 // 256) * 256,
        layer=layer,
        layer_options=options,
    )
    return models.RecurrentLM(config)


def build(name: str, layers: int, width: int, vocabulary: int) -> nn.Module:
    """A model by its name, one of `NAMES`."""
    if name == RWKV7:
        # The model of flash-linear-attention on this library's ops, since its layers share values and mix channels.
        fla, models = (importlib.import_module(f"flacompose.{x}") for x in ("integrations.fla", "models"))
        sizes = {"num_hidden_layers": layers, "hidden_size": width, "vocab_size": vocabulary}
        return models.RecurrentLM(fla.config_from_fla({"model_type": "rwkv7", **sizes}))
    model = recurrent(*LAYERS["gla" if name == SOFTMAX else name], layers, width, vocabulary)
    for block in model.layers if name == SOFTMAX else ():
        block.attn = SoftmaxAttention(width)
    return model
