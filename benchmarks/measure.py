"""Measurements of a function ``fn`` without arguments."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor


def step(fn: Callable[..., tuple], inputs: Mapping[str, Tensor], do: Tensor) -> Callable[[], tuple]:
    """A training step: the forward and the gradients of all inputs, without ``.grad``."""
    wanted = list(inputs.values())
    # For one token without a state, some inputs have no gradient.
    return lambda: torch.autograd.grad(fn(**inputs)[0], wanted, do, allow_unused=True)


def host_s(fn: Callable[[], object]) -> float:
    """Seconds until one call returns."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def gpu_ms(fns: Sequence[Callable[[], object]], rounds: int = 3, runs: int = 30) -> list[float]:
    """Median GPU milliseconds of each function.

    The functions take turns, so that a drifting clock rate affects all of them. Before each run the GPU clears its L2
    cache, which takes so long that the host has launched the complete call before the GPU starts it. So the host's
    time is not measured.
    """
    other_memory = torch.empty(4 << 30, dtype=torch.int8, device="cuda")

    def clear() -> None:
        other_memory.zero_()
        torch.cuda.synchronize()

    clear()  # once to warm up
    clear_s = host_s(clear)
    taken: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds):
        for fn, times in zip(fns, taken, strict=True):
            fn()
            torch.cuda.synchronize()
            clears = math.ceil(2 * max(host_s(fn) for _ in range(3)) / clear_s)
            torch.cuda.synchronize()
            events = []
            for _ in range(runs):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(clears):
                    other_memory.zero_()
                start.record()
                fn()
                end.record()
                events.append((start, end))
            torch.cuda.synchronize()
            times.append(median(start.elapsed_time(end) for start, end in events))
    return [median(times) for times in taken]


def call_ms(fns: Sequence[Callable[[], object]], rounds: int = 3, runs: int = 30) -> list[float]:
    """Median milliseconds of one call of each function, including the host's time, until the GPU has finished.

    The functions take turns, as in `gpu_ms`.
    """
    taken: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds):
        for fn, times in zip(fns, taken, strict=True):

            def finished(fn: Callable[[], object] = fn) -> None:
                fn()
                synchronize()

            finished()
            times.append(median(host_s(finished) for _ in range(runs)))
    return [median(times) * 1e3 for times in taken]


def peak_mib(fn: Callable[[], object]) -> float:
    """The peak of the device memory that one call allocates, including its results."""
    fn()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = fn()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del results
    return peak / 2**20


def graph(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Capture the calls into one CUDA graph, after a warm-up, and return a function that replays it.

    All results are kept, so that no call reuses memory of an earlier call.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = [call() for call in calls]

    def replay(_results: list[object] = results) -> None:
        captured.replay()

    return replay


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(fn: Callable[[], object], calls: int = 200, rounds: int = 7, warm: int = 20) -> float:
    """Host microseconds per call: wall-clock time until the calls return, without waiting for the device."""
    return _us(fn, calls, rounds, warm, at_end=lambda: None)


def wall_us(fn: Callable[[], object], calls: int = 50, rounds: int = 5) -> float:
    """Wall-clock microseconds per call, for consecutive calls, until the device has finished."""
    return _us(fn, calls, rounds, warm=5, at_end=synchronize)


def _us(fn: Callable[[], object], calls: int, rounds: int, warm: int, at_end: Callable[[], None]) -> float:
    """Median over rounds of the microseconds per call. `at_end` is called after the calls of a round."""
    for _ in range(warm):
        fn()
    taken = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        at_end()
        taken.append((time.perf_counter() - start) / calls)
    synchronize()
    return median(taken) * 1e6


def kernels(fn: Callable[[], object]) -> int:
    """The number of kernels, copies and fills that the GPU executes in one call, including CUDA graphs."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    fn()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        fn()
        synchronize()
    return sum(
        event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        for event in profiler.events()
    )


def relative_error(x: Tensor, truth: Tensor) -> float:
    """``||x - truth|| / ||truth||`` in float64."""
    return ((x.double() - truth).norm() / truth.norm()).item()
