from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("contract.accuracy", "contract.problems", "contract.graphs")

# cuBLAS asks for it under `torch.use_deterministic_algorithms`, before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure(config: pytest.Config) -> None:
    # torch.export on dynamic shapes inside a dictionary
    config.addinivalue_line("filterwarnings", "ignore:.*treespec, LeafSpec:FutureWarning")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees the graphs, guards or counters of another."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
