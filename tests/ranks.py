"""Two processes side by side, for what is distributed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def on_two_ranks(worker: Callable[..., None], *arguments: Any, start_method: str = "spawn") -> None:
    """Call ``worker(mesh, *arguments)`` on each of two ranks of the CPU; what it raises there is raised here."""
    with tempfile.TemporaryDirectory() as directory:
        args = (f"{directory}/store", worker, arguments)
        torch.multiprocessing.start_processes(_rank, args, 2, start_method=start_method)


def _rank(rank: int, store: str, worker: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    worker(init_device_mesh("cpu", (2,)), *arguments)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads race with the shutdown of the interpreter, which now and then ends in SIGABRT.
    os._exit(0)
