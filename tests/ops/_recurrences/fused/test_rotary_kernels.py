"""The kernels of the rotation by themselves, in chunks of a few tokens."""

from __future__ import annotations

import pytest
import torch
from helpers.unregistered import launch_of

from flacompose.ops._recurrences.fused.rotary import cuda, op
from ops._recurrences.fused.test_rotary import assert_right

# In tokens that are in no sequence, and whose results are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.parametrize(("R", "halves"), [(1, False), (2, True)])
def test_values_and_gradients(R: int, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "TILE", 512)  # so that a chunk has 32 tokens
    differentiable = op.Inputs._fields.index("cu_seqlens")
    assert_right(launch_of(cuda, "forward", differentiable), torch.float32, 1e-5, R, halves)
