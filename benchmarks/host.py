"""The host's time per call, for short inputs, whose time is spent in Python and launches.

Each side has one process for the whole run. The sides take turns in rounds, and a figure is the median of its rounds,
so that a slower host affects all sides.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from . import measure, peer, tuned
from .cases import OPS, Op, Shape
from .processes import Process, answer, command
from .report import Row

SDPA = "SDPA"
FORWARD, STEP, TOKEN = "forward", "forward + backward", "decode, one token"
CALLS = {FORWARD: 30, STEP: 15, TOKEN: 50}
"""Calls that are timed together. They queue so few kernels that the host never waits for the device."""


def sdpa_calls(shape: Shape, device: str) -> dict[str, Callable[[], object]]:
    """Causal softmax attention at the same shape. Its decoding reads the keys and values of all tokens of the shape."""
    B, T, H, K, V = shape[:5]

    def draw(T: int, D: int) -> torch.Tensor:
        return torch.randn(B, H, T, D, dtype=torch.bfloat16, device=device)

    q, k, v = inputs = [draw(T, D).requires_grad_() for D in (K, K, V)]
    do = draw(T, V)
    one, keys, values = draw(1, K), k.detach(), v.detach()
    attend = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return {
        FORWARD: attend,
        STEP: lambda: torch.autograd.grad(attend(), inputs, do),
        TOKEN: torch.no_grad()(lambda: F.scaled_dot_product_attention(one, keys, values)),
    }


def op_calls(op: Op, module, shape: Shape, device: str) -> dict[str, Callable[[], object]]:
    """The forward of an op with gradients enabled, its training step, and one token with its state."""
    inputs = op.draw(shape, torch.bfloat16, device, grad=True)
    do = op.draw_do(shape, torch.bfloat16, device)
    chunk, recurrent = op.chunk_of(module), op.recurrent_of(module)
    single = shape._replace(T=1)
    token_inputs = op.for_recurrent(op.draw(single, torch.bfloat16, device))
    state = op.packed([*op.draw_states(single, device).values()])

    @torch.no_grad()
    def token() -> None:
        nonlocal state
        _, state = recurrent(**token_inputs, initial_state=state, output_final_state=True)

    return {FORWARD: functools.partial(chunk, **inputs), STEP: measure.step(chunk, inputs, do), TOKEN: token}


def serve(side: str, device: str, configs: Path | None = None) -> None:
    """Answer each request, an op and a shape, with the microseconds of each call."""
    module = peer.load() if side == "fla" else importlib.import_module("flacompose.ops")
    if configs is not None:
        tuned.install(configs)
    made: dict[tuple[str, str], dict[str, Callable[[], object]]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, text = key = request["op"], request["shape"]
        try:
            if key not in made:
                shape = Shape.parse(text)
                made[key] = (
                    sdpa_calls(shape, device) if name == SDPA else op_calls(OPS[name], module, shape, device)
                )
                for fn in made[key].values():
                    peer.first_call(fn) if side == "fla" else fn()
            scale = request["calls"]
            answer(
                us={
                    quantity: measure.host_us(
                        fn, calls=max(1, round(CALLS[quantity] * scale)), rounds=3, warm=3
                    )
                    for quantity, fn in made[key].items()
                }
            )
        except Exception as error:
            answer(error=f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")


def take(
    ops: Sequence[Op],
    device: str,
    shape: Shape,
    before: Path | None = None,
    *,
    configs: Path | None = None,
    rounds: int = 5,
    calls: float = 1.0,
    timeout_s: float = 300.0,
) -> Iterator[Row]:
    """Every op beside `SDPA`, the flacompose of the checkout `before`, and, if installed, flash-linear-attention."""
    packages: dict[str, Path | None] = {"flacompose": None}
    if before is not None:
        packages["before"] = before
    if device == "cuda" and importlib.util.find_spec("fla") is not None:
        packages["fla"] = None
    with contextlib.ExitStack() as stack:
        processes = {}
        for side, package in packages.items():
            given = [] if side != "fla" or configs is None else ["--peer-configs", str(configs.resolve())]
            processes[side] = Process(command("host", [side, device, *given], package))
            stack.callback(processes[side].close)
        for op in ops:
            yield from _rows(op, shape, processes, rounds, calls, timeout_s)


def _rows(
    op: Op, shape: Shape, processes: dict[str, Process], rounds: int, calls: float, timeout_s: float
) -> Iterator[Row]:
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in (*processes, SDPA)}
    notes: dict[str, str] = {}

    def process_of(side: str) -> Process:
        return processes["flacompose" if side == SDPA else side]

    def ask(side: str, calls: float) -> None:
        name = SDPA if side == SDPA else op.name
        process_of(side).send({"op": name, "shape": str(shape), "calls": calls})

    def hear(side: str, keep: bool) -> None:
        try:
            reply = process_of(side).receive(timeout_s)
        except (RuntimeError, TimeoutError) as error:
            reply = {"error": str(error)}
        if reply is None or "error" in reply:
            notes[side] = f"{side} failed: {reply['error'] if reply else 'its process ended'}"
        elif keep:
            taken[side].append(reply["us"])

    # The first calls compile, in all processes at the same time and before any timing.
    for side in taken:
        ask(side, 0.0)
    for side in taken:
        hear(side, keep=False)
    for _ in range(rounds):
        for side in taken:
            if side not in notes:
                ask(side, calls)
                hear(side, keep=True)
    medians = {
        side: {quantity: median(us[quantity] for us in all_us) for quantity in CALLS}
        for side, all_us in taken.items()
        if all_us
    }
    for quantity in CALLS:
        for side in taken:
            if side == "flacompose":
                continue
            yield Row(
                op.name,
                op.label(shape if quantity != TOKEN else shape._replace(T=1)),
                f"{quantity}, host",
                "us",
                medians.get("flacompose", {}).get(quantity),
                medians.get(side, {}).get(quantity),
                max_ratio=3.0 if side == SDPA and quantity == STEP else None,
                note="; ".join(notes[s] for s in ("flacompose", side) if s in notes),
                beside=side,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=serve.__doc__)
    parser.add_argument("side", choices=["flacompose", "before", "fla"])
    parser.add_argument("device", choices=["cuda", "cpu"])
    parser.add_argument("--peer-configs", type=Path, help="the peer's launch configurations")
    arguments = parser.parse_args()
    serve(arguments.side, arguments.device, arguments.peer_configs)


if __name__ == "__main__":
    main()
