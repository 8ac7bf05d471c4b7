"""Which implementation a device gets, and that none is another than the fast one without a word."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from flacompose.ops._launch import chip
from flacompose.ops._operators import define
from flacompose.ops._operators.define import define_op

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that other GPUs are here")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

ONE = torch.ones(1, 1, 1)


@pytest.fixture(autouse=True)
def warn_again() -> None:
    chip.warn_of_eager.cache_clear()
    chip.runs_kernels.cache_clear()


def plus_one(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x.clone()


def kernels(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 2, x.clone()


def toy(name: str, triton: Any = kernels) -> Any:
    return define_op(
        f"test_devices_{name}",
        "(Tensor x) -> (Tensor y, Tensor z)",
        eager=plus_one,
        fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
        triton=lambda: triton,
        axes=dict.fromkeys("xyz", "B T H"),
    )


def run(op: Any, key: str) -> Tensor:
    """As on a tensor of that device, which need not be here."""
    y, _ = op.redispatch(DispatchKeySet(getattr(DispatchKey, key)), ONE)
    return y


@pytest.mark.parametrize("key", ["XPU", "MPS"])
def test_other_devices_compute_in_pytorch_and_say_so(key: str) -> None:
    op = toy(key.lower())
    with pytest.warns(UserWarning, match=f"flacompose computes its operators on .*{key} with PyTorch"):
        assert run(op, key) == 2
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        assert run(op, key) == 2


@pytest.mark.parametrize("op", ["matrix_recurrence_chunk", "matrix_recurrence_backward", "scan_steps"])
def test_every_operator_has_an_implementation_for_xpu(op: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flacompose::{op}", "XPU")


def test_rocm_computes_in_pytorch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the GPUs are "cuda" to PyTorch. No kernel is launched."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    op = toy("rocm")
    with pytest.warns(UserWarning, match="on a GPU of AMD with PyTorch"):
        assert run(op, "CUDA") == 2


def test_rocm_builds_have_no_kernels() -> None:
    """The operators themselves, imported in such a build."""
    script = """
import warnings, torch
torch.version.hip, torch.version.cuda = "7.1", None
from torch._C import DispatchKey, DispatchKeySet
from flacompose.ops._recurrences.elementwise.scan import op
x = torch.rand(1, 5, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    args = x, -x, None, None
    got = torch.ops.flacompose.scan_chunk.default.redispatch(DispatchKeySet(DispatchKey.CUDA), *args)
expected = torch.ops.flacompose.scan_chunk(*args)
assert all(map(torch.equal, got, expected))
assert ["a GPU of AMD" in str(w.message) for w in caught] == [True], caught
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_without_triton_a_gpu_computes_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(define, "find_spec", lambda name: None)
    op = toy("without_triton")
    with pytest.warns(UserWarning, match="where Triton is not installed"):
        assert run(op, "CUDA") == 2


class Properties:
    def __init__(self, name: str, shared_memory: int, major: int, minor: int) -> None:
        self.name, self.shared_memory_per_block_optin = name, shared_memory
        self.major, self.minor = major, minor


def pretend(monkeypatch: pytest.MonkeyPatch, properties: Properties) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # that of a tensor on a CPU
    monkeypatch.setattr(define, "runs_kernels", lambda index: chip.runs_kernels(0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)


@needs_triton
@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("turing", Properties("NVIDIA T4", 65536, 7, 5)),
        ("tiny", Properties("NVIDIA of tomorrow", 65536, 13, 0)),
    ],
)
def test_older_and_smaller_gpus_compute_in_pytorch_and_say_so(
    name: str, properties: Properties, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, properties)
    op = toy(name)
    with pytest.warns(UserWarning, match=f"on {properties.name}, of compute capability {properties.major}"):
        assert run(op, "CUDA") == 2


@needs_triton
def test_ampere_runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Properties("NVIDIA RTX 3090", 101376, 8, 6))
    assert run(toy("ampere"), "CUDA") == 3


@needs_triton
def test_a_kernel_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own error names neither the operator nor the GPU."""
    from triton.runtime.errors import OutOfResources

    def too_large(x: Tensor) -> tuple[Tensor, Tensor]:
        raise OutOfResources(258592, 232448, "shared memory")

    pretend(monkeypatch, Properties("NVIDIA of tomorrow", 232448, 13, 0))
    message = (
        r"a kernel of flacompose.test_devices_too_large.default for torch.float32 does not fit on the NVIDIA of "
        r"tomorrow, of compute capability 13.0 .* wants 258592 of 232448 \(shared memory\)"
    )
    with pytest.raises(RuntimeError, match=message) as raised:
        run(toy("too_large", too_large), "CUDA")
    assert raised.value.__suppress_context__
