"""The backend of a compiled layer is called once: no number of ours becomes symbolic, for which Dynamo starts again."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from .truth import EVERY, build, tokens_of


@pytest.mark.parametrize("name", ["retention", "mamba2", "abc"])
def test_backend_is_called_once(name: str, few_levels: None) -> None:
    layer = build(EVERY[name])
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)(tokens_of(layer, 2, 9))
    assert counter.frame_count == 1
