"""Checkpoints of the language models of flash-linear-attention 0.6 and of mamba-ssm, as models of flacompose."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flacompose import layers
from flacompose.integrations._fla_configs import WITHOUT_EFFECT
from flacompose.integrations._mamba_ssm import as_fla, is_of_mamba_ssm
from flacompose.layers import _check
from flacompose.layers.activation import ACTIVATIONS
from flacompose.models import RecurrentConfig, RecurrentLM
from flacompose.models.hub import import_mixin, is_of_hub
from flacompose.models.weights import check_names, read_by, read_json, read_safetensors


class _ModelType(NamedTuple):
    """The layer of a `model_type`, and the keys of its config."""

    layer: str
    # The arguments of the layer that are keys of the config.
    options: str
    # Defaults that differ from the layer's or, for other keys, from `_COMMON`.
    defaults: dict[str, Any] = {}
    # Keys of older versions, or that version 0.6 ignores, with the only value that is correct in 0.6.
    fixed: dict[str, Any] = {}
    # Arguments of the layer that are the same for all configs.
    constant: dict[str, Any] = {}

    def values(self) -> dict[str, Any]:
        """All keys that affect a model, with their defaults."""
        arguments = inspect.signature(getattr(layers, self.layer)).parameters
        return _COMMON | {key: arguments[key].default for key in self.options.split()} | self.defaults


# In flash-linear-attention, these layers ignore `norm_eps` in the norm of the output, and use 1e-5.
_NORM_EPS = {"norm_eps": 1e-5}

_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": None,
    "hidden_ratio": 4,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn": None,
    "attn_mode": "chunk",
}
_FIXED = {"attnres_block_size": None}
_MAMBA = {"expand": 2, "hidden_act": "silu", "norm_eps": 1e-5, "num_hidden_layers": 48}

_MODEL_TYPES = {
    "gla": _ModelType(
        "GatedLinearAttention",
        "expand_k expand_v num_heads num_kv_heads feature_map use_short_conv conv_size use_output_gate "
        "elementwise_affine clamp_min fuse_norm",
        fixed={"use_gk": True, "use_gv": False},
    ),
    "retnet": _ModelType(
        "MultiScaleRetention",
        "expand_k expand_v num_heads num_kv_heads feature_map use_output_gate elementwise_affine fuse_norm",
        {"hidden_ratio": 2},
    ),
    "gsa": _ModelType(
        "GatedSlotAttention",
        "expand_k expand_v num_heads num_kv_heads num_slots use_short_conv conv_size feature_map "
        "gate_logit_normalizer elementwise_affine",
        {"num_slots": 64},
        fixed={"clamp_min": None, "clamp_max": None, "use_rope": False},
        constant=_NORM_EPS,
    ),
    "rwkv6": _ModelType(
        "RWKV6Attention",
        "expand_k expand_v num_heads proj_low_rank_dim gate_low_rank_dim",
        {
            "hidden_ratio": 3.5,
            "hidden_act": "sqrelu",
            "norm_eps": 1e-5,
            "norm_bias": True,
            "norm_first": True,
        },
    ),
    "rwkv7": _ModelType(
        "RWKV7Attention",
        "head_dim num_heads decay_low_rank_dim gate_low_rank_dim a_low_rank_dim v_low_rank_dim fuse_norm value_dim",
        {
            "decay_low_rank_dim": 64,
            "gate_low_rank_dim": 128,
            "a_low_rank_dim": 64,
            "v_low_rank_dim": 16,
            "fuse_norm": True,
            "hidden_act": "sqrelu",
            "norm_eps": 1e-5,
            "norm_bias": True,
            "norm_first": True,
        },
        # In flash-linear-attention, models of RWKV7 with softmax attention raise an error in every call.
        fixed={"attn": None},
    ),
    "hgrn2": _ModelType(
        "HGRN2Attention",
        "num_heads expand_ratio use_short_conv conv_size elementwise_affine",
        {"use_lower_bound": True},
        constant=_NORM_EPS,
    ),
    "delta_net": _ModelType(
        "DeltaNet",
        "expand_k expand_v num_heads use_beta use_gate use_short_conv conv_size allow_neg_eigval qk_activation "
        "qk_norm",
        {"num_heads": 16},
        fixed={"use_rope": False},
    ),
    "gated_deltanet": _ModelType(
        "GatedDeltaNet",
        "expand_v head_dim num_heads num_v_heads use_gate use_short_conv allow_neg_eigval conv_size "
        "output_gate_activation",
        {"num_hidden_layers": 21},
    ),
    "mamba": _ModelType(
        "Mamba",
        "state_size conv_kernel use_conv_bias dt_rank use_bias hidden_act",
        _MAMBA,
        fixed={"attn": None},
    ),
    "mamba2": _ModelType(
        "Mamba2",
        "num_heads head_dim state_size expand n_groups conv_kernel use_conv_bias hidden_act D_has_hdim rmsnorm "
        "norm_before_gate dt_limit use_bias",
        _MAMBA,
        fixed={"attn": None},
    ),
    "mamba3": _ModelType(
        "Mamba3",
        "state_size expand head_dim n_groups rope_fraction A_floor is_outproj_norm is_mimo mimo_rank use_bias "
        "A_activation",
        # The layer there computes the number of heads from their size.
        _MAMBA | {"num_heads": None},
        fixed={"attn": None},
    ),
    "kda": _ModelType(
        "KimiDeltaAttention",
        "expand_v head_dim num_heads num_v_heads use_short_conv allow_neg_eigval safe_gate lower_bound conv_size",
    ),
    "comba": _ModelType(
        "Comba",
        "expand_v head_dim num_heads num_v_heads use_output_gate use_short_conv conv_size",
        {"num_hidden_layers": 21},
    ),
}


def config_from_fla(config: Mapping[str, Any] | str | os.PathLike[str]) -> RecurrentConfig:
    """The `RecurrentConfig` of a model of flash-linear-attention 0.6, from its config.

    Args:
        config: The content of its ``config.json``, which is ``to_dict()`` of its config, or the path of this file.
            Configs of mamba-ssm, which have `d_model` and no `model_type`, are accepted too. Missing keys get the
            defaults of flash-linear-attention. Keys without an effect on logits, for kernels, losses or the generation
            of text, are ignored.

    Raises:
        ValueError: If `model_type` is not one of "gla", "retnet", "gsa", "rwkv6", "rwkv7", "hgrn2", "delta_net",
            "gated_deltanet", "kda", "comba", "mamba", "mamba2" and "mamba3", or a key is unknown or its value
            unsupported; the error names both. Also if `config` is a str of JSON, or its file holds no JSON.
        TypeError: If `config` is neither a mapping nor a path.
        FileNotFoundError: If there is no such file.
    """
    return _without_values(_given(config)).config


def _given(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The content of `config`. A config of mamba-ssm is translated."""
    if isinstance(config, Mapping):
        return as_fla(config) if is_of_mamba_ssm(config) else config
    expected = "config must be a mapping or the path of a config.json"
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"{expected}, got {type(config).__name__}")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        raise ValueError(f"{expected}, got a str of JSON, which json.loads makes a mapping")
    return _given(read_json(Path(config)))


def _without_values(given: Mapping[str, Any]) -> RecurrentLM:
    """The model of a config, on the meta device. Its layers refuse unsupported arguments."""
    made_of = _read(given)
    try:
        return RecurrentLM(made_of, device="meta")
    except (TypeError, ValueError) as error:
        raise ValueError(f"config: {error}") from error


def _read(config: Mapping[str, Any]) -> RecurrentConfig:
    given = dict(config)
    model_type = given.pop("model_type", None)
    kind = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if kind is None:
        raise ValueError(f"config: model_type must be one of {', '.join(_MODEL_TYPES)}, got {model_type!r}")
    if model_type == "gsa":  # the constructor there misspells keys that config.json spells correctly
        for spelt, key in (("exapnd_k", "expand_k"), ("exapnd_v", "expand_v")):
            given.setdefault(key, given.pop(spelt, 1))
    values = kind.values()
    fixed = _FIXED | kind.fixed
    unknown = sorted(map(str, set(given) - set(values) - set(fixed) - WITHOUT_EFFECT))
    if unknown:
        raise ValueError(
            f"config: {_listed(unknown)} not known of a {model_type} of flash-linear-attention 0.6"
        )
    for key, value in fixed.items():
        if given.get(key, value) != value:
            raise ValueError(f"config: {key} must be {value!r} in a {model_type}, got {given[key]!r}")
    values |= {key: value for key, value in given.items() if key in values}
    return _config(str(model_type), kind, values)


def _config(model_type: str, kind: _ModelType, values: dict[str, Any]) -> RecurrentConfig:
    options = {key: values[key] for key in kind.options.split()} | kind.constant
    rwkv, mamba = model_type in ("rwkv6", "rwkv7"), model_type.startswith("mamba")
    if not mamba:
        options["mode"] = _mode(values["attn_mode"])
    if rwkv:
        _check.one_of("config: hidden_act", values["hidden_act"], ACTIVATIONS)
    elif mamba:  # with other activations, kernels and PyTorch code of flash-linear-attention differ
        _check.one_of("config: hidden_act", values["hidden_act"], ("silu", "swish"))
    elif values["hidden_act"] != "swish":  # the SwiGLU there also takes "powlu", another function
        raise ValueError(
            f"config: hidden_act must be 'swish' in a {model_type}, got {values['hidden_act']!r}"
        )
    if model_type in ("gla", "retnet"):
        options["gate_fn"] = values["hidden_act"]
    if model_type == "hgrn2" and options["num_heads"] is not None and options["expand_ratio"] is not None:
        options["num_heads"] = None  # the layer there computes it from the ratio
    if model_type == "rwkv7":
        options["value_dim"] = _value_dim(options["value_dim"], values["num_hidden_layers"])
        if options["head_dim"] is not None:
            options["num_heads"] = None  # the layer there computes it from the head size
    attn = values["attn"]
    if attn is None:
        attn = ()
    elif isinstance(attn, Mapping):
        attn = (attn,)
    try:
        if model_type == "mamba":
            options["intermediate_size"] = _intermediate_size(values, model_type)  # an argument of the layer
        return RecurrentConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            num_hidden_layers=values["num_hidden_layers"],
            intermediate_size=None if mamba else _intermediate_size(values, model_type),
            layer=kind.layer,
            layer_options=options,
            feed_forward=model_type if rwkv else "none" if mamba else "swiglu",
            feed_forward_act=values["hidden_act"] if rwkv else "sqrelu",
            norm="layer" if rwkv else "rms",
            norm_bias=values.get("norm_bias", True),
            norm_eps=values["norm_eps"],
            norm_embeddings=values.get("norm_first", False),
            use_lower_bound=values.get("use_lower_bound", False),
            tie_word_embeddings=values["tie_word_embeddings"],
            attn=attn,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"config: {error}") from error


def from_fla(
    config: Mapping[str, Any] | str | os.PathLike[str],
    state_dict: Mapping[str, Tensor],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RecurrentLM:
    """A model with the weights of a model of flash-linear-attention 0.6, and the same logits.

    Args:
        config: Its config, as in `config_from_fla`.
        state_dict: ``state_dict()`` of its model for causal language modelling. The tensors are copied.
        device: Device of the parameters. Default: the device of each tensor of `state_dict`.
        dtype: Dtype of the parameters: float32, bfloat16, float16 or float64. Default: the dtype of each tensor of
            `state_dict`.

    Raises:
        ValueError: As in `config_from_fla`, or if parameters of `state_dict` are missing, unexpected or of a wrong
            shape. The error names all of them.
        TypeError: As in `config_from_fla`, or if `state_dict` is no mapping of names to dense float tensors, or `dtype`
            is not one of the four. Also if `dtype` is not given and the embeddings, linear projections and layer norms,
            which compute in the dtype of their input, have several dtypes.
        FileNotFoundError: As in `config_from_fla`.
    """
    given = _given(config)
    check_names("state_dict", state_dict)
    _check.optional_float_dtype(dtype)
    return _loaded(_without_values(given), given, state_dict, device, dtype, copy=True)


def load_fla(
    directory: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RecurrentLM:
    """Load a checkpoint from ``save_pretrained`` of a model of flash-linear-attention 0.6 or of mamba-ssm.

    Args:
        directory: A folder with ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin``, or, for several
            files, ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``. The first of these four that
            exists is read. Safetensors need the package safetensors. A str "organisation/name" that is no local path is
            a repository of the Hugging Face Hub, which the package huggingface_hub downloads once.
        revision: A branch, a tag or a commit of such a repository. Default: "main".
        device: Device of the parameters. Default: the CPU.
        dtype: Dtype of the parameters: float32, bfloat16, float16 or float64. Default: the saved dtypes.

    Raises:
        FileNotFoundError: If a file is missing, or `directory` is neither a folder nor a repository.
        ImportError: If safetensors or huggingface_hub is needed and not installed.
        ValueError: As in `from_fla`, or if a file cannot be read, the index and its files disagree, or `revision` is
            given with a folder.
        TypeError: As in `from_fla`, or if `directory` is no path, or a file holds no mapping of names.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a path, got {type(directory).__name__}")
    _check.optional_float_dtype(dtype)
    if is_of_hub(directory):
        name = os.fspath(directory)
        mixin = import_mixin(
            f"directory {name!r} is no folder, and to be downloaded from the Hugging Face Hub it"
        )
        find = partial(mixin.downloaded, name, revision)
    elif revision is not None:
        raise ValueError(f"revision must be None with a folder, got {revision!r} with {directory}")
    else:
        find = partial(_in_folder, Path(directory))
    given = _given(find("config.json", required=True))
    model = _without_values(given)  # first, since it is cheap
    return _loaded(model, given, _weights(directory, find), device, dtype, copy=False)


def _loaded(
    model: RecurrentLM,
    given: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    copy: bool,
) -> RecurrentLM:
    """Fill `model`, made of the config `given`, with the values of `state_dict`."""
    config = model.config
    names = {_name(name, config): name for name in model.state_dict()}  # from their names to ours
    weights = dict(state_dict)
    for name, weight in weights.items():
        _check.floating(f"state_dict[{name!r}]", weight)
    embedding = "backbone.embedding.weight"  # in mamba-ssm and in older versions of flash-linear-attention
    if config.feed_forward == "none" and embedding in weights:
        weights["backbone.embeddings.weight"] = weights.pop(embedding)
    if config.layer == "RWKV7Attention":
        _split_mixtures(weights)
    if config.tie_word_embeddings:
        head = weights.pop("lm_head.weight", None)
        of_embeddings = _name("embeddings.weight", config)
        embeddings = weights.get(of_embeddings, head)
        if head is not None and embeddings is not None and not torch.equal(head, embeddings):
            raise ValueError(
                f"state_dict['lm_head.weight'] must be {of_embeddings!r}, since tie_word_embeddings is True"
            )
    wrong = _other_names(names, weights)
    if not wrong:
        wrong = _other_shapes(names, weights, model)
    if wrong:
        raise ValueError(_assumed(given, config) + wrong)
    state = {ours: weights[name].detach().to(device, dtype, copy=copy) for name, ours in names.items()}
    model.load_state_dict(state, assign=True)
    _same_dtype(model)
    return model.requires_grad_()


def _split_mixtures(weights: dict[str, Tensor]) -> None:
    """Split ``x_x`` of older checkpoints of RWKV7 into the parameters that its rows are."""
    for name in [name for name in weights if name.endswith(".attn.x_x")]:
        rows = weights.pop(name)
        if rows.ndim != 2 or len(rows) != 6:
            raise ValueError(
                f"state_dict[{name!r}] must have shape (6, hidden_size), got {tuple(rows.shape)}"
            )
        weights |= {f"{name[:-1]}{mixed}": row[None, None] for mixed, row in zip("rwkvag", rows, strict=True)}


def _assumed(given: Mapping[str, Any], config: RecurrentConfig) -> str:
    """The beginning of an error about parameters, if a size that the config lacks may be the reason."""
    absent = [key for key in ("vocab_size", "hidden_size", "num_hidden_layers") if key not in given]
    sizes = ", ".join(f"{key}, taken to be {getattr(config, key)}" for key in absent)
    return f"config lacks {sizes}; " if absent else ""


def _other_shapes(names: Mapping[str, str], weights: Mapping[str, Tensor], model: RecurrentLM) -> str:
    shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    wrong = [
        f"{name} must have shape {tuple(shapes[ours])}, got {tuple(weights[name].shape)}"
        for name, ours in names.items()
        if weights[name].shape != shapes[ours]
    ]
    return "state_dict: " + "; ".join(wrong) if wrong else ""


def _other_names(names: Mapping[str, str], weights: Mapping[str, Tensor]) -> str:
    missing, unexpected = sorted(set(names) - set(weights)), sorted(set(weights) - set(names))
    lists = [f"lacks {', '.join(missing)}"] * bool(missing)
    lists += [f"has {', '.join(unexpected)}, which the config does not ask for"] * bool(unexpected)
    return "state_dict " + " and ".join(lists) if lists else ""


def _same_dtype(model: RecurrentLM) -> None:
    """Check that the modules of PyTorch, which compute in the dtype of their input, have one dtype.

    Our own modules, such as norms and convolutions, take parameters of any dtype.
    """
    expected = model.embeddings.weight.dtype
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.Linear, nn.LayerNorm)):
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.dtype != expected:
                    raise TypeError(
                        f"state_dict[{_name(name, model.config)!r}] must have the dtype of "
                        f"{_name('embeddings.weight', model.config)!r}, {_dtype(expected)}, where the argument "
                        f"dtype is not given, got {_dtype(parameter.dtype)}"
                    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(ours: str, config: RecurrentConfig) -> str:
    """The name of our parameter in flash-linear-attention."""
    if ours.startswith("lm_head."):
        return ours
    if config.feed_forward == "none":
        ours = ours.replace(".attn_norm.", ".norm.").replace(".attn.", ".mixer.")
        return "backbone." + (ours.replace("norm.", "norm_f.") if ours.startswith("norm.") else ours)
    if config.feed_forward != "swiglu":
        ours = ours.replace(".mlp_norm.", ".ffn_norm.").replace(".mlp.", ".ffn.")
    return "model." + ours.replace("embeddings_norm.", "layers.0.pre_norm.")


def _mode(attn_mode: Any) -> str:
    """The mode of the layer. It changes no value."""
    _check.one_of("config: attn_mode", attn_mode, ("chunk", "fused_chunk", "parallel", "fused_recurrent"))
    # "fused_chunk" and "parallel" are other kernels there for the same function as "chunk".
    return "fused_recurrent" if attn_mode == "fused_recurrent" else "chunk"


def _value_dim(value_dim: Any, num_hidden_layers: Any) -> Any:
    """The size for all layers. The config may have a list with one size per layer."""
    if not isinstance(value_dim, (tuple, list)):
        return value_dim
    if len(value_dim) != num_hidden_layers or any(size != value_dim[0] for size in value_dim):
        raise ValueError(
            "config: value_dim must be one size for all layers, whose values are mixed with those of the first, or a "
            f"list of it for each of num_hidden_layers = {num_hidden_layers}, got {value_dim}"
        )
    return value_dim[0]


def _intermediate_size(values: Mapping[str, Any], model_type: str) -> Any:
    """The `intermediate_size` of the config. Its default is computed as in flash-linear-attention."""
    name = "expand" if model_type == "mamba" else "hidden_ratio"
    size, ratio = values["intermediate_size"], values[name]
    if size is not None:
        return size
    if ratio is not None or model_type == "mamba":
        _check.positive(name, ratio)
    _check.count("hidden_size", values["hidden_size"])
    if model_type == "mamba":
        return int(values["hidden_size"] * ratio)
    if model_type in ("rwkv6", "rwkv7"):
        default = 3.5 if model_type == "rwkv6" else 4
        least, step = int(values["hidden_size"] * (default if ratio is None else ratio)), 32
    else:
        least, step = int(values["hidden_size"] * (4 if ratio is None else ratio) * 2 / 3), 256
    return -(-least // step) * step


# A function from the name of a file to its path, or None. With `required=True` a missing file is an error.
Find = Callable[..., Any]


def _in_folder(folder: Path, file: str, required: bool = False) -> Path | None:
    return folder / file if required or (folder / file).is_file() else None


def _weights(directory: Any, find: Find) -> dict[str, Tensor]:
    """The tensors in `directory`. `find` returns the path of a file in it, or None."""
    readers = {"model.safetensors": read_safetensors, "pytorch_model.bin": _pickle}
    for name, read in readers.items():
        if (file := find(name)) is not None:
            return read(file)
        if (index := find(f"{name}.index.json")) is not None:
            return _sharded(index, read, find)
    files = ", ".join(f"{name}, {name}.index.json" for name in readers)
    raise FileNotFoundError(f"{directory} must hold one of {files}")


def _sharded(index: Path, read: Any, find: Find) -> dict[str, Tensor]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index} must have a weight_map, got {type(files).__name__}")
    for name, file in files.items():
        if not isinstance(file, str):
            raise ValueError(f"{index} must have a file for {name}, got {file!r}")
    weights: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise ValueError(f"{index}: a file must be beside it, got {file!r}")
        held = read(find(file, required=True))
        expected = {name for name, place in files.items() if place == file}
        if set(held) != expected:
            differs = ", ".join(sorted(set(held) ^ expected))
            raise ValueError(f"{file} must hold what {index} says, but differs in {differs}")
        weights |= held
    return weights


def _pickle(path: Path) -> dict[str, Tensor]:
    return read_by(partial(torch.load, map_location="cpu", weights_only=True), path)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
