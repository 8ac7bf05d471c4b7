"""Launches of kernels: by Triton, into the graph of a trace, or by a function that records them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

from flacompose.ops._launch.flat import without_tuples


class _Launching(local):
    """The launcher of this thread, called with the kernel, its grid and its arguments; None for Triton."""

    launcher: Callable[..., None] | None = None
    into_graph = False


launching = _Launching()


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a Triton kernel: ``kernel[grid](*args, **kwargs)``, recorded in the graph when the caller is traced.

    ``wrap_triton`` costs about fifteen times a plain launch, so eager calls do without it.
    """
    if launching.launcher is None:
        kernel[grid](*args, **kwargs)
    elif launching.into_graph:
        kernel, kwargs = without_tuples(kernel, args, kwargs)
        launching.launcher(kernel, grid, **kwargs)
    else:
        launching.launcher(kernel, grid, *args, **kwargs)


def launches_into_graph() -> bool:
    """Whether the kernels that this thread launches become nodes of a graph."""
    return launching.into_graph


@contextmanager
def launching_by(launcher: Callable[..., None], into_graph: bool = False) -> Iterator[None]:
    """A context in which `launch` in this thread calls `launcher` instead of Triton.

    `into_graph` says that its launches become nodes of the graph of a trace.
    """
    previous = launching.launcher, launching.into_graph
    launching.launcher, launching.into_graph = launcher, into_graph
    try:
        yield
    finally:
        launching.launcher, launching.into_graph = previous
