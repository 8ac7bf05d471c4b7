"""Thin calls: the PyTorch calls and launches of an implementation, recorded once and then repeated without it.

An implementation on CUDA reads no values, so arguments of the same shapes, strides and dtypes always lead to the same
allocations, operations and launches. Most of a short call is the Python that decides on them, and Triton's search for
the compiled kernel. Both are done once for each kind of arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from flacompose.ops._define import TorchDispatchMode, launching, launching_by, tree_leaves

MAX_KINDS = 256  # of arguments, for each implementation; the oldest goes first
ALIGNMENT = 16  # bytes; Triton compiles other kernels for pointers that are not multiples of it

# What allocates and writes nothing. One call stands for all of them when they are repeated.
_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)

_VIEWS = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default

Implementation = Callable[..., tuple[Tensor, ...]]
Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Any]
"""What is called, positional arguments, keyword arguments, and the result; of a launch, None."""


class Replay:
    """An implementation, called in full for the first two calls of a kind; the second is recorded.

    Not for the first, since many lengths are seen only once, and recording takes milliseconds.
    """

    def __init__(self, implementation: Any) -> None:
        self.implementation = implementation
        self.recorded: dict[Any, Implementation | None] = {}
        self.lock = Lock()

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        if launching.how is not None:
            return self.implementation(*args)
        kind = (
            args[0].get_device(),
            *[
                (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)
                if isinstance(x, Tensor)
                else (tuple(x) if isinstance(x, list) else x)
                for x in args
            ],
        )
        repeat = self.recorded.get(kind)
        if repeat is not None:
            return repeat(*args)
        with self.lock:
            seen = kind in self.recorded
            if not seen:
                if len(self.recorded) >= MAX_KINDS:
                    del self.recorded[next(iter(self.recorded))]
                self.recorded[kind] = None
        return self.record(kind, args) if seen else self.implementation(*args)

    def record(self, kind: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        # Tensors are told apart by identity, so one that is given twice gets a second one.
        tensors: dict[int, Any] = {}
        args = tuple(
            x.detach() if isinstance(x, Tensor) and id(x) in tensors else tensors.setdefault(id(x), x)
            for x in args
        )
        try:
            with _Recorder() as recorder, launching_by(recorder.launch):
                results = self.implementation(*args)
        except torch.OutOfMemoryError:  # recording holds all temporary memory to its end
            self.recorded[kind] = self.implementation
            return self.implementation(*args)
        self.recorded[kind] = recorder.repetition(args, results)
        return results


class _Recorder(TorchDispatchMode):
    """Notes every operation and every launch, and does them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            options = {"dtype": result.dtype, "device": result.device}
            self.calls.append((torch.empty_strided, (result.shape, result.stride()), options, result))
        else:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def launch(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        compiled = kernel[grid](*args, **kwargs)
        values = dict(zip(kernel.arg_names, args)) | kwargs
        self.calls.append((compiled, [grid, *(values[name] for name in kernel.arg_names)], {}, None))

    def repetition(self, args: Sequence[Any], results: tuple[Tensor, ...]) -> Implementation:
        """The calls as a function of the same arguments: straight Python, written out and compiled.

        Every tensor is a local variable, given up after its last use, so that memory is free as early as before.
        """
        names: dict[int, str] = {}  # of tensors, by identity; all of them are alive in `calls`
        constants: dict[str, Any] = {"current_stream": driver.active.get_current_stream}
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                names[id(x)] = f"a{i}"

        def constant(value: Any) -> str:
            name = f"c{len(constants)}"
            constants[name] = value
            return name

        def expression(value: Any) -> str:
            if isinstance(value, Tensor):
                return names[id(value)]
            if any(isinstance(x, Tensor) for x in tree_leaves(value)):
                return f"[{', '.join(expression(x) for x in value)}]"
            return constant(value)

        lines: list[str] = []
        views = _shapes_of_views(self.calls)
        for call, positional, keywords, result in self.calls:
            if result is None:
                lines.append(_launch_line(call, positional[0], positional[1:], constant, expression))
                continue
            if call in _VIEWS and id(result) in names:
                continue
            if call is torch.empty_strided and id(result) in views:
                # Kernels take pointers, so the memory may have from the start the shape in which it is used.
                view = views[id(result)]
                names[id(result)] = names[id(view)] = f"t{len(names)}"
                positional = view.shape, view.stride()
                lines.append(
                    f"{names[id(view)]} = {constant(call)}({', '.join(map(constant, positional))}, "
                    f"dtype={constant(view.dtype)}, device={constant(view.device)})"
                )
                continue
            inputs = [expression(x) for x in positional]
            inputs += [f"{name}={expression(x)}" for name, x in keywords.items()]
            written = f"{constant(call)}({', '.join(inputs)})"
            new = [x for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in names]
            for x in new:
                names[id(x)] = f"t{len(names)}"
            if new:  # and not the argument of an operation in place
                comma = "," if isinstance(result, (tuple, list)) else ""
                written = f"{', '.join(names[id(x)] for x in new)}{comma} = {written}"
            lines.append(written)
        returned = f"return {', '.join(names[id(x)] for x in results)},"

        last = _last_uses([*lines, returned], names.values())
        body = []
        for i, line in enumerate(lines):
            body.append(line)
            body += [f"del {name}" for name, at in last.items() if at == i]
        body.append(returned)
        parameters = ", ".join(f"a{i}" for i in range(len(args)))
        stream = f"stream = current_stream({args[0].get_device()})"
        source = "\n    ".join([f"def repeat({parameters}):", stream, *body])
        exec(source, constants)
        return constants["repeat"]


def _launch_line(
    compiled: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    constant: Callable[[Any], str],
    expression: Callable[[Any], str],
) -> str:
    """One launch as `CompiledKernel.__getitem__` makes it, but for Triton's own hooks, which take half of its time."""
    grid = (*grid, 1, 1)[:3]
    inputs = [*map(constant, grid), "stream", constant(compiled.function), constant(compiled.packed_metadata)]
    inputs += ["None"] * 3 + [expression(x) for x in arguments]
    return f"{constant(compiled.run)}({', '.join(inputs)})"


def _shapes_of_views(calls: Sequence[Call]) -> dict[int, Tensor]:
    """By the identity of memory that only kernels fill, the one view of it that is taken."""
    allocated = {id(result) for call, _, _, result in calls if call is torch.empty_strided}
    uses = Counter(
        id(x)
        for _, positional, keywords, result in calls
        if result is not None
        for x in tree_leaves((positional, keywords))
        if isinstance(x, Tensor)
    )
    return {
        id(x): view
        for call, (x, *_), _, view in calls
        if call in _VIEWS and id(x) in allocated and uses[id(x)] == 1
    }


def _last_uses(lines: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """The index of the last line with each of these names, but for those of arguments, which the caller holds."""
    local = {name for name in names if name.startswith("t")}
    return {name: i for i, line in enumerate(lines) for name in re.findall(r"\w+", line) if name in local}
