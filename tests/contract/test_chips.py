"""The tables of all chips are right, also those for chips that are not here: run on the one that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.launches import CHIPS, tables_of

from flacompose.ops._launch.chip import Chip, chip_of
from flacompose.ops._launch.replay import Replay
from flacompose.ops._launch.warm_up import compile_ahead

from .accuracy import assert_accurate
from .cases import NAMED, OpCase, every
from .problems import draw, evaluate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# Of the recurrences whose configurations depend on the chip, with each kind of gates.
NAMES = (
    "chunk_gla",
    "bonus-chunk-gk-gv",
    "chunk_linear_attn",
    "chunk_simple_gla-g",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_gdn2",
    "chunk_comba-after",
    "chunk_comba",
    "chunk_rwkv7",
)
# Sizes at which some chip has a configuration of its own.
SIZES = [
    (BFLOAT16, 64, 64),
    (BFLOAT16, 128, 128),
    (BFLOAT16, 256, 256),
    (BFLOAT16, 512, 80),
    (FLOAT32, 64, 16),
    (FLOAT32, 256, 16),
    (FLOAT32, 512, 32),
]


@pytest.fixture(params=dict.fromkeys(CHIPS.values()), ids=lambda chip: f"sm_{chip.capability}")
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chip]:
    """A chip whose tables are used from now on, by calls that repeat no recorded ones."""
    chip: Chip = request.param
    if chip.shared_memory > chip_of(torch.device("cuda")).shared_memory:
        pytest.skip("its programs do not fit here")
    kind = compile_ahead.kind

    def kind_on_chip(self: compile_ahead, device: torch.device, args: tuple[Any, ...]) -> Any:
        return *kind(self, device, args), chip

    monkeypatch.setattr(compile_ahead, "kind", kind_on_chip)
    monkeypatch.setattr(Replay, "__call__", lambda self, *args: self.implementation(*args))
    with tables_of(chip):
        yield chip


@pytest.mark.parametrize(("dtype", "K", "V"), SIZES, ids=str)
@every([NAMED[name] for name in NAMES])
def test_tables_are_right(case: OpCase, dtype: torch.dtype, K: int, V: int, chip: Chip) -> None:
    """Of the two chunks of tokens that are whole, gates make some factorisable and some not."""
    problem = draw(case, torch.device("cuda"), dtype, B=1, T=200, H=2, K=K, V=V, gates="rare")
    problem = problem.with_tensors(
        **{
            name: torch.where(
                torch.arange(200, device="cuda").view(-1, *[1] * (x.dim() - 2)) < 64, x.clamp(min=-0.1), x
            )
            for name, x in problem.tensors.items()
            if name in case.gates and x.dim() > 2
        }
    )
    assert_accurate(problem, evaluate(problem))


@pytest.mark.parametrize(("groups", "K"), [(16, 128), (32, 64), (32, 128), (32, 256)])
def test_many_heads_that_share_keys_are_right(groups: int, K: int, chip: Chip) -> None:
    """As in Mamba-2, where one program adds them all up, in chunks that have one block or two."""
    case = replace(NAMED["chunk_simple_gla-g-beta"], groups=groups)
    problem = draw(case, torch.device("cuda"), BFLOAT16, B=1, T=200, H=1, K=K, V=64, gates="rare")
    assert_accurate(problem, evaluate(problem))
