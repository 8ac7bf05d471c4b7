"""Compilation of kernels before their launches: all of a call at once, and those of its backward meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import Context
from functools import cache, update_wrapper
from itertools import chain
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from triton import AsyncCompileMode, FutureKernel

from flacompose.ops._define import launching, launching_by


class compile_together:
    """Have all kernels that `implementation` launches compiled at once, in threads, at its first call of a kind.

    Triton would compile each at its launch, one after the other. To learn which they are, the implementation runs on
    meta tensors and launches none. A kind is a device, dtypes, head sizes and what is absent; a length may still need
    another kernel.

    Where an argument requires a gradient, those of the `backward` are compiled too, as for a gradient of `o` alone,
    and waited for when it is called.
    """

    backward: compile_together | None = None

    def __init__(self, implementation: Callable[..., Any]) -> None:
        update_wrapper(self, implementation)
        self.implementation = implementation
        self.started: dict[Any, list[Any]] = {}
        self.ready: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        if args[0].is_cuda and launching.how is None:
            kind = _kind(args[0].device, args)
            if kind not in self.ready:
                with _lock:
                    if kind not in self.ready:
                        self.prepare(kind, args)
        return self.implementation(*args)

    def prepare(self, kind: Any, args: tuple[Any, ...]) -> None:
        device, on_meta = args[0].device, tuple(map(_meta, args))
        if kind not in self.started:
            o, *_ = self.start(kind, on_meta)
            if self.backward is not None and any(isinstance(x, Tensor) and x.requires_grad for x in args):
                of_o = *on_meta, o, None
                self.backward.start(_kind(device, of_o), of_o)
        _load(self.started.pop(kind))
        self.ready.add(kind)

    def start(self, kind: Any, args: tuple[Any, ...]) -> Any:
        """Compile what a call on `args` launches, without waiting for it; what that returns."""
        kernels = []

        def compile_only(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
            compiled = kernel.warmup(*args, grid=grid, **kwargs)
            if compiled is not None:
                kernels.append(compiled)

        def run() -> Any:
            _compiler().__enter__()  # and never left, which would wait: this context is left instead
            with launching_by(compile_only):
                return self.implementation(*args)

        outputs = Context().run(run)
        self.started[kind] = kernels
        return outputs


_lock = Lock()


@cache
def _compiler() -> AsyncCompileMode:
    return AsyncCompileMode(ThreadPoolExecutor())


def _kind(device: torch.device, args: tuple[Any, ...]) -> Any:
    return device, *map(_kind_of, args)


def _kind_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.shape[-1] if x.dim() > 1 else 0
    return x if isinstance(x, int) else x is None


def _meta(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _load(kernels: list[Any]) -> None:
    """One at a time, as they come: Triton 3.6 may take one launcher for another when two threads load them."""
    futures = {kernel.future: kernel for kernel in kernels if isinstance(kernel, FutureKernel)}
    here = (kernel for kernel in kernels if not isinstance(kernel, FutureKernel))
    for compiled in chain(here, (futures[done].result() for done in as_completed(futures))):
        _ = compiled.run
