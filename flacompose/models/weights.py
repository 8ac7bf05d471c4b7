"""Reading the files of saved models, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f"{path} needs the package safetensors: pip install safetensors") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file")
    return read_by(load_file, path)


def read_by(load: Callable[[Path], Any], path: Path) -> dict[str, Tensor]:
    try:
        held = load(path)
    except OSError:  # its message has the path
        raise
    except Exception as error:  # readers of damaged or other files may raise any error
        raise ValueError(f"{path} must be a whole {path.suffix} file of tensors: {error!r}") from error
    check_names(str(path), held)
    return held


def check_names(what: str, held: object) -> None:
    """Check that `held` is a mapping of names."""
    if not isinstance(held, Mapping):
        raise TypeError(f"{what} must be a mapping of names to tensors, got {type(held).__name__}")
    for key in held:
        if not isinstance(key, str):
            raise TypeError(f"{what} must have names for keys, got {key!r}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must hold JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content
