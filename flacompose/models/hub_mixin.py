"""Saving and loading models in folders and on the Hugging Face Hub. No other file imports huggingface_hub."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401  (the mixin imports it when it saves; a missing package is reported now)
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from flacompose.models.config import RecurrentConfig
from flacompose.models.weights import read_json, read_safetensors

WEIGHTS = "model.safetensors"
CARD = """---
{{ card_data }}
---

A language model of flacompose, which loads it from this repository or folder:

```python
from flacompose.models import RecurrentLM

model = RecurrentLM.from_pretrained("...")
```
"""


class Saved(
    PyTorchModelHubMixin, library_name="flacompose", pipeline_tag="text-generation", model_card_template=CARD
):
    """A wrapper of a `RecurrentLM` for the mixin, which saves the attribute `module`."""

    def __init__(self, model: Any) -> None:
        for name, x in model.state_dict().items():
            if x.is_meta or hasattr(x, "device_mesh"):
                held = "is on the meta device" if x.is_meta else "is sharded"
                raise ValueError(f"a model must have all of its values to be saved, but {name} {held}")
        self.module = model

    @classmethod
    def _from_pretrained(cls, *, model_id: str, config: Any = None, **options: Any) -> Saved:
        model_class, device, dtype = (options.pop(name) for name in ("model_class", "device", "dtype"))
        if config is None:
            raise FileNotFoundError(
                f"{model_id!r} must be a folder, or a repository of the Hub with a config.json"
            )
        # First without values, which is cheap and finds errors in the config.
        model = model_class(_config(config), device="meta", dtype=dtype)
        if os.path.isdir(model_id):
            file = Path(model_id, WEIGHTS)
        else:
            file = Path(hf_hub_download(model_id, WEIGHTS, **options))
        weights = read_safetensors(file)
        if dtype is not None:
            dtypes = {name: x.dtype for name, x in model.state_dict().items()}
            weights = {name: x.to(dtypes.get(name)) for name, x in weights.items()}
        model.load_state_dict({name: x.to(device) for name, x in weights.items()}, assign=True)
        return cls(model)


def _config(given: dict[str, Any]) -> RecurrentConfig:
    """The content of a ``config.json``."""
    unknown = sorted(set(given) - {field.name for field in fields(RecurrentConfig)})
    if unknown:
        raise ValueError(
            "config.json must hold arguments of RecurrentConfig alone (load_fla loads models of "
            f"flash-linear-attention), got {unknown}"
        )
    return RecurrentConfig(**given)


def load(model_class: Any, name: str, **options: Any) -> Any:
    """A model of this class, from a folder or from the Hub."""
    if os.path.isdir(name):
        read_json(Path(name, "config.json"))  # the mixin reads it too, but its errors do not name the file
    try:
        return Saved.from_pretrained(name, model_class=model_class, **options).module
    except EntryNotFoundError as error:
        raise _not_found(name, error) from error


def downloaded(repo_id: str, revision: str | None, file: str, required: bool = False) -> Path | None:
    """Download a file of a repository; return its path, or None if it does not exist and is not `required`."""
    try:
        return Path(hf_hub_download(repo_id, file, revision=revision))
    # `LocalEntryNotFoundError` means that there is no connection, and no earlier download.
    except (RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise _not_found(repo_id, error) from error
    except EntryNotFoundError as error:
        if required:
            raise _not_found(repo_id, error) from error
        return None


def _not_found(name: str, error: Exception) -> FileNotFoundError:
    return FileNotFoundError(f"{name!r} is no folder, and could not be read from the Hub: {error}")
