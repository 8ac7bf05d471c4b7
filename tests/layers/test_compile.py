"""One graph for every length: compiled, trained, exported, saved and loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

import flacompose
from flacompose.layers import RecurrentState

from .truth import (
    GLA,
    LAYERS,
    assert_close,
    assert_states_close,
    build,
    floats,
    random_state,
    tensors,
    with_floats,
)

SMALL = {"hidden_size": 16, "num_heads": 2}
CONFIGS = {name: config | SMALL | {"num_kv_heads": 1} for name, config in LAYERS.items()}
LENGTHS = [70, 2, 3, 64, 65, 165]


def arguments(layout, T, device, N=3):
    """The number of sequences in one row of ``T`` tokens, and what tells the layer."""
    if layout == "mask":
        return 1, {"attention_mask": (torch.rand(1, T, device=device) < 0.7).long()}
    if layout == "packed":
        bounds = torch.arange(N + 1, device=device) * (T - 1) // N  # a tail, and in short rows empty ones
        return N, {"cu_seqlens": bounds}
    return 1, {}


def train(call, layer, x, state, given):
    """The output, the state, and the gradients of everything."""
    leaves = [t.detach().requires_grad_() for t in (x, *floats(state))]
    y, new = call(leaves[0], with_floats(state, leaves[1:]), **given)
    loss = sum((t.float() ** 2).sum() for t in (y, *floats(new)))
    return [y, *tensors(new), *torch.autograd.grad(loss, [*leaves, *layer.parameters()])]


@pytest.mark.parametrize("layout", ["mask", "packed"])
@pytest.mark.parametrize("name", ["gla", "linear_attn", "retention"])
def test_training_at_batch_1(name, layout, device):
    layer = build(CONFIGS[name], device=device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, T in enumerate(LENGTHS):
        N, given = arguments(layout, T, device)
        x, state = torch.randn(1, T, 16, device=device), random_state(layer, N)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = train(compiled, layer, x, state, given)
        for a, b in zip(actual, train(layer, layer, x, state, given), strict=True):
            assert_close(a, b, 1e-4)


@pytest.mark.parametrize("config", [GLA | SMALL, *CONFIGS.values()], ids=["recurrent", *CONFIGS])
def test_segments_then_tokens(config, device):
    """A carried state meets one graph for segments and one for tokens, whatever the order."""
    layer = build(config, device=device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(2, 90, 16, device=device)
    state, out = layer.init_state(2), []
    with torch.no_grad():
        for i, piece in enumerate(x.split([70, 1, 5, 1, 12, 1], 1)):
            with torch._dynamo.config.patch(error_on_recompile=i > 1):
                y, state = compiled(piece, state)
            out.append(y)
        expected, last = layer(x)
    assert_close(torch.cat(out, 1), expected, 2e-5)
    assert_states_close(state, last, 2e-5)


T_DIM, B_DIM, N_DIM = Dim("T", min=2, max=2**20), Dim("B", max=2**10), Dim("sequences", max=2**10)


def exported(layer, layout, device):
    N, given = arguments(layout, 37, device)
    rows = 1 if layout == "packed" else 2
    batch = {} if layout == "packed" else {0: B_DIM}
    if layout == "mask":
        given = {"attention_mask": torch.ones(2, 37, dtype=torch.long, device=device)}
    states = {0: N_DIM} if layout == "packed" else batch
    state = random_state(layer, N if layout == "packed" else rows)
    shapes = {
        "hidden_states": {**batch, 1: T_DIM},
        "state": pytree.tree_map(lambda _: states, state),
        "attention_mask": {0: B_DIM, 1: T_DIM} if layout == "mask" else None,
        "cu_seqlens": {0: N_DIM + 1} if layout == "packed" else None,
    }
    x = torch.randn(rows, 37, 16, device=device)
    given = {"attention_mask": None, "cu_seqlens": None} | given
    return torch.export.export(layer, (x, state), given, dynamic_shapes=shapes)


# Linear attention sums keys beside values.
NODES = {
    "gla": [torch.ops.flacompose.vector_decay_chunk.default],
    "simple_gla": [torch.ops.flacompose.scalar_decay_chunk.default],
    "linear_attn": [torch.ops.flacompose.scalar_decay_chunk.default] * 2,
    "retention": [torch.ops.flacompose.scalar_decay_chunk.default],
}


@pytest.mark.parametrize("layout", ["rows", "mask", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_export(name, layout, device):
    layer = build(CONFIGS[name], device=device)
    program = exported(layer, layout, device)
    assert [n.target for n in program.graph.nodes if "flacompose" in str(n.target)] == NODES[name]
    module = program.module()
    for i, T in enumerate(LENGTHS[1:]):
        N, given = arguments(layout, T, device, N=1 + i)
        given = {"attention_mask": None, "cu_seqlens": None} | given
        x, state = torch.randn(1, T, 16, device=device), random_state(layer, N)
        with torch.no_grad():
            y, new = module(x, state, **given)
            expected, last = layer(x, state, **given)
        assert isinstance(new, RecurrentState)
        assert_close(y, expected, 1e-6)
        assert_states_close(new, last, 1e-6)


LOAD = """
import sys
import torch
import flacompose
from flacompose.layers import RecurrentState

for case in sys.argv[1:]:
    module = torch.export.load(f"{case}.pt2").module()
    x, *state = torch.load(f"{case}.pt")
    y, state = module(x, RecurrentState(*state), attention_mask=None, cu_seqlens=None)
    assert isinstance(state, RecurrentState), type(state)
    torch.save([y, *state], f"{case}.pt")
"""


def test_load_in_another_process(tmp_path, device):
    expected = {}
    for name, config in CONFIGS.items():
        layer = build(config, device=device)
        torch.export.save(exported(layer, "rows", device), tmp_path / f"{name}.pt2")
        x, state = torch.randn(3, 165, 16, device=device), random_state(layer, 3)
        torch.save((x, *state), tmp_path / f"{name}.pt")
        with torch.no_grad():
            expected[name] = layer(x, state)
    package = str(Path(flacompose.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", LOAD, *(str(tmp_path / name) for name in CONFIGS)],
        check=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])},
    )
    for name, (y, new) in expected.items():
        loaded, *state = torch.load(tmp_path / f"{name}.pt")
        assert_close(loaded, y, 1e-6)
        assert_states_close(RecurrentState(*state), new, 1e-6)
