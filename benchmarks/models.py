"""Language models that differ only in their token mixers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 2048
"""The tokens that softmax attention's cache holds."""


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with heads of 64, called as a layer of flacompose is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = min(64, width)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: Sequence[Tensor] | None = None) -> tuple[Tensor, Any]:
        B, T, width = x.shape
        qkv = self.qkv_proj(x).view(B, T, 3, -1, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if state is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # The cache is written in place, as decoders of softmax models do.
            keys, values, position = state
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            seen = torch.arange(keys.shape[2], device=x.device)[None] <= position
            o = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            # A full cache starts over: a token costs the same wherever it stands.
            state = (keys, values, (position + 1) % keys.shape[2])
        return self.o_proj(o.transpose(1, 2).reshape(B, T, width)), state

    def first_state(self, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        cache = torch.zeros(
            2, 1, self.o_proj.in_features // self.head_dim, CONTEXT, self.head_dim, device=device, dtype=dtype
        )
        return cache[0].clone(), cache[1].clone(), torch.zeros(1, dtype=torch.int64, device=device)


class MLP(nn.Module):
    """SwiGLU; its inner width is the peer's, 8/3 of the width rounded up to a multiple of 256."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-8 * width // 3 // 256) * 256
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(width, eps=1e-6)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer(self.mixer_norm(x), state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class LanguageModel(nn.Module):
    """Tokens to logits; `states` has one entry per block, ``None`` at the start of a text."""

    def __init__(self, mixer: Callable[[int], nn.Module], layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, mixer(width)) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, states: Sequence[Any] | None = None) -> tuple[Tensor, list[Any]]:
        x = self.embedding(tokens)
        new = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i])
            new.append(state)
        return self.head(self.norm(x)), new

    def first_states(self, device: str, dtype: torch.dtype) -> list[Any]:
        """States of one sequence, from which decoding can go on."""
        mixers = [block.get_submodule("mixer") for block in self.blocks]
        first = [mixer.first_state(device, dtype) for mixer in mixers if isinstance(mixer, SoftmaxAttention)]
        return first or self(torch.zeros(1, 1, dtype=torch.int64, device=device))[1]


class PeerModel(nn.Module):
    """The peer's own model, its blocks of the same kind and sizes; `kind` is ``GLA`` or ``RWKV7``."""

    def __init__(self, kind: str, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        models = importlib.import_module("fla.models")
        config = getattr(models, f"{kind}Config")
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary}
        self.model = getattr(models, f"{kind}ForCausalLM")(config(**sizes))

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.model(input_ids=tokens, use_cache=False).logits, None


def _layer(name: str, **options: Any) -> Callable[[int], nn.Module]:
    def mixer(width: int) -> nn.Module:
        return getattr(importlib.import_module("flacompose.layers"), name)(hidden_size=width, **options)

    return mixer


def rwkv7(layers: int, width: int, vocabulary: int) -> nn.Module:
    """The peer's model of RWKV7 on this library's ops, whose layers share values and mix channels in their own way."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary}
    config = importlib.import_module("flacompose.integrations.fla").config_from_fla(
        {"model_type": "rwkv7", **sizes}
    )
    return importlib.import_module("flacompose.models").RecurrentLM(config)


SOFTMAX, RWKV7 = "softmax", "rwkv7"
PEERS = {"fla-gla": "GLA", "fla-rwkv7": "RWKV7"}
"""The peer's models, beside ``gla`` and ``rwkv7``."""

MIXERS: dict[str, Callable[[int], nn.Module]] = {
    SOFTMAX: SoftmaxAttention,
    "gla": _layer("GatedLinearAttention"),
    "gated_deltanet": _layer("GatedDeltaNet"),
    "gsa": _layer("GatedSlotAttention", num_slots=64),
    "mamba2": _layer("Mamba2"),
    "rwkv6": _layer("RWKV6Attention"),
}
"""What mixes the tokens of a model, of its width; the layers' other arguments are their defaults."""
NAMES = (*MIXERS, RWKV7)
"""The models that are not the peer's."""


def build(name: str, layers: int, width: int, vocabulary: int) -> nn.Module:
    """A model by its name: one of `NAMES` or `PEERS`."""
    if name in PEERS:
        return PeerModel(PEERS[name], layers, width, vocabulary)
    if name == RWKV7:
        return rwkv7(layers, width, vocabulary)
    return LanguageModel(MIXERS[name], layers, width, vocabulary)


def first_states(model: Any, device: str, dtype: torch.dtype) -> Any:
    """States of one sequence, from which decoding can go on."""
    is_mixed = isinstance(model, LanguageModel)
    return model.first_states(device, dtype) if is_mixed else model.init_state(1, device=device, dtype=dtype)
