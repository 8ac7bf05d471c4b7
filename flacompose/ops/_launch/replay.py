"""Replay of calls: the PyTorch operations and launches of an implementation, recorded once and then repeated.

An implementation on CUDA reads no values, so arguments of the same shapes, strides, dtypes and alignment
always lead to the same allocations, operations and launches. Most of the time of a short call is the Python
code that decides on them, and Triton's search for the compiled kernel. Both are done once for each kind of
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton import knobs
from triton.runtime import driver

from flacompose._torch import TorchDispatchMode, pytree
from flacompose.ops._launch.launch import launching, launching_by

MAX_KINDS = 256  # kinds of arguments per implementation; the oldest is dropped first
ALIGNMENT = 16  # bytes; Triton compiles other kernels for pointers that are not multiples of it

# Operations that allocate memory and write nothing to it. A repeated call uses `empty_strided` in their
# place.
_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)

Implementation = Callable[..., tuple[Tensor, ...]]


class Replay:
    """An implementation that runs in full for the first two calls of a kind; the second call is recorded.

    The first call is not recorded, since many lengths are seen only once, and recording takes milliseconds.
    """

    def __init__(self, implementation: Any) -> None:
        self.implementation = implementation
        self.seen: dict[Any, None] = {}  # the kinds of past calls, oldest first
        self.recorded: dict[Any, Implementation] = {}
        self.lock = Lock()

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        if launching.launcher is not None:
            return self.implementation(*args)
        # Only Triton's own launches call a profiler's hooks.
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
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
            first = kind not in self.seen
            self.seen[kind] = None
            while len(self.seen) > MAX_KINDS:
                oldest = next(iter(self.seen))
                del self.seen[oldest]
                self.recorded.pop(oldest, None)
        return self.implementation(*args) if first else self.record(kind, args)

    def record(self, kind: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        # Tensors are distinguished by identity, so one that is given twice gets an alias.
        tensors: dict[int, Any] = {}
        args = tuple(
            x.detach() if isinstance(x, Tensor) and id(x) in tensors else tensors.setdefault(id(x), x)
            for x in args
        )
        with _Recorder(args) as recorder, launching_by(recorder.launch):
            results = self.implementation(*args)
        repeat = recorder.function(results)
        with self.lock:
            if kind in self.seen:
                self.recorded[kind] = repeat
        return results


class _Recorder(TorchDispatchMode):
    """Executes every operation and every launch, and records each as a line of Python.

    It keeps no tensor alive, so that recording takes no more memory than the calls before it.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.parameters = [f"a{i}" for i in range(len(args))]
        self.names = WeakTensorKeyDictionary(
            {x: name for x, name in zip(args, self.parameters) if isinstance(x, Tensor)}
        )
        self.locals = 0
        self.constants: dict[str, Any] = {"current_stream": driver.active.get_current_stream}
        self.lines = [f"stream = current_stream({args[0].get_device()})"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x not in self.names]
        if not new and not func._schema.is_mutable:  # a conversion that had nothing to convert
            return result
        if func in _ALLOCATIONS:
            func, args = torch.empty_strided, (result.shape, result.stride())
            kwargs = {"dtype": result.dtype, "device": result.device}
        line = self.call(func, *args, **(kwargs or {}))
        for x in new:
            self.names[x] = f"t{self.locals}"
            self.locals += 1
        if new:
            comma = "," if isinstance(result, (tuple, list)) else ""
            line = f"{', '.join(self.names[x] for x in new)}{comma} = {line}"
        self.lines.append(line)
        return result

    def launch(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Launches like `CompiledKernel.__getitem__`, but without hooks, which take half of its time."""
        compiled = kernel[grid](*args, **kwargs)
        values = dict(zip(kernel.arg_names, args)) | kwargs
        inputs = [self.expression(x) for x in (*grid, 1, 1)[:3]]
        inputs += ["stream", self.expression(compiled.function), self.expression(compiled.packed_metadata)]
        inputs += ["None"] * 3 + [self.expression(values[name]) for name in kernel.arg_names]
        self.lines.append(f"{self.expression(compiled.run)}({', '.join(inputs)})")

    def call(self, function: Any, *args: Any, **kwargs: Any) -> str:
        inputs = [self.expression(x) for x in args]
        inputs += [f"{name}={self.expression(x)}" for name, x in kwargs.items()]
        return f"{self.expression(function)}({', '.join(inputs)})"

    def expression(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self.names[value]
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves(value)):
            inputs = "".join(f"{self.expression(x)}, " for x in value)
            return f"({inputs})" if isinstance(value, tuple) else f"[{inputs}]"
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def function(self, results: tuple[Tensor, ...]) -> Implementation:
        """The recorded calls as a function of the same arguments: straight Python code, compiled.

        Every tensor is a local variable, deleted after its last use, so that memory is freed as early as in a
        full call.
        """
        lines = [*self.lines, f"return {', '.join(self.names[x] for x in results)},"]
        last_use = {name: i for i, line in enumerate(lines) for name in re.findall(r"\bt\d+\b", line)}
        body = []
        for i, line in enumerate(lines):
            body.append(line)
            body += [f"del {name}" for name, last in last_use.items() if last == i < len(lines) - 1]
        exec("\n    ".join([f"def repeat({', '.join(self.parameters)}):", *body]), self.constants)
        # Its globals must not hold the function itself, which would be a reference cycle.
        return self.constants.pop("repeat")
