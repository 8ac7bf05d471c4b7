"""The kernel of the gated skip by itself."""

from __future__ import annotations

import pytest
import torch
from test_gated_skip import GIVEN, assert_right
from unregistered import launch_of

from flacompose.ops._recurrences.fused.gated_skip import cuda
from flacompose.ops._recurrences.fused.gated_skip.inputs import SIGNATURE


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("given", GIVEN)
def test_values_and_gradients(given: str, packed: bool) -> None:
    forward = launch_of(cuda, "forward", len(SIGNATURE.differentiable))
    P, per_channel = {"D w z": (80, False), "D z": (64, True)}.get(given, (6, False))
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float16, 2**-11)):
        assert_right(
            lambda *args: forward(*args)[0], dtype, rtol, torch.device("cpu"), given, P, per_channel, packed
        )
