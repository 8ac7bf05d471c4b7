from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("contract.accuracy", "contract.problems", "contract.graphs")

# cuBLAS asks for it under `torch.use_deterministic_algorithms`, before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Otherwise each process that compiles for a CPU, those that tests start too, first compiles and loads a program for
# each of its sets of vector instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


# Triton reads the variable when it is imported, so tests of kernels in its interpreter have a run of their own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from helpers.interpreter import fast_interpreter  # noqa: F401


def is_interpreted(file: Path) -> bool:
    return file.name.startswith("test_") and file.name.endswith("_kernels.py")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Either the tests of kernels in the interpreter are run, or all others."""
    return True if collection_path.is_file() and is_interpreted(collection_path) != INTERPRETED else None


def pytest_collect_file(file_path: Path) -> None:
    if is_interpreted(file_path) and not INTERPRETED:
        raise pytest.UsageError(
            f"TRITON_INTERPRET=1 must be set before Triton is imported, to run {file_path.name}"
        )


def pytest_collection_finish() -> None:
    """The garbage collector need not walk what is loaded by now, and need not walk graphs in the making often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


_LOAD_A_PACKAGE = """
import sys, torch
x = torch.ones(4, 4, device="cuda")
program = torch.export.export(torch.nn.Linear(4, 4, device="cuda"), (x,))
torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1]))(x)
"""


@pytest.fixture(scope="session")
def aoti_packages_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Some CUDA builds of PyTorch 2.11 crash while they load any package of AOTInductor, of one nn.Linear too."""
    if torch.cuda.is_available():
        path = tmp_path_factory.mktemp("aoti") / "linear.pt2"
        if (
            subprocess.run([sys.executable, "-c", _LOAD_A_PACKAGE, str(path)], capture_output=True).returncode
            < 0
        ):
            pytest.skip(
                f"PyTorch {torch.__version__} crashes here on loading an AOTInductor package of an nn.Linear"
            )


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
