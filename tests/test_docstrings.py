"""The examples in docstrings of functions that no user sees."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from flacompose.ops._recurrences.matrix import cache_block
from flacompose.ops._tensors import grouped_queries


@pytest.mark.parametrize("module", [grouped_queries, cache_block], ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
