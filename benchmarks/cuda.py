"""Figures of one op on a GPU. Every function yields each row at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from . import floor, measure, peer
from .cases import ACCURACY, DECODE_GPU, DECODE_HOST, Functions, Op, Shape
from .cold import first_step_s
from .report import Row

Sides = Mapping[str, Functions]
"""``{"flacompose": flacompose.ops, "fla": peer.load()}``: flacompose first, then at most one other side."""

Take = Callable[[Sequence[Callable[[], object]]], list[float]]

DEVICE = "cuda"

FORWARD, STEP = "forward", "forward + backward"
WITH_HOST = "{}, with the host"
"""The time of one call in eager mode, from an idle GPU until it has finished."""

STATES = 8
"""States that a decoding graph uses in turn. With 64 MiB each at batch 64, none stays in an L2 cache of 50 MB."""


def failure(side: str, error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{side} failed: {type(error).__name__}: {first}"


def both(
    sides: Sides, function: Callable[[Functions], Callable], take: Callable[[Callable], float]
) -> tuple[float | None, float | None, str]:
    """Apply ``take`` to each side's function. If a side fails, the result is ``None`` and a message."""
    values: list[float | None] = []
    notes: list[str] = []
    for side, module in sides.items():
        try:
            values.append(take(function(module)))
        except Exception as error:
            values.append(None)
            notes.append(failure(side, error))
    ours, other, *_ = *values, None
    return ours, other, "; ".join(notes)


def training(op: Op, sides: Sides, shape: Shape, notes: list[str], with_host: bool = False) -> Iterator[Row]:
    """Forward, forward and backward, and peak memory, in bfloat16. Targets need both sides.

    Times are of the GPU alone; `with_host` adds the times of single calls.
    """
    inputs = op.draw(shape, torch.bfloat16, DEVICE, grad=True)
    do = op.draw_do(shape, torch.bfloat16, DEVICE)
    forwards: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {}
    failed = []
    for side, module in sides.items():
        fn = op.chunk_of(module)
        step = measure.step(fn, inputs, do)
        try:
            note = peer.first_call(step)
        except Exception as error:
            failed.append(failure(side, error))
            continue
        if note and note not in notes:
            notes.append(note)
        forwards[side] = functools.partial(fn, **inputs)
        steps[side] = step
    reason = "; ".join(failed)

    def row(quantity: str, unit: str, values: Mapping[str, float], limit: float | None) -> Row:
        ours, other, *_ = *(values.get(side) for side in sides), None
        max_ratio = limit if len(sides) > 1 else None
        return Row(op.name, op.label(shape), quantity, unit, ours, other, max_ratio=max_ratio, note=reason)

    def times(fns: Mapping[str, Callable[[], object]], take: Take) -> dict[str, float]:
        return dict(zip(fns, take(list(fns.values())), strict=True))

    yield row(FORWARD, "ms", times(forwards, measure.gpu_ms), op.targets.forward)
    yield row(STEP, "ms", times(steps, measure.gpu_ms), op.targets.step)
    if with_host:
        yield row(WITH_HOST.format(FORWARD), "ms", times(forwards, measure.call_ms), None)
        yield row(WITH_HOST.format(STEP), "ms", times(steps, measure.call_ms), None)
    memory = {side: measure.peak_mib(fn) for side, fn in steps.items()}
    yield row("peak memory over the inputs", "MiB", memory, op.targets.memory)


def beside_floor(op: Op, alone: Sides, shape: Shape, notes: list[str]) -> Iterator[Row]:
    """Training of an op without a peer, beside the memory traffic of its inputs and results, without targets."""
    for row in training(op, {**alone, floor.NAME: floor.of(op)}, shape, notes):
        yield dataclasses.replace(row, beside=floor.NAME, max_ratio=None)


def decode(op: Op, sides: Sides) -> Iterator[Row]:
    """One token: the time on the device at batch 64, from a CUDA graph, and on the host at batch 1, in eager mode."""

    def gpu_us(fn: Callable) -> float:
        calls = []
        for _ in range(STATES):
            inputs = op.for_recurrent(op.draw(DECODE_GPU, torch.bfloat16, DEVICE))
            state = op.packed([*op.draw_states(DECODE_GPU, DEVICE).values()])
            calls.append(functools.partial(fn, **inputs, initial_state=state, output_final_state=True))
        with torch.no_grad():
            return measure.gpu_ms([measure.graph(calls)])[0] * 1e3 / STATES

    def host_us(fn: Callable) -> float:
        inputs = op.for_recurrent(op.draw(DECODE_HOST, torch.bfloat16, DEVICE))
        state = op.packed([*op.draw_states(DECODE_HOST, DEVICE).values()])

        def token() -> None:
            nonlocal state
            _, state = fn(**inputs, initial_state=state, output_final_state=True)

        return measure.host_us(token)

    def row(
        shape: Shape, quantity: str, figures: tuple[float | None, float | None, str], limit: float | None
    ) -> Row:
        ours, other, note = figures
        return Row(op.name, op.label(shape), quantity, "us", ours, other, max_value=limit, note=note)

    limits = op.targets
    yield row(DECODE_GPU, "decode, GPU", both(sides, op.recurrent_of, gpu_us), limits.decode_gpu_us)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            figures = both(sides, op.recurrent_of, host_us)
        yield row(DECODE_HOST, f"decode, host, {mode.__name__}", figures, limits.decode_host_us)


def accuracy(op: Op, sides: Sides, shape: Shape | None = None) -> Iterator[Row]:
    """The errors of both sides in bfloat16, against float64 on the same inputs. Ours must not be larger."""
    shape = shape or ACCURACY
    inputs = op.draw(shape, torch.bfloat16, DEVICE)
    states = op.draw_states(shape, DEVICE)
    upstream = [op.draw_do(shape, torch.bfloat16, DEVICE)]
    if op.state_gradients:
        upstream += op.draw_states(shape, DEVICE).values()

    def results(module: Functions, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        given, initial = (
            {name: x.to(dtype or x.dtype, copy=True) for name, x in xs.items()} for xs in (inputs, states)
        )
        leaves = {**given, **{f"initial_{name}": x for name, x in initial.items() if op.state_gradients}}
        for leaf in leaves.values():
            leaf.requires_grad_()
        o, final = op.chunk_of(module)(
            **given, initial_state=op.packed([*initial.values()]), output_final_state=True
        )
        final = op.unpacked(final)
        outputs, arriving = zip(
            *((y, dy.to(y.dtype)) for y, dy in zip((o, *final), upstream, strict=op.state_gradients))
        )
        gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving)
        named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
        named |= {f"final_{name}": x.detach() for name, x in zip(states, final, strict=True)}
        return {"o": o.detach(), **named}

    truth: dict[str, Tensor] = {}
    errors: dict[str, dict[str, float]] = {side: {} for side in sides}
    notes = []
    try:
        truth = results(sides["flacompose"], torch.float64)
    except Exception as error:
        notes.append(failure("float64", error))
    for side, module in sides.items():
        try:
            got = results(module)
            errors[side] = {name: measure.relative_error(got[name], x) for name, x in truth.items()}
        except Exception as error:
            notes.append(failure(side, error))
    initial = [f"dinitial_{name}" for name in states if op.state_gradients]
    for name in ("o", *(f"final_{name}" for name in states), *(f"d{name}" for name in inputs), *initial):
        ours, other, *_ = *(errors[side].get(name) for side in sides), None
        quantity, note = f"relative error of {name}", "; ".join(notes)
        limit = 1.0 if len(sides) > 1 else None
        yield Row(op.name, op.label(shape), quantity, "", ours, other, max_ratio=limit, note=note)


def cold(op: Op, shape: Shape, timeouts: Mapping[str, float | None]) -> Iterator[Row]:
    """The first step of each side with empty caches. A side with a time limit of ``None`` is skipped."""
    values: dict[str, float | None] = {}
    notes = []
    for side, timeout_s in timeouts.items():
        try:
            values[side] = None if timeout_s is None else first_step_s(op.name, side, shape, timeout_s)
        except Exception as error:
            values[side] = None
            notes.append(failure(side, error))
    ours, other = values.values()
    limit, note = op.targets.cold_s, "; ".join(notes)
    yield Row(
        op.name, op.label(shape), "first step, cold caches", "s", ours, other, max_value=limit, note=note
    )
