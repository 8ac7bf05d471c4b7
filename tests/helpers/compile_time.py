"""How long one model takes to compile, in a process of its own, from cold caches.

    python -m helpers.compile_time NAME {enabled,untouched}

Prints a line for each length as soon as it is through: the seconds of its first call, and how many graphs there are.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import torch
from torch._dynamo.utils import counters

from flacompose.integrations.transformers import enable
from helpers.capture import Logits, captured, prompt
from helpers.tiny import tiny

LENGTHS = (70, 165, 384)


@torch.no_grad()
def main(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Logits(captured(name, tiny(name)))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with enable() if mode == "enabled" else nullcontext():
        for length in LENGTHS:
            ids = prompt(model.model, length)
            start = time.perf_counter()
            compiled(ids)
            seconds = time.perf_counter() - start
            print(f"{length} {seconds:.1f} {counters['stats']['unique_graphs']}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
