"""First values of modules that are made on the meta device: those of the constructor, in whatever order set."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from helpers.first_values import MODULES, Draw, assert_first_values, draw, reset
from helpers.ranks import on_two_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import prune

from flacompose.layers import RWKV6Attention
from flacompose.layers.feature_map import HedgehogFeatureMap
from flacompose.models import RecurrentLM


def constructed(name: str) -> list[Draw]:
    return [draw(MODULES[name]()) for _ in range(4)]


@pytest.mark.parametrize("name", MODULES)
def test_meta_device(name):
    """Parents first, as PyTorch's guide to FSDP2 does it, or children first, as `nn.Module.apply` does it."""
    module = MODULES[name](device="meta").to_empty(device="cpu")
    expected = constructed(name)
    for children_first in (False, True):
        reset(module, children_first)
        assert_first_values(draw(module), expected)
    # Nothing that is computed with stays on the meta device.
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    inputs = tokens if isinstance(module, RecurrentLM) else torch.randn(1, 3, module.hidden_size)
    assert module(inputs)[0].isfinite().all()


def sharded(mesh: DeviceMesh, names: list[str]) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(mesh.get_rank())  # on a CPU, each rank draws its own shards
    for name in names:
        module = fully_shard(MODULES[name](device="meta"), mesh=mesh).to_empty(device="cpu")
        reset(module)
        found = draw(module)
        if mesh.get_rank() == 0:
            assert_first_values(found, constructed(name))


def test_fsdp():
    on_two_ranks(sharded, list(MODULES))


def test_copies():
    """A module with first values of its own copies and pickles, and is freed when nothing names it any more."""
    made = nn.Sequential(HedgehogFeatureMap(3))
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        weights = [m[0].layer.weight for m in (made, copied)]
        for weight in weights:
            nn.init.zeros_(weight)
        copied[0].layer.reset_parameters()
        assert torch.equal(weights[1], torch.eye(3))
        assert not weights[0].any()
    layer = weakref.ref(made[0].layer)
    del made
    assert layer() is None


def test_pruned_parameters_are_left_alone() -> None:
    """Pruning puts another parameter in the place of a weight, and PyTorch's own modules can be reset then too."""
    layer = RWKV6Attention(hidden_size=8, num_heads=2)
    prune.l1_unstructured(layer.o_proj, "weight", 0.5)
    before = layer.o_proj.weight_orig.clone()
    layer.o_proj.reset_parameters()
    assert torch.equal(layer.o_proj.weight_orig, before)
