"""Saving and loading through huggingface_hub. Nothing is sent or downloaded: both ends are folders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fla_weights import tokens
from helpers.goldens import GOLDENS, loaded, state_dict

from flacompose.integrations.fla import load_fla
from flacompose.models import RecurrentConfig, RecurrentLM

NAMES = ["config.json", "model.safetensors"]
VOCAB = 11


def small(**changes: Any) -> RecurrentLM:
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "layer": "GatedDeltaNet",
        "layer_options": {"num_heads": 2, "head_dim": 16},
        "attn": [{"layers": [1], "num_heads": 2}],
        "tie_word_embeddings": True,
    }
    return RecurrentLM(RecurrentConfig(**config | changes))


def same(a: RecurrentLM, b: RecurrentLM) -> None:
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()), rtol=0, atol=0)  # dtypes too
    assert a.config == b.config


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The downloads of a Hub whose only repository, "someone/model", is the folder ``remote``."""
    from huggingface_hub import errors, hub_mixin

    from flacompose.models import hub_mixin as ours

    monkeypatch.chdir(tmp_path)
    downloads = []

    def download(repo_id: str, filename: str, **options: Any) -> str:
        downloads.append((filename, options))
        if repo_id != "someone/model":
            raise errors.LocalEntryNotFoundError("no connection")
        if not Path("remote", filename).exists():
            raise errors.EntryNotFoundError(f"{filename} is not there")
        Path("cache").mkdir(exist_ok=True)
        return shutil.copy(Path("remote", filename), Path("cache", filename))

    monkeypatch.setattr(hub_mixin, "hf_hub_download", download)
    monkeypatch.setattr(ours, "hf_hub_download", download)
    return downloads


def test_loaded_in_another_process(tmp_path: Path) -> None:
    """Which imports huggingface_hub only to load. Parameters in two dtypes stay what they are."""
    model, ids = small().bfloat16(), tokens(1, 9, VOCAB)
    model.layers[0].attn.A_log.data = model.layers[0].attn.A_log.float()
    model.save_pretrained(tmp_path / "saved")
    torch.save((ids, model(ids)[0], dict(model.state_dict())), tmp_path / "expected")
    program = """if True:
        import sys, torch
        from flacompose.models import RecurrentLM
        assert not {"huggingface_hub", "safetensors"} & set(sys.modules)
        model = RecurrentLM.from_pretrained("saved")
        ids, logits, weights = torch.load("expected")
        torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
        assert torch.equal(model(ids)[0], logits) and all(p.requires_grad for p in model.parameters())
    """
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)


def test_a_folder(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", *NAMES]
    assert RecurrentConfig(**json.loads((tmp_path / "config.json").read_text())) == model.config
    assert "library_name: flacompose" in (tmp_path / "README.md").read_text()
    same(RecurrentLM.from_pretrained(tmp_path), model)
    as_made = small().to(torch.float64).state_dict()
    half = RecurrentLM.from_pretrained(str(tmp_path), dtype=torch.float64).state_dict()
    assert {name: x.dtype for name, x in half.items()} == {name: x.dtype for name, x in as_made.items()}
    other = small(tie_word_embeddings=False)
    other.save_pretrained(tmp_path)  # over it
    same(RecurrentLM.from_pretrained(tmp_path), other)


def test_from_the_hub(online: list[tuple[str, dict[str, Any]]]) -> None:
    class Mine(RecurrentLM):
        pass

    model = small()
    model.save_pretrained("remote")
    got = Mine.from_pretrained("someone/model", revision="v1", token="mine", force_download=True)
    same(got, model)
    assert type(got) is Mine and [name for name, _ in online] == NAMES
    for _, options in online:
        assert (options["revision"], options["token"], options["force_download"]) == ("v1", "mine", True)
    with pytest.raises(
        FileNotFoundError, match="'someone/other' is no folder, and could not be read .*: no conn"
    ):
        RecurrentLM.from_pretrained("someone/other")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_load_fla_from_the_hub(file: str, online: list[tuple[str, dict[str, Any]]]) -> None:
    """One file, and several with an index: no others are downloaded."""
    from safetensors.torch import save_file

    save = save_file if file == "model.safetensors" else torch.save
    weights = state_dict("rwkv6")
    remote = Path("remote")
    remote.mkdir()
    (remote / "config.json").write_text(json.dumps(GOLDENS["rwkv6"]["config"]))
    save(weights, remote / file)
    expected = loaded("rwkv6")
    same(load_fla("someone/model", revision="v1"), expected)
    assert online[-1] == (file, {"revision": "v1"})

    (remote / file).unlink()
    places = {name: f"{i % 2}.{file}" for i, name in enumerate(weights)}
    for place in set(places.values()):
        save({name: x for name, x in weights.items() if places[name] == place}, remote / place)
    (remote / f"{file}.index.json").write_text(json.dumps({"weight_map": places}))
    same(load_fla("someone/model"), expected)
    (remote / f"1.{file}").unlink()
    with pytest.raises(
        FileNotFoundError, match=f"'someone/model' is no folder, and .*: 1.{file} is not there"
    ):
        load_fla("someone/model")
    with pytest.raises(
        FileNotFoundError, match="'someone/other' is no folder, and could not be read .*: no conn"
    ):
        load_fla("someone/other")

    Path("someone").mkdir()
    remote.rename("someone/model")  # a folder of this name comes first
    with pytest.raises(FileNotFoundError, match=f"someone/model/1.{file}"):
        load_fla("someone/model")
    with pytest.raises(ValueError, match="revision must be None with a folder, got 'v1' with someone/model"):
        load_fla("someone/model", revision="v1")


def test_without_a_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that was never downloaded is not taken for one that the repository lacks."""
    from huggingface_hub import errors

    from flacompose.models import hub_mixin

    (tmp_path / "config.json").write_text(json.dumps(GOLDENS["rwkv6"]["config"]))

    def download(repo_id: str, filename: str, **_: Any) -> str:
        if filename != "config.json":
            raise errors.LocalEntryNotFoundError("no connection")
        return str(tmp_path / filename)

    monkeypatch.setattr(hub_mixin, "hf_hub_download", download)
    with pytest.raises(FileNotFoundError, match="could not be read from the Hub: no connection"):
        load_fla("someone/model")


def test_push_to_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    pushed: dict[str, Any] = {}

    def create(api: HfApi, repo_id: str, private: bool | None, exist_ok: bool) -> Any:
        return type("Repository", (), {"repo_id": repo_id})

    def upload(api: HfApi, folder_path: Path, **options: Any) -> str:
        files = sorted(path.name for path in folder_path.iterdir())
        pushed.update(options, files=files, model=RecurrentLM.from_pretrained(folder_path))
        return "the commit"

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    model = small()
    assert model.push_to_hub("someone/model", branch="v1", commit_message="mine") == "the commit"
    same(pushed["model"], model)
    assert pushed["files"] == ["README.md", *NAMES]
    assert (pushed["revision"], pushed["commit_message"], pushed["repo_id"]) == (
        "v1",
        "mine",
        "someone/model",
    )


@pytest.mark.parametrize("package", ["huggingface_hub", "safetensors.torch"])
def test_without_a_package(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error at use says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "flacompose.models.hub_mixin", raising=False)
    monkeypatch.delattr("flacompose.models.hub_mixin", raising=False)
    install = r"needs the packages huggingface_hub and safetensors: pip install huggingface_hub safetensors$"
    model = small()
    for what, call in [
        ("^save_pretrained", lambda: model.save_pretrained(tmp_path)),
        ("^push_to_hub", lambda: model.push_to_hub("someone/model")),
        ("^from_pretrained", lambda: RecurrentLM.from_pretrained(tmp_path)),
        ("^directory 'someone/model' is no folder, and to be downloaded", lambda: load_fla("someone/model")),
    ]:
        with pytest.raises(ImportError, match=f"{what}.*{install}"):
            call()


def test_errors(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(
        ValueError, match="must have all of its values .* embeddings.weight is on the meta device"
    ):
        RecurrentLM(model.config, device="meta").save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="save_directory must be a path, got int"):
        model.save_pretrained(3)  # type: ignore[arg-type]
    for name, error, message in [
        (None, TypeError, "name must be a path, got NoneType"),
        (tmp_path / "nowhere", FileNotFoundError, "name must be a folder or a repository .* got '.*nowhere'"),
        (tmp_path, FileNotFoundError, "config.json"),
    ]:
        with pytest.raises(error, match=message):
            RecurrentLM.from_pretrained(name)  # type: ignore[arg-type]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="revision must be None with a folder, got 'v1' with "):
        RecurrentLM.from_pretrained(tmp_path, revision="v1")
    with pytest.raises(TypeError, match="dtype must be float32, .* got int8"):
        RecurrentLM.from_pretrained(tmp_path, dtype=torch.int8)
    config = json.loads((tmp_path / "config.json").read_text())
    for given, message in [
        (config | {"model_type": "gla", "width": 3}, r"\(load_fla loads .*\), got \['model_type', 'width'\]"),
        (config | {"hidden_size": 0}, "hidden_size must be"),
        ([], "config.json must hold an object, got list"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(given))
        with pytest.raises(ValueError, match=message):
            RecurrentLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(RuntimeError, match="Missing key.*layers.2.attn_norm.weight"):
        RecurrentLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="model.safetensors must be a whole .safetensors file of tensors: "):
        RecurrentLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors must be a file"):
        RecurrentLM.from_pretrained(tmp_path)
