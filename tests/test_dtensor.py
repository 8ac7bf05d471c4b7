"""Decays that an op makes itself, beside distributed inputs."""

from __future__ import annotations

import pytest
import torch
from ranks import on_two_ranks
from torch.distributed.device_mesh import DeviceMesh

from flacompose.ops import (
    chunk_lightning_attn,
    chunk_retention,
    fused_recurrent_lightning_attn,
    fused_recurrent_retention,
)

OPS = [
    (chunk_retention, ()),
    (fused_recurrent_retention, ()),
    (chunk_lightning_attn, (1, 3)),
    (fused_recurrent_lightning_attn, (1, 3)),
]


def sharded(mesh: DeviceMesh, compiled: bool) -> None:
    """By rows and by heads on two ranks: the results and gradients of one, sharded as the inputs."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    inputs = [*torch.randn(2, 2, 5, 2, 4), torch.randn(2, 5, 4, 3)]  # grouped
    for op, layer in OPS:
        run = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
        for dim in (0, 2):
            shards = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in inputs]
            leaves = [x.clone().requires_grad_() for x in inputs]
            o, _ = run(*shards, *layer)
            expected, _ = op(*leaves, *layer)
            assert o.placements == (Shard(dim),)
            torch.testing.assert_close(o.full_tensor(), expected)
            for y in (o, expected):
                y.sin().sum().backward()
            for x, leaf in zip(shards, leaves, strict=True):
                torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_decays_are_those_of_all_heads(compiled: bool) -> None:
    on_two_ranks(sharded, compiled)
