"""docs/coverage.md has a row for every public name of flash-linear-attention 0.6.0, and says of each what is true here.

The peer is not installed where the tests run: `peer_names.json` has its names. Those of operators are `__all__` of
`fla.ops` and of the packages in it, without references in plain PyTorch and without `utils`, `common` and `cp`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from flacompose import layers, models, ops
from flacompose.integrations import fla

HERE = Path(__file__).parent
PEER = json.loads((HERE / "helpers" / "peer_names.json").read_text(encoding="utf-8"))
PAGE = (HERE.parent / "docs" / "coverage.md").read_text(encoding="utf-8")
OURS = {"Operators": ops, "Layers": layers, "Models": SimpleNamespace(**vars(models), load_fla=fla.load_fla)}
STATES = ("here", "a choice of arguments", "absent")


def rows(section: str) -> list[list[str]]:
    """The four cells of each row of the table under a heading."""
    _, text = PAGE.split(f"\n## {section}\n")
    lines = re.findall(r"^\|(.+)\|$", text.split("\n## ")[0], re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


@pytest.mark.parametrize("section", OURS)
def test_every_name_has_one_row(section: str) -> None:
    listed = [name for peer, *_ in rows(section) for name in names(peer)]
    if section == "Models":
        listed = [name + end for name in listed for end in ("Config", "Model", "ForCausalLM")]
    expected = PEER["ops" if section == "Operators" else section.lower()]
    assert Counter(listed) == Counter(expected)


@pytest.mark.parametrize("section", OURS)
def test_rows_are_true(section: str) -> None:
    """What is present exists, a name that is the same here is not called absent, and the rest has its reason."""
    for peer, state, ours, why in rows(section):
        assert state in STATES, peer
        assert bool(names(ours)) == (state != "absent"), peer
        assert bool(why) == (state != "here"), peer
        for name in names(ours):
            assert hasattr(OURS[section], name), name
        if state == "here" and section != "Models":
            assert set(names(peer)) <= set(names(ours)), peer
        if state != "here" and section != "Models":
            assert not [name for name in names(peer) if hasattr(OURS[section], name)], peer


def test_models_with_weights() -> None:
    """The rows of models that load are those of the integration, and the layers of the others make a model."""
    loaded, made = [], []
    for peer, _, ours, arguments in rows("Models"):
        loaded += names(peer) if "load_fla" in names(ours) else []
        made += re.findall(r'layer="(\w+)"', arguments)
    assert len(loaded) == len(fla._MODEL_TYPES)
    for layer in made:
        assert issubclass(getattr(layers, layer), layers.recurrent.RecurrentLayer)
