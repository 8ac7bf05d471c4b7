"""Heads shared out among two ranks: outputs, states, gradients and training are those of one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layers.truth import EVERY, build, tensors
from ranks import on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flacompose.distributed import tensor_parallel_plan
from flacompose.layers import join_projections
from flacompose.models import RecurrentConfig, RecurrentLM

HIDDEN = 24
needs_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="refused, as the next test says")

# What differs from EVERY so that each rank has half of the heads of every kind.
EVEN = {"hgrn2": {"expand_ratio": 6}, "lightnet": {"expand_ratio": 6}, "mamba2": {"n_groups": 2}}
LAYERS = {name: config | EVEN.get(name, {}) for name, config in EVERY.items()}
# Keys and values of one head, which both ranks need whole; feature maps and norms that have one weight for all heads.
SHARED = {
    "gla, one head of keys": EVERY["gla"] | {"num_kv_heads": 1, "fuse_norm": False},
    "gsa, one head of keys": EVERY["gsa"] | {"num_kv_heads": 1, "feature_map": "t2r"},
    "hedgehog": EVERY["linear_attn"] | {"num_kv_heads": 1, "feature_map": "hedgehog"},
    "mamba2, one group": EVERY["mamba2"] | {"n_groups": 1, "D_has_hdim": True, "use_bias": True},
    "one householder": EVERY["gated_deltaproduct"] | {"num_householder": 1},
}

# How often one call communicates: the sum at the end, the mean of a norm over all heads, and what is gathered whole.
REDUCED = {"lightning_attn": 2, "hgrn": 2, "hgrn2": 2, "lightnet": 2, "gsa": 2}
GATHERED = {"mamba2": 1, "gated_deltaproduct": 3}
# Submodules whose parameters are the same on every rank: low-rank inputs, norms of each head, and what is not by heads.
WHOLE = {
    "gk_proj.0", "f_proj.0", "g_proj.0", "w_proj.linear.lora.0", "x_proj.0", "x_proj.0.linear", "x_proj.2", "norm",
    "g_norm", "o_norm", "g_norm_swish_gate", "conv1d", "",
}  # fmt: skip


def train(module: nn.Module, *inputs: Any) -> list[Tensor]:
    """Two calls with a carried state, a step of AdamW with clipped gradients, and a call of what is then."""
    first, state = module(inputs[0], module.init_state(2))
    second, state = module(inputs[1], state, attention_mask=inputs[2])
    second = second * inputs[2][:, :, None]
    (first + second).sin().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    torch.optim.AdamW(module.parameters(), lr=1e-2).step()
    last, end = module(inputs[1], state)
    return [first, second, last, norm, *gradients, *module.parameters(), *tensors(state), *tensors(end)]


def assert_same(results: list[Tensor], expected: list[Tensor], name: str) -> None:
    from torch.distributed.tensor import DTensor

    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert isinstance(a, DTensor) == (i > 2), (name, i)  # the outputs are plain tensors
        whole = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(whole, b, msg=lambda text, name=name, i=i: f"{name}, {i}: {text}")


def parallel_layers(mesh: DeviceMesh, configs: dict[str, dict[str, Any]]) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    for name, config in configs.items():
        torch.manual_seed(0)
        layer = build(config, dtype=torch.float64)
        x, mask = torch.randn(2, 6, HIDDEN, dtype=torch.float64), torch.ones(2, 6, dtype=torch.long)
        mask[1, :2] = 0
        sharded = copy.deepcopy(layer)
        assert parallelize_module(sharded, mesh, tensor_parallel_plan(sharded)) is sharded
        assert all(isinstance(p, DTensor) for p in sharded.parameters()), name
        leaf = x.clone().requires_grad_()
        sharded(leaf)[0].sin().sum().backward()
        expected = x.clone().requires_grad_()
        layer(expected)[0].sin().sum().backward()
        torch.testing.assert_close(leaf.grad, expected.grad)
        layer.zero_grad()
        sharded.zero_grad()
        assert_same(train(sharded, x, x, mask), train(layer, x, x, mask), name)


def heads_are_shared(mesh: DeviceMesh) -> None:
    """Each rank holds and computes its own heads, and communicates as rarely as that allows."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    for name, config in LAYERS.items():
        layer = build(config)
        parallelize_module(layer, mesh, tensor_parallel_plan(layer))
        for path, p in layer.named_parameters():
            whole = p.placements == (Replicate(),)
            assert not whole or path.rpartition(".")[0] in WHOLE, (name, path)
        if name == "gsa":  # CommDebugMode loses count of a module that is called twice
            del layer.feature_map
            layer.feature_map = nn.functional.silu
        with CommDebugMode() as communication:
            _, state = layer(torch.randn(2, 6, HIDDEN))
        counts = {str(op).partition(".")[2]: n for op, n in communication.get_comm_counts().items()}
        expected = {"all_reduce": REDUCED.get(name, 1), "all_gather_into_tensor": GATHERED.get(name, 0)}
        assert counts == {op: n for op, n in expected.items() if n}, (name, counts)
        recurrent = state.recurrent if isinstance(state.recurrent, tuple) else (state.recurrent,)
        assert all(t.placements == (Shard(1),) for t in recurrent), name


BASE = {"vocab_size": 32, "hidden_size": HIDDEN, "num_hidden_layers": 2, "intermediate_size": 16}
MODELS = {
    "tied": {
        "layer": "GatedDeltaNet",
        "layer_options": {"num_heads": 2, "head_dim": 8},
        "tie_word_embeddings": True,
        "norm": "layer",
    },
    "bounds": {"layer": "HGRN2Attention", "layer_options": {"expand_ratio": 6}, "use_lower_bound": True},
    "rwkv6": {
        "layer": "RWKV6Attention",
        "layer_options": {"num_heads": 2, "proj_low_rank_dim": 4, "gate_low_rank_dim": 4},
        "feed_forward": "rwkv6",
        "norm": "layer",
        "norm_embeddings": True,
    },
}


def parallel_models(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = RecurrentLM(RecurrentConfig(**BASE, **config), dtype=torch.float64)
        sharded = copy.deepcopy(model)
        parallelize_module(sharded, mesh, tensor_parallel_plan(sharded))
        ids, mask = torch.randint(32, (2, 7)), torch.ones(2, 7, dtype=torch.long)
        mask[1, :2] = 0
        assert_same(train(sharded, ids, ids, mask), train(model, ids, ids, mask), name)
        kept = sharded.generate(ids, 3, attention_mask=mask)
        assert torch.equal(kept, model.generate(ids, 3, attention_mask=mask)), name
        assert all(not p.placements[0].is_replicate() for p in sharded.embeddings.parameters())


@needs_2_13
def test_layers() -> None:
    on_two_ranks(parallel_layers, LAYERS | SHARED)


@needs_2_13
def test_heads_are_shared() -> None:
    on_two_ranks(heads_are_shared)


@needs_2_13
def test_models() -> None:
    on_two_ranks(parallel_models)


@needs_2_13
def test_what_has_no_plan() -> None:
    with pytest.raises(ValueError, match="module must contain a layer of flacompose, got Linear"):
        tensor_parallel_plan(nn.Linear(2, 2))
    hybrid = RecurrentConfig(**BASE, **MODELS["tied"], attn=[{"layers": [1], "num_heads": 2}])
    with pytest.raises(ValueError, match=r"must contain no softmax attention, got some at 'layers\.1\.attn'"):
        tensor_parallel_plan(RecurrentLM(hybrid))
    model = RecurrentLM(RecurrentConfig(**BASE, **MODELS["tied"]))
    join_projections(model.layers[1])
    with pytest.raises(
        ValueError, match=r"join_projections has changed.*a joined GatedDeltaNet at 'layers\.1\.attn'"
    ):
        tensor_parallel_plan(model)


def join_sharded_layers(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    layer = build(LAYERS["gla"])
    parallelize_module(layer, mesh, tensor_parallel_plan(layer))
    with pytest.raises(
        TypeError, match=r"q_proj.weight must be a plain parameter to be joined, got a torch.*DTensor"
    ):
        join_projections(layer)


@needs_2_13
def test_sharded_layers_are_not_joined() -> None:
    on_two_ranks(join_sharded_layers)


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="of earlier releases")
def test_an_earlier_release_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs PyTorch 2.13 or later, got 2"):
        tensor_parallel_plan(build(EVERY["gla"]))
