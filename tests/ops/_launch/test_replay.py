"""Calls are recorded and repeated without the Python that decides on them, here with kernels that need no GPU."""

from __future__ import annotations

import gc
import weakref
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from helpers.operators import flat, signature_of
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd
from torch._ops import OpOverload

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import driver

from flacompose.ops._launch import replay as replay_module
from flacompose.ops._launch.launch import launch, launching_by
from flacompose.ops._launch.replay import Replay
from flacompose.ops._recurrences.elementwise.scan import cuda as scan
from flacompose.ops._recurrences.matrix import cuda as matrix
from flacompose.ops._recurrences.matrix.inputs import Inputs


class Driver:
    def get_current_stream(self, device: int) -> int:
        return 7 + device


class Tensors(NamedTuple):
    x: Tensor
    absent: None
    out: Tensor


class Kernel:
    """``out[i] = x[i] * factor``, and what Triton has of a kernel and of a compiled one."""

    arg_names = ("tensors", "factor", "BLOCK")

    def __init__(self) -> None:
        self.launched: list[tuple[Any, int | None]] = []
        self.alive: list[weakref.ref[Tensor]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(tensors: Tensors, factor: float, BLOCK: int, num_warps: int = 4) -> Kernel:
            assert isinstance(tensors, tuple)  # Triton takes no list
            x, _, out = tensors
            out.view(x.shape).copy_(x * factor)
            self.launched.append((grid, None))
            self.alive.append(weakref.ref(x))
            return self

        return launch

    function, packed_metadata = "function", "metadata"

    def run(self, *args: Any) -> None:
        grid, (stream, *rest), (tensors, factor, block) = args[:3], args[3:9], args[9:]
        assert rest == ["function", "metadata", None, None, None] and block == 16
        self[grid](tensors, factor, block)
        self.launched[-1] = grid, stream


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(driver, "_active", Driver())
    return Kernel()


def make(kernel: Kernel) -> tuple[Replay, list[int]]:
    """Twice the running maximum of `x`, and, if asked for, a sum with `y`."""
    calls: list[int] = []

    def implementation(x: Tensor, y: Tensor | None, scale: float, mask: list[bool]) -> tuple[Tensor, ...]:
        calls.append(1)
        values, _ = x.double().contiguous().cummax(0)
        out = values.new_empty(values.numel())  # as long as it is filled, and then viewed
        launch(kernel, (3,), Tensors(values, None, out), factor=scale, BLOCK=16, num_warps=8)
        out = out.view(values.shape)
        del values
        total = torch.zeros_like(x, dtype=torch.float64).add_(out)
        if y is not None and mask[1]:
            return total, torch.stack([out, y.double()]).sum(0)
        return total, x.new_empty(0)

    return Replay(implementation), calls


def expected(x: Tensor, y: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    out = x.double().cummax(0).values * scale
    return out, x.new_empty(0) if y is None else out + y.double()


def test_the_third_call_of_a_kind_repeats_the_second(kernel: Kernel) -> None:
    replay, calls = make(kernel)
    for i in range(5):
        x, y = torch.randn(2, 6, 4)
        torch.testing.assert_close(replay(x, y, 2.0, [True, True]), expected(x, y, 2.0))
        assert len(calls) == min(i + 1, 2)
    assert [grid for grid, _ in kernel.launched] == [(3,)] * 2 + [(3, 1, 1)] * 3
    assert [stream for _, stream in kernel.launched] == [None] * 2 + [6] * 3  # that of now, of device -1


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: (x[:5], y[:5], 2.0, [True, True]),
        lambda x, y: (x.T.contiguous().T, y, 2.0, [True, True]),
        lambda x, y: (x.bfloat16(), y, 2.0, [True, True]),
        lambda x, y: (
            torch.cat([x.new_zeros(1), x.flatten()])[1:].view(6, 4),
            y,
            2.0,
            [True, True],
        ),  # alignment
        lambda x, y: (x, None, 2.0, [True, True]),
        lambda x, y: (x, y, 3.0, [True, True]),
        lambda x, y: (x, y, 2.0, [True, False]),
    ],
    ids=["shape", "stride", "dtype", "alignment", "absent", "number", "mask"],
)
def test_another_kind_is_not_taken_for_it(kernel: Kernel, other: Any) -> None:
    replay, calls = make(kernel)
    x, y = torch.randn(2, 6, 4)
    for _ in range(3):
        replay(x, y, 2.0, [True, True])
    args = other(x, y)
    for i in range(3):
        results = replay(*args)
        assert len(calls) == 2 + min(i + 1, 2)
        total, both = expected(*args[:3])
        torch.testing.assert_close(results[0], total)
        assert results[1].shape == (both.shape if args[3][1] and args[1] is not None else (0,))


def test_one_tensor_given_twice_is_not_taken_for_two(kernel: Kernel) -> None:
    replay, calls = make(kernel)
    x, y = torch.randn(2, 6, 4)
    for _ in range(2):
        replay(x, x, 2.0, [True, True])
    torch.testing.assert_close(replay(x, y, 2.0, [True, True]), expected(x, y, 2.0))
    torch.testing.assert_close(replay(y, y, 2.0, [True, True]), expected(y, y, 2.0))
    assert len(calls) == 2


def test_temporary_memory_is_free_after_its_last_use(kernel: Kernel) -> None:
    """In a call that is recorded, too."""
    given_up: list[weakref.ref[Tensor]] = []

    def implementation(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(3):
            assert all(y() is None for y in given_up)
            y = torch.empty_like(x)
            launch(kernel, (1,), Tensors(x, None, y), factor=1.0, BLOCK=16)
            given_up.append(weakref.ref(y))
            del y
        return (x.new_empty(0),)

    replay = Replay(implementation)
    for _ in range(3):
        replay(torch.randn(6, 4))
    gc.collect()
    assert len(given_up) == 6 and len(kernel.launched) == 9

    replay, _ = make(kernel)
    for _ in range(3):
        results = replay(torch.randn(6, 4), None, 2.0, [True, True])
    gc.collect()
    assert len(results) == 2 and all(temporary() is None for temporary in kernel.alive)


def test_results_are_new_at_every_call(kernel: Kernel) -> None:
    replay, _ = make(kernel)
    x, y = torch.randn(2, 6, 4)
    results = [tensor for _ in range(4) for tensor in replay(x, y, 2.0, [True, True])]
    assert len({tensor.data_ptr() for tensor in results}) == len(results)


def test_no_more_kinds_are_kept_than_a_number(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "MAX_KINDS", 3)
    replay, calls = make(kernel)
    for T in (1, 2, 3, 4):
        for _ in range(3):
            replay(torch.randn(T, 4), None, 2.0, [True, True])
    assert len(replay.recorded) == len(replay.seen) == 3 and len(calls) == 8
    replay(torch.randn(1, 4), None, 2.0, [True, True])  # forgotten
    assert len(calls) == 9


def test_nothing_is_recorded_while_another_launches(kernel: Kernel) -> None:
    replay, calls = make(kernel)

    def launcher(kernel: Kernel, grid: Any, *args: Any, **kwargs: Any) -> None:
        kernel[grid](*args, **kwargs)

    with launching_by(launcher):
        for _ in range(4):
            replay(torch.randn(6, 4), None, 2.0, [True, True])
    assert len(calls) == 4 and not replay.recorded


@pytest.mark.parametrize("hooks", [knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook])
def test_nothing_is_repeated_while_a_hook_is_set(kernel: Kernel, hooks: Any) -> None:
    """Triton calls the hooks of profilers, so it has to launch."""
    replay, calls = make(kernel)

    def hook(metadata: Any) -> None:
        pass

    x, y = torch.randn(2, 6, 4)
    for _ in range(3):
        replay(x, y, 2.0, [True, True])
    hooks.add(hook)
    try:
        torch.testing.assert_close(replay(x, y, 2.0, [True, True]), expected(x, y, 2.0))
        assert len(calls) == 3 and kernel.launched[-1] == ((3,), None)
    finally:
        hooks.remove(hook)
    replay(x, y, 2.0, [True, True])
    assert len(calls) == 3 and kernel.launched[-1] == ((3, 1, 1), 6)


def test_a_kind_forgotten_while_it_is_recorded_stays_so(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "MAX_KINDS", 1)
    calls: list[int] = []

    def implementation(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(x))
        if calls == [6, 6]:  # the second call, which is recorded
            other = Thread(target=replay, args=(torch.randn(5),))
            other.start()
            other.join()
        return (x.new_empty(0),)

    replay = Replay(implementation)
    for _ in range(2):
        replay(torch.randn(6))
    assert calls == [6, 6, 5] and len(replay.seen) == 1 and not replay.recorded


@pytest.mark.parametrize("recurrence", ["scalar", "scan", "vector"])
def test_nothing_but_allocations_and_launches_is_repeated(
    recurrence: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a training step's forward and backward, whose inputs are as the kernels take them."""
    q, k, v, g, do = torch.randn(5, 1, 70, 2, 24, dtype=torch.bfloat16)
    module, args, do = {
        "scalar": (matrix, (*Inputs(q, k, v, g[..., 0].contiguous()),), do),
        "scan": (
            scan,
            (q[:, :, 0].contiguous(), g[:, :, 0].contiguous(), None, None),
            do[:, :, 0].contiguous(),
        ),
        "vector": (matrix, (*Inputs(q, k, v, gk=g),), do),
    }[recurrence]
    differentiable = signature_of(module).differentiable
    mask = [x is not None for x in args[: len(differentiable)]]

    def launched(recorder: Any, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        recorder.lines.append(recorder.call(print, *args, **kwargs))

    monkeypatch.setattr(replay_module._Recorder, "launch", launched)
    calls = (flat(module, "chunk"), args), (flat(module, "backward"), (*args, do, None, mask))
    for implementation, arguments in calls:
        replay = Replay(implementation)
        with _AutoDispatchBelowAutograd():
            replay.seen[0] = None
            replay.record(0, arguments)
        called = {x for x in replay.recorded[0].__globals__.values() if callable(x)}
        assert {print, torch.empty_strided} <= called
        assert not any(isinstance(x, OpOverload) for x in called), called
