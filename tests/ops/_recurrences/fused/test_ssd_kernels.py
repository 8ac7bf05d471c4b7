"""The kernels of Mamba-2's scan by themselves."""

from __future__ import annotations

import pytest
import torch
from helpers.unregistered import launch_of

from flacompose.ops import ssd
from flacompose.ops._launch import sequences
from flacompose.ops._recurrences.fused.ssd import cuda
from flacompose.ops._recurrences.fused.ssd.inputs import SIGNATURE
from flacompose.ops._recurrences.matrix.head_decay import plan
from ops._recurrences.fused.test_ssd import assert_extremes_right, assert_right

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = launch_of(cuda, "forward", len(SIGNATURE.differentiable))
    monkeypatch.setattr(ssd, "ssd", lambda inputs: forward(*inputs))


@pytest.mark.parametrize(
    ("given", "packed", "segments"),
    [
        ("plain", False, 1),
        ("limits", True, 1),
        ("D", True, 1),
        ("z", False, 1),
        ("all", False, 1),
        ("all", True, 3),
    ],
)
def test_values_and_gradients(
    given: str, packed: bool, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two heads that share keys, in one segment of a row and in several; packed, with two blocks in a chunk."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    monkeypatch.setattr(
        plan, "chunk_size", lambda _, step, gates, *__: (128 if packed else 64) if gates else step
    )
    assert_right(given, packed, torch.device("cpu"), B=1, H=1)


def test_extremes() -> None:
    assert_extremes_right(torch.device("cpu"))
