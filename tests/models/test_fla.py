"""Checkpoints of flash-linear-attention 0.6.0 give its logits, or an error that names what is wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fla_weights import tokens
from helpers.goldens import GOLDENS, loaded, state_dict
from helpers.make_fla_goldens import CASES, KEPT, LENGTH, PADDED, PADS, SIZES
from torch import Tensor

from flacompose.integrations._fla_configs import WITHOUT_EFFECT
from flacompose.integrations.fla import _COMMON, _MODEL_TYPES, config_from_fla, from_fla, load_fla
from flacompose.models import RecurrentLM

VOCAB = SIZES["vocab_size"]
GLA = {"model_type": "gla", **SIZES, "num_heads": 2}
RWKV7 = {"model_type": "rwkv7", "head_dim": 16}


def close(actual: Tensor, golden: Any) -> None:
    # Logits are of size 2, and float32 is summed in another order. On a CPU errors were seen up to 1e-5, and up to 3e-5
    # where beta is 2, so that no token forgets the rounding errors of those before it; kernels have an order of their
    # own. An eps of 1e-6 in place of 1e-5 in one norm of each layer changes logits by 1e-3.
    torch.testing.assert_close(actual.cpu(), torch.tensor(golden), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", GOLDENS)
@torch.no_grad()
def test_logits_are_those_of_the_peer(name: str, device: torch.device) -> None:
    logits, _ = loaded(name).to(device)(tokens(1, LENGTH, VOCAB).to(device))
    close(logits[0, list(KEPT)], GOLDENS[name]["logits"])


@pytest.mark.parametrize("name", GOLDENS)
@torch.no_grad()
def test_logits_after_pads_are_those_of_the_peer(name: str, device: torch.device) -> None:
    mask = torch.ones(2, PADDED, dtype=torch.bool, device=device)
    mask[0, :PADS] = False
    logits, _ = loaded(name).to(device)(tokens(2, PADDED, VOCAB).to(device), attention_mask=mask)
    close(logits[:, [PADS, -1]], GOLDENS[name]["padded"])


def test_every_model_has_goldens() -> None:
    assert {golden["config"]["model_type"] for golden in GOLDENS.values()} == set(_MODEL_TYPES)
    assert set(GOLDENS) == set(CASES)
    for golden in GOLDENS.values():
        # Far from 0 and from one another, so that a wrong model cannot be near them.
        assert torch.tensor(golden["logits"]).std() > 1


@pytest.mark.parametrize("name", GOLDENS)
@torch.no_grad()
def test_defaults_are_those_of_the_peer(name: str) -> None:
    """The config of a golden is complete; a part of it, what the peer's model was made with, gives the same bits."""
    given = {"model_type": GOLDENS[name]["config"]["model_type"], **SIZES, **CASES[name][1]}
    ids = tokens(1, LENGTH, VOCAB)
    actual, expected = from_fla(given, state_dict(name))(ids), loaded(name)(ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", _MODEL_TYPES)
def test_sizes_have_the_defaults_of_the_peer(model_type: str) -> None:
    config = config_from_fla({"model_type": model_type})
    layers = {"gated_deltanet": 21, "comba": 21, "mamba": 48, "mamba2": 48, "mamba3": 48}.get(model_type, 24)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (32000, 2048, layers)
    # As GatedMLP(hidden_size=2048, hidden_ratio=...).intermediate_size of the peer, and its RWKV6FeedForward's and
    # RWKV7FeedForward's.
    expected = {"retnet": 2816, "rwkv6": 7168, "rwkv7": 8192, "mamba": None, "mamba2": None, "mamba3": None}
    assert config.intermediate_size == expected.get(model_type, 5632)


def test_gsa_takes_both_spellings_of_its_arguments() -> None:
    def expand_k(**given: float) -> float:
        return config_from_fla({"model_type": "gsa", **given}).layer_options["expand_k"]

    assert (expand_k(), expand_k(exapnd_k=2), expand_k(expand_k=3), expand_k(exapnd_k=2, expand_k=3)) == (
        1,
        2,
        3,
        3,
    )
    with pytest.raises(
        ValueError, match="config: expand_v must be 1, since the norm has hidden_size channels, got 2"
    ):
        config_from_fla({"model_type": "gsa", "exapnd_v": 2})


@pytest.mark.parametrize(
    ("model_type", "states"),
    [
        ("gla", [(4, 256, 512)]),
        ("retnet", [(8, 256, 512)]),
        ("gsa", [(4, 512, 64), (4, 64, 512)]),
        ("rwkv6", [(4, 256, 512)]),
        ("rwkv7", [(32, 64, 64)]),
        ("hgrn2", [(16, 128, 128)]),
        ("delta_net", [(16, 128, 128)]),
        ("gated_deltanet", [(6, 256, 512)]),
        ("kda", [(16, 128, 128)]),
        ("mamba", [(4096, 16)]),
        ("mamba2", [(64, 128, 64)]),
        ("mamba3", [(64, 32), (64, 128, 64), (1, 64, 128), (64, 64)]),
        ("comba", [(6, 256, 512)]),
    ],
)
def test_default_sizes_of_the_peer_are_supported(model_type: str, states: list[tuple[int, ...]]) -> None:
    """Its published models of gated linear attention, retention and slots have heads of these sizes."""
    config = config_from_fla({"model_type": model_type, "num_hidden_layers": 1, "vocab_size": VOCAB})
    model = RecurrentLM(config, device="meta")
    assert list(model.layers[0].attn.state_shapes.recurrent) == states


@torch.no_grad()
def test_hgrn2_computes_its_heads_from_their_size() -> None:
    """As the peer's layer does where both are given."""
    config = GOLDENS["hgrn2"]["config"]
    logits, _ = from_fla(config | {"num_heads": 7}, state_dict("hgrn2"))(tokens(1, LENGTH, VOCAB))
    close(logits[0, list(KEPT)], GOLDENS["hgrn2"]["logits"])


def test_rwkv7_computes_its_heads_from_their_size() -> None:
    """As the peer's layer does where both are given; sizes of values may be given as one or for each layer."""
    for value_dim in (None, 32, [32, 32]):
        config = config_from_fla({**RWKV7, **SIZES, "num_heads": 7, "value_dim": value_dim})
        model = RecurrentLM(config, device="meta")
        assert {block.attn.state_shapes.recurrent for block in model.layers} == {((2, 16, 16),)}


MAMBA_SSM = {
    "d_model": 32,
    "n_layer": 2,
    "vocab_size": 5,
    "pad_vocab_size_multiple": 11,
    "tie_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "ssm_cfg"),
    [
        ("mamba", {"d_state": 8, "expand": 0.75}),
        ("mamba2", {"layer": "Mamba2", "d_state": 8, "headdim": 16}),
        (
            "mamba3 of mamba-ssm",
            {
                "layer": "Mamba3",
                "d_state": 8,
                "headdim": 16,
                "ngroups": 1,
                "is_mimo": True,
                "mimo_rank": 3,
                "fuse_pregate_headwise_norm": False,
            },
        ),
    ],
)
@torch.no_grad()
def test_checkpoints_of_mamba_ssm(name: str, ssm_cfg: dict[str, Any], tmp_path: Path) -> None:
    """They have a config of their own, a number of tokens that is rounded up, and one name of their own."""
    config = MAMBA_SSM | {
        "ssm_cfg": ssm_cfg,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
    }
    weights = {key.replace("embeddings", "embedding"): x for key, x in state_dict(name).items()}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    logits, _ = load_fla(tmp_path)(tokens(1, LENGTH, VOCAB))
    close(logits[0, list(KEPT)], GOLDENS[name]["logits"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": "mamba", "hidden_size": "x"}, r"config: hidden_size must be an int, got str"),
        ({"model_type": "mamba", "expand": "x"}, r"config: expand must be a number, got str"),
        ({"model_type": "mamba", "hidden_act": "gelu"}, r"config: hidden_act must be one of silu, swish, got 'gelu'"),
        ({"d_model": 32, "rms_norm": False}, r"config: rms_norm must be True in a model of mamba-ssm, got False"),
        ({"d_model": 32, "attn_layer_idx": [1]}, r"config: attn_layer_idx must be \[\] in a model .*, got \[1\]"),
        ({"d_model": 32, "ssm_cfg": {"layer": "Mamba4"}}, r"config: ssm_cfg: layer must be one of Mamba1, .*Mamba3"),
        ({"d_model": 32, "ssm_cfg": {"layer": "Mamba3", "bias": True}}, r"config: bias is not known of a mamba3"),
        ({"d_model": 32, "ssm_cfg": {"layer": "Mamba2", "d_ssm": 8}}, r"config: ssm_cfg: d_ssm must be None, got 8"),
        ({"d_model": 32, "ssm_cfg": {"d_states": 8}}, r"config: d_states is not known of a mamba"),
        ({"d_model": 32, "ssm_cfg": 3}, r"config: ssm_cfg must be a mapping, got int"),
    ],
)  # fmt: skip
def test_what_is_not_supported_of_mamba_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_fla(given)


def test_mixtures_of_older_versions_of_rwkv7() -> None:
    """They have one parameter for all six of a layer."""
    config, weights = GOLDENS["rwkv7"]["config"], state_dict("rwkv7")
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}.attn.x_"
        weights[f"{prefix}x"] = torch.cat([weights.pop(prefix + name)[0] for name in "rwkvag"])
    expected = loaded("rwkv7").state_dict()
    torch.testing.assert_close(from_fla(config, weights).state_dict(), expected, rtol=0, atol=0)
    assert "model.layers.0.attn.x_x" in weights  # what is given stays as it is
    weights["model.layers.1.attn.x_x"] = torch.zeros(5, 32)
    with pytest.raises(
        ValueError,
        match=r"state_dict\['model.layers.1.attn.x_x'\] must have shape \(6, hidden_size\), got \(5, 32\)",
    ):
        from_fla(config, weights)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"model_type": "samba"}, r"model_type must be one of gla, .*, comba, got 'samba'"),
        ({"model_type": None}, r"model_type must be one of .* got None"),
        ({"num_attention_heads": 4, "rms_norm_eps": 1}, r"num_attention_heads, rms_norm_eps are not known of a gla"),
        ({"head_dim": 4}, r"head_dim is not known of a gla"),
        ({"attnres_block_size": 2}, r"attnres_block_size must be None in a gla, got 2"),
        ({"use_gv": True}, r"use_gv must be False in a gla, got True"),
        ({"hidden_act": "powlu"}, r"hidden_act must be 'swish' in a gla, got 'powlu'"),
        ({"model_type": "rwkv6", "hidden_act": "bias_gelu"},
         r"config: hidden_act must be one of relu, .*'bias_gelu'"),
        (RWKV7 | {"attn": {"layers": [0], "num_heads": 2}}, r"config: attn must be None in a rwkv7, got {'layers'"),
        (RWKV7 | {"value_dim": [32, 64]}, r"config: value_dim must be one size for all layers, .*got \[32, 64\]"),
        (RWKV7 | {"value_dim": [32]}, r"config: value_dim must be .*num_hidden_layers = 2, got \[32\]"),
        (RWKV7 | {"head_dim": 5}, r"config: hidden_size must be a multiple of head_dim = 5, got 32"),
        ({"intermediate_size": None, "hidden_ratio": 0}, r"config: hidden_ratio must be positive, got 0"),
        ({"intermediate_size": None, "hidden_ratio": "4"}, r"config: hidden_ratio must be"),
        ({"attn_mode": "fast"}, r"attn_mode must be one of chunk, .* got 'fast'"),
        ({"feature_map": "cosine"}, r"config: feature_map must be one of"),
        ({"num_heads": 5}, r"config: hidden_size \* expand_k must be a positive multiple of num_heads = 5"),
        ({"hidden_size": "32"}, r"config: hidden_size must be"),
        ({"tie_word_embeddings": 1}, r"config: tie_word_embeddings must be a bool, got 1"),
        ({"attn": {"layers": [2], "num_heads": 2}},
         r"config: attn\[0\]\['layers'\] must hold indices below .* 2, .* 2"),
        ({"attn": {"layers": [0], "num_heads": 2, "qk_norm": True}},
         r"config: attn\[0\]: a key must be one of .*qk_norm"),
        ({"attn": {"layers": [0]}}, r"config: attn\[0\] must have the key 'num_heads'"),
        ({"attn": {"layers": [0], "num_heads": 3}}, r"config: hidden_size must be a multiple of 2 \* num_heads = 6"),
        ({"attn": 3}, r"config: attn must be a sequence of mappings, got int"),
        ({"use_gk": False}, r"use_gk must be True in a gla, got False"),
        *(
            (
                {"model_type": model_type, key: value},
                rf"{key} must be {wanted} in a {model_type}, got {value}",
            )
            for model_type, key, value, wanted in (
                ("gsa", "clamp_min", -1.0, "None"),
                ("gsa", "clamp_max", 1.0, "None"),
                ("gsa", "use_rope", True, "False"),
                ("delta_net", "use_rope", True, "False"),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_in_a_config_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_fla(GLA | given)
    with pytest.raises(ValueError, match=message):
        from_fla(GLA | given, state_dict("gla"))


def test_keys_without_effect() -> None:
    """Those of transformers, and those that the peer's models had, leave a config as it is."""
    transformers = pytest.importorskip("transformers")
    assert set(transformers.PreTrainedConfig().to_dict()) - {"model_type"} <= WITHOUT_EFFECT
    extras = dict.fromkeys(WITHOUT_EFFECT - {"use_gk", "use_gv"} - set(_MODEL_TYPES["gla"].options.split()))
    assert config_from_fla(GLA | extras) == config_from_fla(GLA)
    assert config_from_fla(GLA | {"num_labels": 2}) == config_from_fla(GLA)


def test_every_parameter_is_accounted_for() -> None:
    weights = state_dict("gla")
    weights["model.layers.0.attn.q.weight"] = weights.pop("model.layers.0.attn.q_proj.weight")
    del weights["lm_head.weight"]
    message = (
        "state_dict lacks lm_head.weight, model.layers.0.attn.q_proj.weight and has model.layers.0.attn.q.weight, "
        "which the config does not ask for"
    )
    with pytest.raises(ValueError, match=message):
        from_fla(GLA, weights)


def test_shapes_are_those_of_the_config() -> None:
    weights = state_dict("gla")
    weights["model.norm.weight"] = torch.ones(33)
    with pytest.raises(
        ValueError, match=r"state_dict: model.norm.weight must have shape \(32,\), got \(33,\)"
    ):
        from_fla(GLA, weights)
    quantised = torch.zeros(VOCAB, 32, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"state_dict\['lm_head.weight'\] must be float32, .* got int8"):
        from_fla(GLA, state_dict("gla") | {"lm_head.weight": quantised})
    with pytest.raises(TypeError, match=r"state_dict\['lm_head.weight'\] must be a tensor, got list"):
        from_fla(GLA, state_dict("gla") | {"lm_head.weight": [1.0]})  # type: ignore[dict-item]


@pytest.mark.parametrize("absent", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_size_that_the_config_lacks_is_named_first(absent: str) -> None:
    config = {key: value for key, value in (GLA | {"num_heads": 16}).items() if key != absent}
    default = _COMMON[absent]
    with pytest.raises(ValueError, match=rf"^config lacks {absent}, taken to be {default}; state_dict"):
        from_fla(config, state_dict("gla"))
    with pytest.raises(ValueError, match="^state_dict lacks"):
        from_fla(GLA, {})


@pytest.mark.parametrize(
    "config, error, message",
    [
        (None, TypeError, "config must be a mapping or the path of a config.json, got NoneType"),
        (b"config.json", TypeError, "config must be a mapping or the path of a config.json, got bytes"),
        (json.dumps(GLA), ValueError, "config must be a mapping or the path of .*, got a str of JSON"),
        ("no-such.json", FileNotFoundError, "no-such.json"),
        (GLA | {1: 2}, ValueError, "config: 1 is not known of a gla"),
    ],
)
def test_what_is_no_config(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config_from_fla(config)
    with pytest.raises(error, match=message):
        from_fla(config, state_dict("gla"))


@pytest.mark.parametrize(
    "weights, message",
    [
        (None, "state_dict must be a mapping of names to tensors, got NoneType"),
        ("x", "state_dict must be a mapping of names to tensors, got str"),
        ({3: torch.ones(1)}, "state_dict must have names for keys, got 3"),
    ],
)
def test_what_is_no_state_dict(weights: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_fla(GLA, weights)


@pytest.mark.parametrize(("dtype", "got"), [("bfloat16", "str"), (torch.int64, "int64")])
def test_what_is_no_dtype(dtype: Any, got: str, tmp_path: Path) -> None:
    message = f"dtype must be float32, bfloat16, float16 or float64, got {got}"
    with pytest.raises(TypeError, match=message):
        from_fla(GLA, state_dict("gla"), dtype=dtype)
    with pytest.raises(TypeError, match=message):
        load_fla(tmp_path, dtype=dtype)


@pytest.mark.parametrize("name", ["gla hybrid", "rwkv6", "rwkv7", "hgrn2", "kda"])
@torch.no_grad()
def test_one_parameter_in_another_dtype_is_refused_or_computed_with(name: str) -> None:
    """What is not refused gives logits; `dtype` lets every parameter pass."""
    config, weights, ids = GOLDENS[name]["config"], state_dict(name), tokens(1, 5, VOCAB)
    kept, refused = set(), set()
    for key, weight in weights.items():
        given = weights | {key: weight.bfloat16()}
        try:
            model = from_fla(config, given)
        except TypeError as error:
            # Where it is the embeddings, the first of the others is named.
            which, got = (key, "bfloat16") if key != "model.embeddings.weight" else (".*", "float32")
            assert re.match(rf"state_dict\['{which}'\] must have the dtype of .*, got {got}$", str(error))
            from_fla(config, given, dtype=torch.float32)
            refused.add(key)
        else:
            model(ids)
            kept.add(key)
    assert {"lm_head.weight", "model.embeddings.weight"} <= refused
    assert any("attn" in key for key in kept)  # as g_norm, or A_log


def test_tied_embeddings() -> None:
    weights, config = state_dict("gla varied"), GOLDENS["gla varied"]["config"]
    expected = loaded("gla varied").state_dict()
    del weights["lm_head.weight"]  # as in safetensors, which hold no tensor twice
    actual = from_fla(config, weights).state_dict()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="lm_head.weight.* tie_word_embeddings"):
        from_fla(config, weights | {"lm_head.weight": weights["model.embeddings.weight"] + 1})


def test_weights_are_copied() -> None:
    weights = state_dict("gla")
    model = from_fla(GLA, weights)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(weights, state_dict("gla"), rtol=0, atol=0)


def test_dtypes_are_kept_or_changed() -> None:
    weights = {name: weight.bfloat16() for name, weight in state_dict("gated_deltanet").items()}
    weights["model.layers.0.attn.A_log"] = weights["model.layers.0.attn.A_log"].float()
    config = GOLDENS["gated_deltanet"]["config"]
    kept = from_fla(config, weights).state_dict()
    assert {name for name, weight in kept.items() if weight.dtype == torch.float32} == {"layers.0.attn.A_log"}
    assert {p.dtype for p in from_fla(config, weights, dtype=torch.float64).parameters()} == {torch.float64}


@torch.no_grad()
def test_modes_are_one_function() -> None:
    ids, config = tokens(1, LENGTH, VOCAB), GOLDENS["retnet"]["config"]
    chunk, _ = loaded("retnet")(ids)
    for mode in ("fused_recurrent", "fused_chunk", "parallel"):
        logits, _ = from_fla(config | {"attn_mode": mode}, state_dict("retnet"))(ids)
        torch.testing.assert_close(logits, chunk, atol=5e-5, rtol=0)


class TestDirectory:
    """As save_pretrained writes it."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(GOLDENS["rwkv6"]["config"]), encoding="utf-8")
        return tmp_path

    @pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
    def file(self, request: pytest.FixtureRequest) -> str:
        if request.param == "model.safetensors":
            pytest.importorskip("safetensors")
        return request.param

    def save(self, weights: dict[str, Tensor], path: Path) -> None:
        if path.suffix == ".bin":
            torch.save(weights, path)
        else:
            from safetensors.torch import save_file

            save_file(weights, path)

    def shards(self, folder: Path, file: str) -> dict[str, str]:
        """Two files, and where the index says that each parameter is."""
        stem, suffix = file.split(".")
        weights = state_dict("rwkv6")
        names = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
        places = {name: names[i % 2] for i, name in enumerate(weights)}
        for place in names:
            self.save({name: weights[name] for name in weights if places[name] == place}, folder / place)
        self.index(folder, file, places)
        return places

    def index(self, folder: Path, file: str, places: object) -> None:
        (folder / f"{file}.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")

    def expect(self, folder: Path) -> None:
        expected = loaded("rwkv6").state_dict()
        torch.testing.assert_close(load_fla(folder).state_dict(), expected, rtol=0, atol=0)

    def test_one_file(self, folder: Path, file: str) -> None:
        self.save(state_dict("rwkv6"), folder / file)
        self.expect(folder)
        assert load_fla(str(folder), dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16

    def test_several_files(self, folder: Path, file: str) -> None:
        self.shards(folder, file)
        self.expect(folder)

    def test_files_that_are_not_what_the_index_says(self, folder: Path, file: str) -> None:
        places = self.shards(folder, file)
        self.index(folder, file, {name: place for name, place in places.items() if name != "lm_head.weight"})
        with pytest.raises(ValueError, match="must hold what .* says, but differs in lm_head.weight"):
            load_fla(folder)
        self.index(folder, file, {name: f"../{place}" for name, place in places.items()})
        with pytest.raises(ValueError, match="a file must be beside it, got '../"):
            load_fla(folder)
        self.index(folder, file, ["lm_head.weight"])
        with pytest.raises(ValueError, match="must have a weight_map, got list"):
            load_fla(folder)
        self.index(folder, file, dict.fromkeys(places, f"no-such.{file}"))
        with pytest.raises(FileNotFoundError, match="no-such"):
            load_fla(folder)
        self.index(folder, file, dict.fromkeys(places, 3))
        with pytest.raises(ValueError, match="index.json must have a file for .*, got 3"):
            load_fla(folder)

    @pytest.mark.parametrize("junk", [b"", b"junk", b"{", b"PK\x03\x04", b"\x80\x02junk.", bytes(64)])
    def test_files_that_cannot_be_read(self, folder: Path, file: str, junk: bytes) -> None:
        (folder / file).write_bytes(junk)
        with pytest.raises(
            ValueError, match=f"{folder / file} must be a whole {Path(file).suffix} file of tensors: "
        ):
            load_fla(folder)
        (folder / "config.json").write_bytes(junk)
        with pytest.raises(ValueError, match=f"{folder / 'config.json'} must hold JSON: "):
            load_fla(folder)

    def test_files_of_something_else(self, folder: Path) -> None:
        path = folder / "pytorch_model.bin"
        for held, message in (
            ([1.0], "must be a mapping of names to tensors, got list"),
            ({3: torch.ones(1)}, "must have names for keys, got 3"),
        ):
            torch.save(held, path)
            with pytest.raises(TypeError, match=f"{path} {message}"):
                load_fla(folder)
        with pytest.raises(TypeError, match="directory must be a path, got NoneType"):
            load_fla(None)  # type: ignore[arg-type]

    def test_no_file(self, folder: Path) -> None:
        with pytest.raises(
            FileNotFoundError, match="must hold one of model.safetensors, .*pytorch_model.bin"
        ):
            load_fla(folder)
        with pytest.raises(FileNotFoundError, match="config.json"):
            load_fla(folder / "nowhere")

    def test_no_safetensors(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "model.safetensors").touch()
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(ImportError, match="needs the package safetensors"):
            load_fla(folder)

    def test_config_is_a_path_or_an_object(self, folder: Path) -> None:
        assert config_from_fla(folder / "config.json") == config_from_fla(GOLDENS["rwkv6"]["config"])
        (folder / "config.json").write_text("[]", encoding="utf-8")
        with pytest.raises(ValueError, match="config.json must hold an object, got list"):
            load_fla(folder)
