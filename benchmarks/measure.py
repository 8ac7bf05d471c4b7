"""How one figure is taken. Nothing here knows an op; ``fn`` is a call with its inputs bound."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor


def step(fn: Callable[..., tuple], inputs: Mapping[str, Tensor], do: Tensor) -> Callable[[], tuple]:
    """A training step: the forward and every input's gradient, none accumulated into ``.grad``."""
    wanted = list(inputs.values())
    return lambda: torch.autograd.grad(fn(**inputs)[0], wanted, do)


def host_s(fn: Callable[[], object]) -> float:
    """Seconds until one call returns."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def gpu_ms(fns: Sequence[Callable[[], object]], rounds: int = 3, runs: int = 30) -> list[float]:
    """Median GPU milliseconds of each function; they take turns, so that a drifting clock drifts for all.

    Before each run the L2 cache is cleared, for so long that the host is ahead of the GPU: its time is not in.
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


def peak_mib(fn: Callable[[], object]) -> float:
    """Most device memory that one call allocates on top of what was there, results included."""
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
    """Capture the calls, each warmed up first, into one CUDA graph; returns its replay.

    All results stay alive, so that no call writes where the one before it did.
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


def host_us(fn: Callable[[], object], calls: int = 200, rounds: int = 7) -> float:
    """Host microseconds a call: wall clock without waiting for the device, which the calls leave idle."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(20):
        fn()
    taken = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        taken.append((time.perf_counter() - start) / calls)
        synchronize()
    return median(taken) * 1e6


def wall_us(fn: Callable[[], object], calls: int = 50, rounds: int = 5) -> float:
    """Microseconds a call from the first launch to the device's last result, back to back."""
    for _ in range(5):
        fn()
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / calls)
    return median(taken) * 1e6


def cpu_ms(fn: Callable[[], object], runs: int, enough_s: float = 20.0) -> float:
    """Median wall-clock milliseconds after one warm-up; fewer runs where they add up to ``enough_s``."""
    fn()
    taken: list[float] = []
    while len(taken) < runs and sum(taken) < enough_s:
        start = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - start)
    return median(taken) * 1e3


def relative_error(x: Tensor, truth: Tensor) -> float:
    """``||x - truth|| / ||truth||`` in float64."""
    return ((x.double() - truth).norm() / truth.norm()).item()
