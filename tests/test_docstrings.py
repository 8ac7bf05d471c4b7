"""The examples in docstrings of functions that no user sees."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from flacompose.ops import _groups
from flacompose.ops.families.vector_decay import eager


@pytest.mark.parametrize("module", [_groups, eager], ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
