"""Decays that an op makes itself, beside distributed inputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import check_sharded, on_two_ranks
from torch import Tensor
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
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    inputs = [*torch.randn(2, 2, 5, 2, 4), torch.randn(2, 5, 4, 3)]  # grouped
    for op, layer in OPS:
        form = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op

        def run(*x: Tensor, form=form, layer=layer) -> tuple[Tensor, ...]:
            return form(*x, *layer)[:1]

        for placement in (Shard(0), Shard(2)):
            whole = partial(run, form=op)
            assert check_sharded(mesh, run, inputs, [placement] * 3, whole) == [placement]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_decays_are_those_of_all_heads(compiled: bool) -> None:
    on_two_ranks(sharded, compiled)
