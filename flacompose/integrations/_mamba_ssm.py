"""Configs of mamba-ssm's language models, translated to configs of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flacompose.layers import _check

# For each layer of mamba-ssm: the `model_type` of flash-linear-attention, and the names of arguments.
_COMMON = {"d_state": "state_size", "d_conv": "conv_kernel", "bias": "use_bias", "conv_bias": "use_conv_bias"}
_HEADS = {"headdim": "head_dim", "ngroups": "n_groups"}
_LAYERS = {
    "Mamba1": ("mamba", _COMMON | {"dt_init": "dt_init_scheme"}),
    "Mamba2": ("mamba2", _COMMON | _HEADS),
    "Mamba3": ("mamba3", {"d_state": "state_size"} | _HEADS),
}
# Keys without an effect on logits, and keys with one allowed value.
_WITHOUT_EFFECT = {"residual_in_fp32", "fused_add_norm"}
_WITHOUT_EFFECT_IN_LAYERS = {"use_fast_path", "use_mem_eff_path", "fuse_pregate_headwise_norm", "dropout"}
_FIXED: dict[str, Any] = {"rms_norm": True, "d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}}


def is_of_mamba_ssm(config: Mapping[str, Any]) -> bool:
    return "model_type" not in config and "d_model" in config


def as_fla(config: Mapping[str, Any]) -> dict[str, Any]:
    """Missing keys get the defaults of mamba-ssm. The layer checks its own arguments later."""
    given = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    for key, value in _FIXED.items():
        if given.pop(key, value) != value:
            raise ValueError(f"config: {key} must be {value!r} in a model of mamba-ssm, got {config[key]!r}")
    options = given.pop("ssm_cfg", None) or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"config: ssm_cfg must be a mapping, got {type(options).__name__}")
    options = {key: value for key, value in options.items() if key not in _WITHOUT_EFFECT_IN_LAYERS}
    layer = options.pop("layer", "Mamba1")
    _check.one_of("config: ssm_cfg: layer", layer, _LAYERS)
    model_type, names = _LAYERS[layer]
    if options.pop("d_ssm", None) is not None:
        raise ValueError(f"config: ssm_cfg: d_ssm must be None, got {config['ssm_cfg']['d_ssm']!r}")
    if model_type == "mamba3":  # flash-linear-attention has softplus, and no key for it
        options = {"A_activation": "heavy_tail"} | options
    vocab_size = given.pop("vocab_size", 50277)
    multiple = given.pop("pad_vocab_size_multiple", 8)
    _check.count("config: vocab_size", vocab_size)
    _check.count("config: pad_vocab_size_multiple", multiple)
    return {
        "model_type": model_type,
        "vocab_size": -(-vocab_size // multiple) * multiple,
        "hidden_size": given.pop("d_model"),
        "num_hidden_layers": given.pop("n_layer", 64),
        "tie_word_embeddings": given.pop("tie_embeddings", True),
        **given,
        **{names.get(key, key): value for key, value in options.items()},
    }
