"""The first forward and backward of a fresh process with empty caches, imports and CUDA's start aside."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from . import measure, peer
from .cases import OPS, ROOT, Shape


def first_step_s(op: str, side: str, shape: Shape, timeout_s: float) -> float:
    """Seconds from the first call to the last gradient, in a process of its own; raises if it fails."""
    with tempfile.TemporaryDirectory() as caches:
        empty = {
            name: os.path.join(caches, name.lower())
            for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
        }
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cold", op, side, str(shape)],
            cwd=ROOT,
            env={**os.environ, **empty},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process ended"])[-1])
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


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
    # Autograd's device thread and its context are the process's, not the op's.
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
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
