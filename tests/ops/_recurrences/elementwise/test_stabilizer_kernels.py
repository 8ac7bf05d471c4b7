"""The kernel of the running maximum, in tiles of a few tokens and channels."""

from __future__ import annotations

import pytest
import torch
from helpers.operators import flat

from flacompose.ops._recurrences.elementwise.stabilizer import cuda
from ops._recurrences.elementwise.test_stabilizer import assert_right, draw


@pytest.mark.parametrize(
    ("T", "bounds", "state"),
    [(1, None, True), (8, None, False), (21, None, True), (21, (0, 0, 3, 13, 13, 17), True)],
    ids=str,
)
def test_values(T: int, bounds: tuple[int, ...] | None, state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles and parts of them, a number of channels that no tile divides, sequences without tokens."""
    monkeypatch.setattr(cuda, "HEADS_CONFIG", (8, 2, 1))
    inputs = draw(T, bounds, state, torch.float32)
    assert_right(inputs, flat(cuda, "forward")(*inputs))
    nan = inputs._replace(x=inputs.x.clone())
    nan.x[0, 0, 0] = torch.nan
    _, m, _ = flat(cuda, "forward")(*nan)
    first = 1 if bounds is None else 0  # token 0 is one of the third sequence, whose tokens 0 to 2 are
    assert m[0, first : (T if bounds is None else 3), 0].isnan().all() and not m[:, :, 1:].isnan().any()
