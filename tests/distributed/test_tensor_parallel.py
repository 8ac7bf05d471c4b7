"""Heads shared out among two ranks: outputs, states, gradients and training are those of one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.ranks import on_two_ranks
from helpers.truth import EVERY, OF_EACH_KIND, build, tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flacompose.distributed import tensor_parallel_plan
from flacompose.layers import RWKV7Attention, join_projections
from flacompose.models import RecurrentConfig, RecurrentLM

HIDDEN = 24
needs_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="refused, as the next test says")

# What differs from EVERY so that each rank has half of the heads of every kind.
EVEN = {"hgrn2": {"expand_ratio": 6}, "lightnet": {"expand_ratio": 6}, "mamba2": {"n_groups": 2}}
EVEN |= {name: {"n_groups": 2} for name in ("mamba3", "mamba3 mimo")}
# A layer of Rodimus has one head.
LAYERS = {name: config | EVEN.get(name, {}) for name, config in EVERY.items() if name != "rodimus"}
# Keys and values of one head, which both ranks need whole; feature maps and norms that have one weight for all heads.
SHARED = {
    "gla, one head of keys": EVERY["gla"] | {"num_kv_heads": 1, "fuse_norm": False},
    "gsa, one head of keys": EVERY["gsa"] | {"num_kv_heads": 1, "feature_map": "t2r"},
    "hedgehog": EVERY["linear_attn"] | {"num_kv_heads": 1, "feature_map": "hedgehog"},
    "mamba2, one group": EVERY["mamba2"] | {"n_groups": 1, "D_has_hdim": True, "use_bias": True},
    "one householder": EVERY["gated_deltaproduct"] | {"num_householder": 1},
    "gated_deltanet, one head of keys": EVERY["gated_deltanet"] | {"num_heads": 1, "num_v_heads": 6},
    "gated_deltaproduct, one head of keys": EVERY["gated_deltaproduct"] | {"num_heads": 1, "num_v_heads": 6},
    "kda, one head of keys": EVERY["kda"] | {"num_heads": 1, "num_v_heads": 6},
    "gdn2, one head of keys": EVERY["gdn2"] | {"num_heads": 1, "num_v_heads": 6},
    "comba, one head of keys": EVERY["comba"] | {"num_heads": 1, "num_v_heads": 6},
}
# Heads of keys, groups and steps of a token that two ranks cannot share out, and unlike numbers of channels.
KEYS, VALUES = {"num_heads": 6, "num_kv_heads": 3}, {"num_heads": 3, "num_v_heads": 6}
ODD = {
    "gla, 3 heads of keys": EVERY["gla"] | KEYS,
    "simple_gla, 3 heads of keys": EVERY["simple_gla"] | KEYS,
    "linear_attn, 3 heads of keys": EVERY["linear_attn"] | KEYS,
    "retention, 3 heads of keys": EVERY["retention"] | KEYS,
    "gsa, 3 heads of keys": EVERY["gsa"] | KEYS,
    "gated_deltanet, 3 heads of keys": EVERY["gated_deltanet"] | VALUES,
    "gated_deltaproduct, 3 heads of keys, 3 steps": EVERY["gated_deltaproduct"] | VALUES | {"num_householder": 3},
    "gated_deltaproduct, the same without decays": EVERY["gated_deltaproduct"] | VALUES | {"num_householder": 3,
                                  "use_forget_gate": False},
    "gated_deltaproduct, 3 heads of keys, 1 step": EVERY["gated_deltaproduct"] | VALUES | {"num_householder": 1},
    "kda, 3 heads of keys": EVERY["kda"] | VALUES,
    "gdn2, 3 heads of keys": EVERY["gdn2"] | VALUES,
    "comba, 3 heads of keys": EVERY["comba"] | VALUES,
    "mamba2, 3 groups": EVERY["mamba2"],
    "mamba3 mimo, 3 groups": EVERY["mamba3 mimo"],
    "hgrn, 27 channels": EVERY["hgrn"] | {"expand_ratio": 1.125},
}  # fmt: skip

# How often one call communicates: the sum at the end, the mean of a norm over all heads, and what is gathered whole.
REDUCED = {
    "lightning_attn": 2,
    "mamba": 2,
    "hgrn": 2,
    "hgrn2": 2,
    "lightnet": 2,
    "gsa": 2,
    "mamba2, one group": 2,
}
GATHERED = {
    "mamba": 1,
    "mamba2": 1,
    "mamba2, one group": 1,
    "mamba3": 1,
    "mamba3 mimo": 2,
    "mamba3 mimo, 3 groups": 4,
    "gated_deltaproduct": 3,
    "gla, one head of keys": 3,
    "gsa, one head of keys": 4,
    "gated_deltanet, one head of keys": 2,
    "gated_deltaproduct, one head of keys": 4,
    "kda, one head of keys": 2,
    "gdn2, one head of keys": 6,  # q, k, the gate, the decays and their two parameters
    "comba, one head of keys": 4,  # q, k, D and the inner decay
    # What cannot be shared out: k, v and the decays; k and v; q and k; k, v and beta; what is normed.
    "gla, 3 heads of keys": 3,
    "simple_gla, 3 heads of keys": 2,
    "linear_attn, 3 heads of keys": 2,
    "retention, 3 heads of keys": 2,
    "gsa, 3 heads of keys": 4,  # q too
    "gated_deltanet, 3 heads of keys": 2,
    "kda, 3 heads of keys": 2,
    "gdn2, 3 heads of keys": 6,
    "comba, 3 heads of keys": 4,
    "gated_deltaproduct, 3 heads of keys, 1 step": 2,
    "gated_deltaproduct, 3 heads of keys, 3 steps": 4,  # q too
    "gated_deltaproduct, the same without decays": 4,
    "mamba2, 3 groups": 2,
    "hgrn, 27 channels": 1,
}
# Submodules whose parameters are the same on every rank: low-rank inputs, norms of each head, and what is not by heads.
WHOLE = {
    "gk_proj.0", "f_proj.0", "g_proj.0", "w_proj.linear.lora.0", "x_proj.0", "x_proj.0.linear", "x_proj.2", "norm",
    "w_lora.lora.0", "v_lora.lora.0", "a_lora.lora.0", "g_lora.lora.0", "g_norm", "o_norm", "g_norm_swish_gate",
    "conv1d", "feature_map", "feature_map.layer", "B_norm", "C_norm", "",
}  # fmt: skip

BIASES = ("linear_out.bias", "out_proj.bias")  # of projections from heads, added to the sum over ranks


def train(module: nn.Module, *inputs: Any) -> list[Tensor]:
    """Three calls with a carried state, a step of AdamW with clipped gradients, and a call of what is then."""
    first, state = module(inputs[0], module.init_state(2))
    second, state = module(inputs[1], state, attention_mask=inputs[2])
    second = second * inputs[2][:, :, None]
    third, state = module(inputs[0][:, :1], state)
    (first + second + third).sin().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    torch.optim.AdamW(module.parameters(), lr=1e-2).step()
    last, end = module(inputs[1], state)
    outputs = [first, second, third, last, norm]
    return [*outputs, *gradients, *module.parameters(), *tensors(state), *tensors(end)]


def gradients_of_state(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Those of a loss that depends on no output: of what makes these alone, nothing."""
    from torch.distributed.tensor import DTensor

    _, state = module(x, module(x, module.init_state(2))[1])
    parts = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors(state)]
    sum(t.sin().sum() for t in parts if t.is_floating_point()).backward()
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
    module.zero_grad()
    return gradients


def assert_same(results: list[Tensor], expected: list[Tensor], name: str) -> None:
    from torch.distributed.tensor import DTensor

    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert isinstance(a, DTensor) == (i > 3), (name, i)  # the outputs are plain tensors
        full = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(full, b, msg=lambda text, name=name, i=i: f"{name}, {i}: {text}")


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
        for (path, a), b in zip(sharded.named_parameters(), layer.parameters(), strict=True):
            torch.testing.assert_close(
                a.grad.full_tensor(), b.grad, msg=lambda t, at=(name, path): f"{at}: {t}"
            )
        if name not in LAYERS:  # of a layer with other heads, what is sharded otherwise is seen by now
            continue
        layer.zero_grad()
        sharded.zero_grad()
        for a, b in zip(gradients_of_state(sharded, x), gradients_of_state(layer, x), strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}, of the state: {text}")
        if name in OF_EACH_KIND:
            assert_same(train(sharded, x, x, mask), train(layer, x, x, mask), name)


def heads_are_shared(mesh: DeviceMesh) -> None:
    """Each rank holds and computes its own heads, and communicates as rarely as that allows."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    one = {name: config for name, config in SHARED.items() if "one head" in name}
    one |= {"mamba2, one group": EVERY["mamba2"] | {"n_groups": 1}}
    for name, config in (LAYERS | one | ODD).items():
        layer = build(config)
        parallelize_module(layer, mesh, tensor_parallel_plan(layer))
        for path, p in layer.named_parameters():
            replicated = p.placements == (Replicate(),)
            assert not replicated or path.rpartition(".")[0] in WHOLE or path in BIASES, (name, path)
        if hasattr(layer, "feature_map"):  # CommDebugMode loses count of a module that is called twice
            feature_map = layer.feature_map
            del layer.feature_map
            layer.feature_map = nn.functional.silu if name.startswith("gsa") else feature_map.forward
        with CommDebugMode() as communication:
            _, state = layer(torch.randn(2, 6, HIDDEN))
        counts = {str(op).partition(".")[2]: n for op, n in communication.get_comm_counts().items()}
        expected = {"all_reduce": REDUCED.get(name, 1), "all_gather_into_tensor": GATHERED.get(name, 0)}
        assert counts == {op: n for op, n in expected.items() if n}, (name, counts)
        recurrent = state.recurrent if isinstance(state.recurrent, tuple) else (state.recurrent,)
        # The state of gated slot attention has the heads of keys.
        replicated = name in ("gsa, one head of keys", "gsa, 3 heads of keys")
        placements = [Replicate() if replicated else Shard(1)] * len(recurrent)
        if name == "mamba3 mimo, 3 groups":  # whose last keys and values every rank has
            placements[2:] = [Replicate(), Replicate()]
        elif name.startswith("mamba3"):  # keys have an axis more before the heads
            placements[2] = Shard(2)
        found = [t.placements for t in recurrent]
        assert found == [(p,) for p in placements], (name, found)
    # The gradients of k, v and the decays, and of q and k, are summed over ranks, not gathered from them.
    for name, sums in ("gla, one head of keys", 3), ("kda, one head of keys", 2):
        layer = build(SHARED[name])
        parallelize_module(layer, mesh, tensor_parallel_plan(layer))
        y, _ = layer(torch.randn(2, 6, HIDDEN))
        with CommDebugMode() as communication:
            y.sum().backward()
        counts = {str(op).partition(".")[2]: n for op, n in communication.get_comm_counts().items()}
        assert counts == {"reduce_scatter_tensor": sums}, (name, counts)
    first = RWKV7Attention(hidden_size=HIDDEN, head_dim=6, layer_idx=0)
    parallelize_module(first, mesh, tensor_parallel_plan(first))
    _, _, v_first = first(torch.randn(2, 6, HIDDEN))
    assert v_first.placements == (Shard(2),)


BASE = {"vocab_size": 32, "hidden_size": HIDDEN, "num_hidden_layers": 2, "intermediate_size": 16}
MODELS = {
    "tied": {"layer": "GatedDeltaNet", "layer_options": {"num_heads": 2, "head_dim": 8}, "tie_word_embeddings": True,
             "norm": "layer"},
    "bounds": {"layer": "HGRN2Attention", "layer_options": {"expand_ratio": 6}, "use_lower_bound": True},
    "rwkv6": {"layer": "RWKV6Attention", "layer_options": {"num_heads": 2, "proj_low_rank_dim": 4,
              "gate_low_rank_dim": 4}, "feed_forward": "rwkv6", "norm": "layer", "norm_embeddings": True},
    "rwkv7": {"layer": "RWKV7Attention", "layer_options": {"head_dim": 6}, "num_hidden_layers": 3,
              "feed_forward": "rwkv7", "norm": "layer"},
    "odd": {"layer": "HGRNAttention", "vocab_size": 33, "hidden_size": 25, "intermediate_size": 15},
    "odd and tied": {"layer": "Mamba2", "layer_options": {"head_dim": 5, "expand": 2, "n_groups": 5},
                     "vocab_size": 33, "hidden_size": 25, "intermediate_size": 15, "tie_word_embeddings": True},
}  # fmt: skip


def parallel_models(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = RecurrentLM(RecurrentConfig(**BASE | config), dtype=torch.float64)
        with torch.no_grad():
            for (
                p
            ) in model.parameters():  # some of which are 0 at first, so that what they multiply has no effect
                p.add_(torch.randn_like(p), alpha=0.1)
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
    on_two_ranks(parallel_layers, LAYERS | SHARED | ODD)


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
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got str"):
        tensor_parallel_plan("gla")
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


def shard_rows_of_joined_layers(mesh: DeviceMesh) -> None:
    """What queries and gates alone need of the fused product has no gradient from the state."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    torch.manual_seed(0)
    layer = build(LAYERS["gla"], dtype=torch.float64)
    join_projections(layer)
    sharded = distribute_module(copy.deepcopy(layer), mesh)
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    results = gradients_of_state(sharded, distribute_tensor(x, mesh, [Shard(0)]))
    for a, b in zip(results, gradients_of_state(layer, x), strict=True):
        torch.testing.assert_close(a, b)


@needs_2_13
def test_sharded_and_joined_layers() -> None:
    on_two_ranks(join_sharded_layers)
    on_two_ranks(shard_rows_of_joined_layers)


def refuse(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    gla, delta = LAYERS["gla"], LAYERS["gated_deltanet"]
    for config, message in (
        (gla | {"num_heads": 3, "num_kv_heads": 3}, "num_heads .*, got 3 in the GatedLinearAttention at '1'"),
        (delta | {"num_v_heads": 3, "num_heads": 1}, "num_v_heads .*, got 3 in the GatedDeltaNet at '1'"),
        (EVERY["rodimus"], "num_heads .*, got 1 in the RodimusAttention at '1'"),
    ):
        layers = nn.ModuleList([build(gla), build(config)])
        with pytest.raises(
            ValueError, match=message.replace(".*", "must be a multiple of the number of ranks = 2")
        ):
            parallelize_module(layers, mesh, tensor_parallel_plan(layers))
        assert not any(isinstance(p, DTensor) for p in layers.parameters())
    layer = build(gla)
    parallelize_module(layer, mesh, tensor_parallel_plan(layer))
    with pytest.raises(TypeError, match="cu_seqlens must not be given .* tensor_parallel_plan"):
        layer(torch.randn(1, 6, HIDDEN), cu_seqlens=torch.tensor([0, 2, 6]))
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"a GatedLinearAttention that .* torch\.no_grad"),
    ):
        layer(torch.randn(1, 6, HIDDEN))
    grid, layer = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), build(gla)
    with pytest.raises(ValueError, match="device_mesh must have one dimension, .* got 2"):
        parallelize_module(layer, grid, tensor_parallel_plan(layer))
    assert not any(isinstance(p, DTensor) for p in layer.parameters())
    parallelize_module(layer, grid["tp"], tensor_parallel_plan(layer))


@needs_2_13
def test_refused_heads_change_nothing() -> None:
    on_two_ranks(refuse)


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="of earlier releases")
def test_an_earlier_release_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs PyTorch 2.13 or later, got 2"):
        tensor_parallel_plan(build(EVERY["gla"]))
