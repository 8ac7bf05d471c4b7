"""Tokens shared out among ranks beside whatever else shares out a model, compiled, and what the ranks tell each other.

The truth is the model of one process, in float64. That each function and layer has its values and gradients is tested
in `test_context_parallel.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layers.truth import EVERY, build, floats, random_state, tensors
from ranks import on_ranks, on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from flacompose.distributed import context_parallel, tensor_parallel_plan
from flacompose.models import RecurrentConfig, RecurrentLM

from .test_tensor_parallel import LAYERS, ODD, SHARED, needs_2_13

VOCABULARY = 32
MODEL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
MODELS = {
    "delta": {"layer": "GatedDeltaNet", "layer_options": {"num_heads": 2, "head_dim": 8}},
    "rwkv7": {"layer": "RWKV7Attention", "layer_options": {"head_dim": 8}, "feed_forward": "rwkv7", "norm": "layer"},
    "hybrid": {"layer": "GatedLinearAttention", "layer_options": {"num_heads": 2},
               "attn": [{"layers": [1], "num_heads": 2}]},
}  # fmt: skip


def build_model(name: str, dtype: torch.dtype = torch.float64) -> RecurrentLM:
    """The same on every rank, with no parameter at 0, where a gradient might not be seen."""
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(**MODEL | MODELS[name]), dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def cut(x: Tensor, cuts: tuple[int, ...], rank: int) -> Tensor:
    return x[:, cuts[rank] : cuts[rank + 1]]


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    logits, _ = model(ids, cu_seqlens=cu_seqlens)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_same(found: list[Any], expected: list[Any], *where: Any) -> None:
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10, msg=lambda text, i=i: f"{where} {i}: {text}")


def checkpointed(model: RecurrentLM) -> None:
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def data_parallel(world: DeviceMesh) -> None:
    """Packed rows over one dimension of the mesh, the tokens of each over the other; blocks are checkpointed."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, row, rank = grid["cp"], grid.get_local_rank("dp"), grid.get_local_rank("cp")
    # A sequence ends where the first rank's tokens do, or goes on; one is empty, and a tail is in none.
    bounds = [torch.tensor([0, 4, 9, 9, 15]), torch.tensor([0, 12, 14])]
    cuts = ((0, 9, 17), (0, 3, 17))
    torch.manual_seed(1)
    ids, labels = torch.randint(VOCABULARY, (2, 2, 1, 17))
    labels[0, :, 15:] = labels[1, :, 14:] = -100
    for name in "delta", "rwkv7":
        model = build_model(name)
        for i in range(2):
            loss_of(model, ids[i], labels[i], bounds[i]).backward()
        expected = gradients(model)
        model.zero_grad()
        mine = [cut(x[row], cuts[row], rank) for x in (ids, labels)]

        def of_rows() -> RecurrentLM:
            copied = copy.deepcopy(model)
            checkpointed(copied)
            return context_parallel(copied, cp)

        def sharded(mesh: DeviceMesh) -> RecurrentLM:
            shared = of_rows()
            for block in shared.layers:
                fully_shard(block, mesh=mesh)
            return fully_shard(shared, mesh=mesh)

        shared = sharded(grid["dp"])  # which takes means over rows; the sum over tokens is left to be taken
        loss_of(shared, *mine, bounds[row]).backward()
        for p in shared.parameters():
            dist.all_reduce(p.grad.to_local(), group=cp.get_group())
        assert_same([2 * full(p.grad) for p in shared.parameters()], expected, name, "dp")

        for mesh in world, grid:  # over all ranks, or over rows alike
            shared = sharded(mesh)
            for _ in range(2):  # accumulated
                loss_of(shared, *mine, bounds[row]).backward()
            assert_same([2 * full(p.grad) for p in shared.parameters()], expected, name, mesh.ndim)

        replica = DistributedDataParallel(of_rows())
        with replica.no_sync():
            loss_of(replica, *mine, bounds[row]).backward()
        loss_of(replica, *mine, bounds[row]).backward()
        assert_same([2 * p.grad for p in replica.parameters()], expected, name, "ddp")


def heads_and_tokens(mesh: DeviceMesh, names: list[str]) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    rank, group, cuts = grid.get_local_rank("cp"), grid.get_group("cp"), (0, 4, 11)
    for name in names:
        torch.manual_seed(0)
        layer = build((LAYERS | SHARED | ODD)[name], dtype=torch.float64)
        x, state = torch.randn(2, 11, 24, dtype=torch.float64), random_state(layer, 2)
        shared = copy.deepcopy(layer)
        parallelize_module(shared, grid["tp"], tensor_parallel_plan(shared))
        context_parallel(shared, grid["cp"])
        leaf = x.clone().requires_grad_()
        y, new, *_ = layer(leaf, state)
        # Each rank adds the final state's to its loss.
        (y.sin().sum() + 2 * sum(t.sin().sum() for t in floats(new))).backward()
        part = cut(x, cuts, rank).clone().requires_grad_()
        y_, new_, *_ = shared(part, state)
        (y_.sin().sum() + sum(full(t).sin().sum() for t in floats(new_))).backward()
        assert_same([y_, part.grad], [cut(y, cuts, rank), cut(leaf.grad, cuts, rank)], name)
        assert_same([full(t) for t in tensors(new_)], tensors(new), name, "state")
        for (path, p), q in zip(shared.named_parameters(), layer.parameters(), strict=True):
            grad = full(p.grad).clone()
            dist.all_reduce(grad, group=group)
            assert_same([grad], [q.grad], name, path)


@needs_2_13
def test_data_parallel() -> None:
    on_ranks(4, data_parallel)


@needs_2_13
def test_heads_and_tokens() -> None:
    on_ranks(4, heads_and_tokens, [name for name in EVERY if name != "rodimus"])
