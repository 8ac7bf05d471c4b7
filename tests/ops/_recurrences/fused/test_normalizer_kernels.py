"""The kernels of the normaliser by themselves."""

from __future__ import annotations

import pytest
import torch
from helpers.unregistered import launch_of

from flacompose.ops._recurrences.fused.normalizer import cuda, op
from ops._recurrences.fused.test_normalizer import assert_right

# In the branch of `decayed` that a gate of -inf does not take.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def test_values_and_gradients() -> None:
    differentiable = op.Inputs._fields.index("cu_seqlens")
    for form in ("chunk", "recurrent"):
        assert_right(launch_of(cuda, form, differentiable), torch.float32, 1e-5)
