"""The first forward and backward in a fresh process with empty caches, without imports and the start of CUDA."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time

import torch

from . import measure, peer
from .cases import OPS, Shape
from .processes import Process, answer, command, empty_caches


def first_step_s(op: str, side: str, shape: Shape, timeout_s: float) -> float:
    """Seconds from the first call to the last gradient, in a process of its own."""
    with (
        empty_caches() as env,
        contextlib.closing(Process(command("cold", [op, side, str(shape)]), env)) as run,
    ):
        reply = run.receive(timeout_s)
    if reply is None:
        raise RuntimeError("the process ended")
    return reply["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("side", choices=["flacompose", "fla"])
    parser.add_argument("shape", type=Shape.parse)
    arguments = parser.parse_args()
    op = OPS[arguments.op]
    importlib.import_module("triton")
    module = peer.load() if arguments.side == "fla" else importlib.import_module("flacompose.ops")
    inputs = op.draw(arguments.shape, torch.bfloat16, "cuda", grad=True)
    do = op.draw_do(arguments.shape, torch.bfloat16, "cuda")
    # Start autograd's thread for the device, which is not a part of the op.
    x = inputs[op.output]
    torch.autograd.grad((x * 2).sum(), x)
    step = measure.step(op.chunk_of(module), inputs, do)
    torch.cuda.synchronize()
    start = time.perf_counter()
    if arguments.side == "fla":
        peer.first_call(step)
    else:
        step()
    torch.cuda.synchronize()
    answer(seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
