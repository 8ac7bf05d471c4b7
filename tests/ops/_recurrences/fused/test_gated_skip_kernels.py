"""The kernel of the gated skip by itself."""

from __future__ import annotations

import pytest
import torch
from helpers.unregistered import launch_of

from flacompose.ops._recurrences.fused.gated_skip import cuda
from flacompose.ops._recurrences.fused.gated_skip.inputs import SIGNATURE
from flacompose.ops._tensors.packed import bounds
from ops._recurrences.fused.test_gated_skip import GIVEN, assert_right


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("given", GIVEN)
def test_values_and_gradients(given: str, packed: bool) -> None:
    forward = launch_of(cuda, "forward", len(SIGNATURE.differentiable))
    P, per_channel = {"D w z": (80, False), "D z": (64, True)}.get(given, (6, False))
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float16, 2**-11)):
        assert_right(
            lambda *args: forward(*args)[0], dtype, rtol, torch.device("cpu"), given, P, per_channel, packed
        )


def test_wrong_bounds() -> None:
    """On a GPU nobody reads them. They mean what `bounds` makes of them."""
    forward = launch_of(cuda, "forward", len(SIGNATURE.differentiable))
    y, x = torch.randn(2, 1, 9, 1, 4)
    for wrong in ([0, 5, 3, 9], [0, 20], [2, 9]):
        cu_seqlens = torch.tensor(wrong)
        o, expected = (forward(y, x, None, None, x, cu)[0] for cu in (cu_seqlens, bounds(cu_seqlens, 9)))
        assert torch.equal(o, expected) and o[:, int(bounds(cu_seqlens, 9)[-1]) :].count_nonzero() == 0
