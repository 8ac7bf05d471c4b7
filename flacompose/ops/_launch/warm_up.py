"""Compilation ahead of launches: all kernels of an op and of its backward at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from contextvars import Context
from functools import partial
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, FutureKernel

from flacompose._torch import unset_fake_temporarily
from flacompose.ops._launch.build import build_launcher
from flacompose.ops._launch.launch import launching, launching_by

ATTEMPTS = 5  # to compile a kernel
THREADS = (
    8  # All wait for Python's lock: 16 were no faster on the host of an H200, and their times differed more.
)

# One lock for all ops, because threads must not load kernels at the same time.
_lock = RLock()


class compile_ahead:
    """Compile all kernels of `implementation` together, in threads, at its first call of a kind.

    Triton would compile each kernel at its launch, one after the other. To collect the kernels, the
    implementation runs on meta tensors and launches none. Calls are of one kind if their devices, dtypes,
    head sizes and absent arguments are the same, and their other sizes lie between the same powers of two;
    another length or alignment may still need another kernel.

    If an argument requires a gradient, the compilation of the kernels of `backward`, for a gradient of `o`
    alone, starts too; its first call waits for it, or the end of the process. While a graph with the op is
    traced, `begin` starts the compilation of its kernels, which ends before that of the graph. Calls that
    `Replay` repeats do not come here: after two calls without gradients, the backward's kernels are compiled
    at its own first call.
    """

    def __init__(
        self, implementation: Callable[..., Any], differentiable: int, backward: compile_ahead | None = None
    ) -> None:
        self.implementation = implementation
        self.differentiable = differentiable  # the number of first arguments that have gradients
        self.backward = backward
        self.started: dict[Any, list[Any]] = {}
        self.ready: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        if args[0].is_cuda and launching.launcher is None:
            kind = self.kind(args[0].device, args)
            if kind not in self.ready:
                with _lock:
                    if kind not in self.ready:
                        self.prepare(kind, args)
        return self.implementation(*args)

    def kind(self, device: torch.device, args: tuple[Any, ...]) -> Any:
        differentiated = self.backward is not None and any(
            isinstance(x, Tensor) and x.requires_grad for x in args
        )
        return differentiated, device, *map(_kind, args)

    def prepare(self, kind: Any, args: tuple[Any, ...]) -> None:
        kernels = self.started.pop(kind, None) or self.started.pop((False, *kind[1:]), None)
        if kernels is None:
            differentiated, device, *_ = kind
            mask = [x is not None and x.requires_grad for x in args[: self.differentiable]]
            args = tuple(map(_meta, args))
            with _compiling_in_threads() as mode:
                kernels, (o, *others) = self.start(mode, args)
                if differentiated and self.backward is not None:
                    args = *args, o, *[None for _ in others], mask
                    kind_of_backward = self.backward.kind(device, args)
                    if kind_of_backward not in self.backward.ready:
                        self.backward.started[kind_of_backward], _ = self.backward.start(mode, args)
        _load(kernels)
        self.ready.add(kind)

    def begin(self, args: tuple[Any, ...]) -> None:
        """Start to compile the kernels of a call with fake tensors, `args`, while its graph is compiled.

        Symbols are replaced by the numbers of the trace. It raises a ValueError if only the data know a size.
        """
        device = args[0].device
        with _lock, unset_fake_temporarily():  # so that new tensors are real
            args = tuple(map(_meta, args))
            kind = False, device, *map(_kind, args)
            if kind not in self.ready and kind not in self.started:
                with _compiling_in_threads() as mode:
                    self.started[kind], _ = self.start(mode, args)

    def start(self, mode: AsyncCompileMode, args: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """Start to compile the kernels of a call with `args`; return them and the results of the call."""
        kernels = []

        def compile_only(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
            compiled = _persistent(partial(kernel.warmup, *args, grid=grid, **kwargs))
            if compiled is not None:
                kernels.append(compiled)

        def run() -> Any:
            mode.__enter__()  # and never left, which would wait: this context is left instead
            with launching_by(compile_only), _SumsOfMetaTensors():
                return self.implementation(*args)

        return kernels, Context().run(run)


class _SumsOfMetaTensors(TorchFunctionMode):
    """A mode in which a sum of a meta tensor over axes, or to a size, is a new tensor of its shape.

    PyTorch's own sum imports SymPy, as do most of its operations on meta tensors, and the first call would
    wait a second or two for that. For rows that are not packed, few ops compute more than sums around their
    kernels.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_sum = func in (Tensor.sum, Tensor.sum_to_size) and len(args) == 2 and not kwargs
        # A sum of integers has another dtype than its operand.
        if is_sum and args[0].is_meta and args[0].is_floating_point():
            x, to = args
            if func is Tensor.sum_to_size:
                return x.new_empty(to)
            if isinstance(to, int) or to:
                axes = {range(x.dim())[axis] for axis in ((to,) if isinstance(to, int) else to)}
                return x.new_empty([size for axis, size in enumerate(x.shape) if axis not in axes])
        return func(*args, **(kwargs or {}))


class _Pool(ThreadPoolExecutor):
    def submit(self, compile_kernel: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    kernel = _persistent(compile_kernel)
    with suppress(Exception):  # Triton raises the error again when it loads the kernel
        build_launcher(kernel)
    return kernel


def _persistent(compile_kernel: Callable[[], Any]) -> Any:
    """`compile_kernel()`, repeated if Python has failed to parse.

    Before 3.11.8 and 3.12.2, Python counts the depth of parsing for all threads together (CPython's issue
    106905). So a thread can fail with a SystemError while another parses, and succeed at the next attempt. If
    the kernel calls the function that failed, Triton reports the error as the cause of its own.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return compile_kernel()
        except Exception as error:
            if not _failed_to_parse(error):
                raise
    return compile_kernel()


def _failed_to_parse(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, SystemError):
        error = error.__cause__
    return error is not None


@contextmanager
def _compiling_in_threads() -> Iterator[AsyncCompileMode]:
    """A mode that compiles kernels in threads, which continue after it is left and end with their work."""
    pool = _Pool(min(os.cpu_count() or 1, THREADS))
    try:
        yield AsyncCompileMode(pool)
    finally:
        pool.shutdown(wait=False)


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.shape[-1] if x.dim() > 1 else 0, *map(int.bit_length, x.shape)
    if isinstance(x, list):
        return tuple(x)
    return x if isinstance(x, int) else x is None


def _meta(x: Any) -> Any:
    """`x` without memory and without symbols."""
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        hint = x.node.hint
        if hint is None:
            raise ValueError("only the data know this size")
        return hint
    if not isinstance(x, Tensor):
        return x
    sizes, strides = (tuple(map(_meta, of_axes)) for of_axes in (x.shape, x.stride()))
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")


def _load(kernels: list[Any]) -> None:
    """Load kernels one at a time, in the order in which their compilation ends.

    When Triton 3.6 loads a launcher a second time, it writes it into the module of the launcher loaded last,
    which another thread may be about to read. Kernels that are compiled at a launch are loaded there.
    """
    # Triton 3.9 removes the future of a kernel that is compiled, or whose compilation has failed.
    unfinished, others = {}, []
    for kernel in kernels:
        future = kernel.future if isinstance(kernel, FutureKernel) else None
        if future is not None:
            unfinished[future] = kernel
        elif not isinstance(kernel, FutureKernel):
            others.append(kernel)
        elif kernel.kernel is not None:
            others.append(kernel.kernel)
    for compiled in chain(others, (unfinished[done].result() for done in as_completed(unfinished))):
        _ = compiled.run
