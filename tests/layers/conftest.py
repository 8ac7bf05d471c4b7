from __future__ import annotations

import pytest

from flacompose.ops._composed import logsumexp


@pytest.fixture
def few_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a running logsumexp take at most 256 tokens, which makes them less than half as long to compile.

    Layers with and without this fixture run the same lines: that a graph of all 20 levels takes 2 ** 20 tokens is
    tested by `test_export` and in tests/ops/_composed/test_abc.py.
    """
    monkeypatch.setattr(logsumexp, "LEVELS", 8)
