"""Processes side by side, for what is distributed."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# The server of the processes imports these once, so that each of them begins with what takes seconds to import.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.tensor", "flacompose.layers"]

# The axes along which the batch, or the heads, may be split. N counts sequences, which are rows of the batch unless
# they are packed. HV and HQ are the heads that come in groups, D are channels without heads.
BATCH, HEADS = ("B", "N"), ("H", "HV", "HQ", "D")


def placement(axes: Sequence[str], split: Sequence[str]) -> Any:
    """Of a tensor with these axes, of which those in `split` are split."""
    from torch.distributed.tensor import Replicate, Shard

    return next((Shard(dim) for dim, axis in enumerate(axes) if axis in split), Replicate())


def on_ranks(
    count: int, worker: Callable[..., None], *arguments: Any, start_method: str = "forkserver"
) -> None:
    """Call ``worker(mesh, *arguments)`` on each of so many ranks of the CPU; what it raises there is raised here."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        args = (f"{directory}/store", count, worker, arguments)
        torch.multiprocessing.start_processes(_rank, args, count, start_method=start_method)


on_two_ranks = partial(on_ranks, 2)


def programs_on_two_ranks(program: Callable[..., None], *arguments: Any) -> None:
    """Call ``program(*arguments)`` in two processes that ``init_process_group`` finds as `torchrun` starts them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(_program, (store.port, program, arguments), 2, start_method="spawn")


def check_sharded(
    mesh: DeviceMesh,
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    placements: Sequence[Any],
    unsharded: Callable[..., Sequence[Tensor]] | None = None,
) -> list[Any]:
    """Check that `run` gives of distributed inputs what `unsharded`, or `run`, gives of plain ones, gradients included.

    The inputs are the same on every rank. Returns where the outputs are placed.
    """
    from torch.distributed.tensor import distribute_tensor

    leaves = [x.clone().requires_grad_() for x in inputs]
    shards = [
        distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(inputs, placements, strict=True)
    ]
    outputs, expected = run(*shards), (unsharded or run)(*leaves)
    for tensors in (outputs, expected):
        sum(y.sin().sum() for y in tensors).backward()
    gradients = [(x.grad, leaf.grad) for x, leaf in zip(shards, leaves, strict=True)]
    for x, y in (*zip(outputs, expected, strict=True), *gradients):
        torch.testing.assert_close(x.full_tensor(), y)
    return [y.placements[0] for y in outputs]


def _rank(rank: int, store: str, count: int, worker: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    worker(init_device_mesh("cpu", (count,)), *arguments)
    dist.barrier()
    _exit()


def _program(rank: int, port: int, program: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    # The store is the parent's, as it is with `torchrun`, so that its port cannot be taken by another process.
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    program(*arguments)
    _exit()


def _exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads race with the shutdown of the interpreter, which now and then ends in SIGABRT.
    os._exit(0)
