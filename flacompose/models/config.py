"""The configuration of a language model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flacompose import layers
from flacompose._errors import TypeError, ValueError
from flacompose.layers import _check
from flacompose.layers.activation import ACTIVATIONS
from flacompose.layers.forget_gate import ForgetGateLayer
from flacompose.layers.recurrent import RecurrentLayer

# The arguments of layers that the model determines.
_GIVEN = ("hidden_size", "d_model", "layer_idx", "num_hidden_layers", "device", "dtype")
_ATTENTION = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The configuration of a `RecurrentLM`. Its plain values survive ``dataclasses.asdict`` and JSON.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Width of the model.
        num_hidden_layers: Number of blocks.
        intermediate_size: Width between the projections of a feed-forward network. Required unless `feed_forward` is
            "none".
        layer: Name of a class in `flacompose.layers`, such as "GatedLinearAttention".
        layer_options: Arguments of this class, without `hidden_size`, `layer_idx` and `num_hidden_layers`. The default
            of `norm_eps` is the one of the model.
        feed_forward: "swiglu", ``(silu(x W_gate) * (x W_up)) W_down``; "rwkv6" or "rwkv7", the channel mixing of
            RWKV6 or RWKV7; or "none", as in Mamba, whose blocks have only the layer.
        feed_forward_act: Activation in the channel mixing: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Not used by "swiglu".
        norm: "rms" or "layer", the kind of norms before the layer, the feed-forward network and the logits.
        norm_bias: Whether layer norms have a bias.
        norm_eps: Added to the mean square or to the variance in a norm.
        norm_embeddings: Whether embeddings are normed before the first block.
        use_lower_bound: Whether forget gates have learned lower bounds that rise with depth. For HGRN and HGRN2 only.
        tie_word_embeddings: Whether the projection to logits and the embeddings share one weight.
        attn: Blocks whose layer is softmax attention with a rotary embedding. Each mapping describes one kind of them:
            `layers`, the indices of the blocks, `num_heads`, and optionally `num_kv_heads`, `qkv_bias`, `window_size`
            (the number of tokens that a token sees, including itself) and `rope_theta`.
        gradient_checkpointing: Whether only the inputs of a block are kept for the backward, which computes the block
            again (``torch.utils.checkpoint``). It takes less memory and more time, and changes no value.

    Raises:
        ValueError: If a value is not allowed.
        TypeError: If a value has the wrong type.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int | None = None
    layer: str
    layer_options: Mapping[str, Any] = field(default_factory=dict)
    feed_forward: str = "swiglu"
    feed_forward_act: str = "sqrelu"
    norm: str = "rms"
    norm_bias: bool = True
    norm_eps: float = 1e-6
    norm_embeddings: bool = False
    use_lower_bound: bool = False
    tie_word_embeddings: bool = False
    attn: Sequence[Mapping[str, Any]] = ()
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            _check.count(name, getattr(self, name))
        _check.one_of("layer", self.layer, [name for name in layers.__all__ if _is_layer(name)])
        _check.one_of("feed_forward", self.feed_forward, ("swiglu", "rwkv6", "rwkv7", "none"))
        if self.feed_forward != "none":
            _check.count("intermediate_size", self.intermediate_size)
        elif self.intermediate_size is not None:
            raise ValueError(
                f"intermediate_size must be None where feed_forward is 'none', got {self.intermediate_size}"
            )
        _check.one_of("feed_forward_act", self.feed_forward_act, ACTIVATIONS)
        _check.one_of("norm", self.norm, ("rms", "layer"))
        _check.not_negative("norm_eps", self.norm_eps)
        _check.flags(
            norm_bias=self.norm_bias,
            norm_embeddings=self.norm_embeddings,
            use_lower_bound=self.use_lower_bound,
            tie_word_embeddings=self.tie_word_embeddings,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        if not isinstance(self.layer_options, Mapping):
            raise TypeError(f"layer_options must be a mapping, got {type(self.layer_options).__name__}")
        for name in _GIVEN:
            if name in self.layer_options:
                raise ValueError(f"layer_options must not hold {name}, which the model gives its layers")
        self._check_layer_options()
        if self.use_lower_bound and not issubclass(self.layer_class, ForgetGateLayer):
            raise ValueError(f"use_lower_bound must be False with {self.layer}, whose gates take no bound")
        self._check_attn()
        object.__setattr__(self, "attn", tuple(self.attn))  # JSON has a list

    def _check_layer_options(self) -> None:
        """Check the keys of `layer_options`. The layer checks the values."""
        arguments = inspect.signature(self.layer_class).parameters
        known = {name: argument for name, argument in arguments.items() if name not in _GIVEN}
        for key in self.layer_options:
            _check.one_of("layer_options: a key", key, known, f", of {self.layer}")
        for name, argument in known.items():
            if argument.default is argument.empty and name not in self.layer_options:
                raise ValueError(
                    f"layer_options must have the key {name!r}, which {self.layer} has no default for, "
                    f"got {sorted(self.layer_options)}"
                )

    def _check_attn(self) -> None:
        if isinstance(self.attn, (str, Mapping)) or not isinstance(self.attn, Sequence):
            raise TypeError(f"attn must be a sequence of mappings, got {type(self.attn).__name__}")
        seen: set[int] = set()
        for i, spec in enumerate(self.attn):
            if not isinstance(spec, Mapping):
                raise TypeError(f"attn[{i}] must be a mapping, got {type(spec).__name__}")
            for key in spec:
                _check.one_of(f"attn[{i}]: a key", key, _ATTENTION)
            for key in ("layers", "num_heads"):
                if key not in spec:
                    raise ValueError(f"attn[{i}] must have the key {key!r}, got {sorted(spec)}")
            if not isinstance(spec["layers"], (tuple, list)):
                raise TypeError(f"attn[{i}]['layers'] must be a list of indices, got {spec['layers']!r}")
            for index in spec["layers"]:
                _check.integer(f"attn[{i}]['layers']: an index", index)
                if not 0 <= index < self.num_hidden_layers or index in seen:
                    raise ValueError(
                        f"attn[{i}]['layers'] must hold indices below num_hidden_layers = "
                        f"{self.num_hidden_layers}, each at most once in attn, got {index}"
                    )
                seen.add(index)

    def layer_arguments(self, layer_idx: int) -> dict[str, Any]:
        """The arguments of the layer in the block `layer_idx`: sizes of the model, and `layer_options`."""
        given = {"hidden_size": self.hidden_size, "norm_eps": self.norm_eps, "layer_idx": layer_idx}
        known = inspect.signature(self.layer_class).parameters
        return {name: x for name, x in given.items() if name in known} | dict(self.layer_options)

    @property
    def layer_class(self) -> type[RecurrentLayer]:
        """The class that `layer` names."""
        return getattr(layers, self.layer)

    def attention(self, layer_idx: int) -> dict[str, Any] | None:
        """The arguments of softmax attention in the block `layer_idx`; None if it has a recurrence."""
        for spec in self.attn:
            if layer_idx in spec["layers"]:
                return {key: value for key, value in spec.items() if key != "layers"}
        return None


def _is_layer(name: str) -> bool:
    public = getattr(layers, name)
    return isinstance(public, type) and issubclass(public, RecurrentLayer)
