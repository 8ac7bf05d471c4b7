"""How kernels are launched: by Triton, into the graph of a trace, or by whoever wants to know of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch


class _Launching(local):
    """What launches kernels for this thread, called with the kernel, its grid and its arguments; None is Triton."""

    launcher: Callable[..., None] | None = None


launching = _Launching()


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a Triton kernel: ``kernel[grid](*args, **kwargs)``, recorded in the graph when the caller is traced.

    ``wrap_triton`` costs about fifteen times a plain launch, so eager calls do without it.
    """
    if launching.launcher is None:
        kernel[grid](*args, **kwargs)
    else:
        launching.launcher(kernel, grid, *args, **kwargs)


def launches_into_graph() -> bool:
    """Whether the kernels that this thread launches become parts of a graph."""
    return launching.launcher is record


def record(kernel: Any, grid: Any, *args: Any, maxnreg: int | None = None, **kwargs: Any) -> None:
    """Launch a kernel into the graph that is being traced."""
    # Inductor refuses `maxnreg`, the limit of registers, which changes how fast a kernel is and no result.
    torch.library.wrap_triton(kernel)[grid](*args, **kwargs)


@contextmanager
def launching_by(launcher: Callable[..., None]) -> Iterator[None]:
    """Within it, each call of `launch` in this thread calls `launcher` instead of Triton."""
    previous, launching.launcher = launching.launcher, launcher
    try:
        yield
    finally:
        launching.launcher = previous
