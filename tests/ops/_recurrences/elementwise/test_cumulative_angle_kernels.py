"""The kernels of the turns by themselves, in tiles of a few tokens and angles."""

from __future__ import annotations

import pytest
import torch
from helpers.unregistered import launch_of

from flacompose.ops._recurrences.elementwise.cumulative_angle import cuda, op
from ops._recurrences.elementwise.test_cumulative_angle import assert_right

# In the branch of an exponential that is not taken, and in tokens that are in no sequence.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@pytest.mark.parametrize("H", [1, 4])
def test_values_and_gradients(H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CONFIG", {"C": 16, "BA": 2, "num_warps": 1})
    differentiable = op.Inputs._fields.index("cu_seqlens")
    assert_right(launch_of(cuda, "forward", differentiable), torch.float32, 2e-6, H)
