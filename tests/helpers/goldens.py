"""What make_fla_goldens.py has written, and models of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from flacompose.integrations.fla import from_fla
from flacompose.models import RecurrentLM
from helpers.fla_weights import weight

GOLDENS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("fla_goldens.json").read_text(encoding="utf-8")
)


def state_dict(name: str) -> dict[str, Tensor]:
    """Of the peer's model."""
    weights = {key: weight(key, tuple(shape)) for key, shape in GOLDENS[name]["shapes"].items()}
    if GOLDENS[name]["config"]["tie_word_embeddings"]:
        weights["lm_head.weight"] = next(x for key, x in weights.items() if key.endswith("embeddings.weight"))
    return weights


def loaded(name: str) -> RecurrentLM:
    """The peer's model as ours."""
    return from_fla(GOLDENS[name]["config"], state_dict(name))
