"""Kernels are compiled before their launches, and those of the backward with the forward's; also without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402

from flacompose.ops.families import _compile  # noqa: E402
from flacompose.ops.families.scalar_decay import cuda as scalar_decay  # noqa: E402
from flacompose.ops.families.scalar_decay.op import PER_TOKEN  # noqa: E402
from flacompose.ops.families.scan import cuda as scan  # noqa: E402
from flacompose.ops.families.vector_decay import cuda as vector_decay  # noqa: E402

FAMILIES = pytest.mark.parametrize(
    "family", [scalar_decay, scan, vector_decay], ids=["scalar", "scan", "vector"]
)


class Hopper(CudaDriver):
    """Compiles for a GPU that is not there."""

    def __init__(self) -> None:
        pass

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls an implementation; without a GPU, does what comes before its launches."""
    if torch.cuda.is_available():
        return lambda implementation, *args: implementation(*args)

    def prepare(implementation: _compile.compile_together, *args: Any) -> Any:
        kind = _compile._kind(args[0].device, args)
        if kind not in implementation.ready:
            implementation.prepare(kind, args)
        return implementation.implementation(*(_compile._meta(x) for x in args))

    def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        if _compile.launching.how is not None:
            _compile.launching.how(kernel, grid, *args, **kwargs)

    for module in (scalar_decay, scan, vector_decay):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(triton.compiler.CompiledKernel, "run", None)
    monkeypatch.setattr(driver, "_active", Hopper())
    return prepare


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Every kernel that is compiled from now on, what other tests have compiled too, and whether before its launch."""
    _compile._compiler.cache_clear()
    for family in (scalar_decay, scan, vector_decay):
        for implementation in (family.chunk, family.backward):
            implementation.ready.clear()
        for kernel in vars(family).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()
    kernels = []

    def note(fn: Any, is_manual_warmup: bool, **_: Any) -> None:
        kernels.append((fn.name, is_manual_warmup))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    return kernels


def arguments(family: ModuleType, requires_grad: bool) -> tuple[Any, ...]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, gk = torch.zeros(4, 1, 70, 2, 24, dtype=torch.float16, device=device).requires_grad_(
        requires_grad
    )
    if family is scan:
        return q[:, :, 0], gk[:, :, 0], None, None
    if family is scalar_decay:
        return q, k, v, gk[..., 0], None, None, 1.0, PER_TOKEN
    return q, k, v, gk, None, None, None, None, 1.0, False, False


@FAMILIES
def test_the_backward_with_the_forward(family, call, compiled) -> None:
    args = arguments(family, requires_grad=True)
    o, _ = call(family.chunk, *args)
    forward = len(compiled)
    call(family.backward, *args, torch.zeros_like(o, device=args[0].device), None)
    assert forward == len(compiled) > 1
    assert all(before for _, before in compiled)
    # Another kind, of which the kernels are the same or are compiled before their launches too.
    call(family.backward, *args, None, None)
    assert all(before for _, before in compiled)


@FAMILIES
def test_only_the_forward_without_gradients(family, call, compiled) -> None:
    args = arguments(family, requires_grad=False)
    o, _ = call(family.chunk, *args)
    forward = len(compiled)
    call(family.backward, *args, torch.zeros_like(o, device=args[0].device), None)
    assert 0 < forward < len(compiled)
    assert all(before for _, before in compiled)


def test_one_thread_loads() -> None:
    """Python keeps one module for all of Triton 3.6's launchers: of two threads, one might take the other's."""
    loaded_in = []

    class Compiled:
        @property
        def run(self) -> None:
            loaded_in.append(get_ident())

    with ThreadPoolExecutor() as pool:
        futures = [triton.FutureKernel(lambda _: None, pool.submit(Compiled)) for _ in range(9)]
        _compile._load([Compiled(), *futures, futures[0]])
    assert loaded_in == [get_ident()] * 10
