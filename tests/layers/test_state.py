"""The state: what goes in comes out further on, and a sequence may be cut anywhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from flacompose.layers import RecurrentState

from .truth import (
    CONV,
    GLA,
    LAYERS,
    LINEAR,
    NORMALIZED,
    RETENTION,
    assert_close,
    assert_states_close,
    build,
    floats,
    random_state,
    row,
    sequence,
    tensors,
    with_floats,
)

each_layer = pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
CONFIGS = {"recurrent": GLA, "conv of 1": GLA | CONV | {"conv_size": 1}} | LAYERS


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("pieces", [[1] * 9, [2, 7], [3, 1, 5], [70, 1, 64]], ids=str)
def test_split(config, pieces, device):
    layer = build(config, device=device, dtype=torch.float64)
    x = torch.randn(2, sum(pieces), 24, device=device, dtype=torch.float64)
    state = layer.init_state(2)
    out = []
    for piece in x.split(pieces, 1):
        y, state = layer(piece, state)
        out.append(y)
    whole, last = layer(x)
    assert_close(torch.cat(out, 1), whole, 1e-12)
    assert_states_close(state, last, 1e-12)
    for b in range(2):
        expected, after = sequence(config, layer.state_dict(), x[b])
        assert_close(whole[b], expected, 1e-11)
        assert_states_close(row(last, b), after, 1e-11)


@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("layout", ["rows", "mask", "packed"])
@each_layer
def test_never_written_to(config, layout, T, device):
    """Inputs stay as they are, and what comes out shares memory with nothing that went in."""
    layer = build(config, device=device)
    x = torch.randn(1, T, 24, device=device)
    arguments = {
        "rows": {},
        "mask": {"attention_mask": torch.ones(1, T, dtype=torch.long, device=device)},
        "packed": {"cu_seqlens": torch.tensor([0, T], device=device)},
    }[layout]
    state = random_state(layer, 1)
    given = [x, *tensors(state), *arguments.values()]
    before = copy.deepcopy(given)
    with torch.no_grad():
        y, new = layer(x, state, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    storages = [t.untyped_storage().data_ptr() for t in (*given, y, *tensors(new))]
    assert len(set(storages)) == len(storages)
    assert all(t.is_contiguous() for t in tensors(new))


def test_init_state(device):
    layer = build(GLA | {"num_kv_heads": 2, "use_short_conv": True}, device=device)
    state = layer.init_state(3)
    assert state.recurrent.shape == (3, 4, 3, 6)
    assert state.recurrent.dtype == torch.float32
    assert [tuple(c.shape) for c in state.conv] == [(3, 12, 4), (3, 6, 4), (3, 12, 4)]
    assert all(t.device.type == device.type and not t.any() for t in tensors(state))
    assert {c.dtype for c in layer.bfloat16().init_state(1).conv} == {torch.bfloat16}
    assert {t.dtype for t in tensors(layer.double().init_state(1))} == {torch.float64}
    assert build(GLA).init_state(3)[1:] == ((), (), (), ())


def test_init_state_of_what_else_is_carried(device):
    """The state has the size of mapped keys, their sum where it is divided by, and no dtype but int64 for positions."""
    state = build(LINEAR | NORMALIZED | {"feature_map": "dpfp"}, device=device).init_state(3)
    assert state.recurrent.shape == (3, 4, 48, 6)
    assert state.normalizer.shape == (3, 4, 48)
    assert state.normalizer.dtype == torch.float32
    assert state.conv == () and state.position == ()
    state = build(RETENTION, device=device).bfloat16().init_state(3)
    assert state.position.tolist() == [0, 0, 0]
    assert state.position.dtype == torch.int64
    assert state.normalizer == ()


@each_layer
@pytest.mark.parametrize("layout", ["rows", "mask", "packed"])
def test_nothing_is_read_on_the_host(layout, config, device, monkeypatch):
    layer = build(config, device=device)
    x, state = torch.randn(1, 6, 24, device=device), random_state(layer, 1)
    arguments = {
        "rows": {},
        "mask": {"attention_mask": torch.tensor([[0, 1, 1, 0, 1, 0]], device=device)},
        "packed": {"cu_seqlens": torch.tensor([0, 5], device=device)},
    }[layout]
    expected, last = layer(x, state, **arguments)

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor's value is read on the host")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        y, new = layer(x, state, **arguments)
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(tensors(new), tensors(last), strict=True))


def test_positions_count_tokens(device):
    """On from the state, without pads, in every layout; of any integer dtype."""
    layer = build(RETENTION, device=device)
    x = torch.randn(2, 5, 24, device=device)
    start = layer.init_state(2)._replace(position=torch.tensor([7, 0], dtype=torch.int32, device=device))
    _, state = layer(x, start)
    assert state.position.tolist() == [12, 5]
    assert state.position.dtype == torch.int64
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], device=device)
    assert layer(x, start, attention_mask=mask)[1].position.tolist() == [10, 0]
    assert layer(x[:1], start, cu_seqlens=torch.tensor([0, 3, 3], device=device))[1].position.tolist() == [
        10,
        0,
    ]


def test_far_positions(device):
    """After a hundred thousand tokens, in float64: no table ends, and no angle is rounded to float32."""
    layer = build(RETENTION, device=device, dtype=torch.float64)
    state = random_state(layer, 1)._replace(position=torch.tensor([100_000], device=device))
    x = torch.randn(1, 5, 24, device=device, dtype=torch.float64)
    y, new = layer(x, state)
    expected, after = sequence(RETENTION, layer.state_dict(), x[0], state)
    assert_close(y[0], expected, 1e-10)
    assert_states_close(new, after, 1e-10)


@each_layer
def test_state_of_another_dtype(config, device):
    """A state of any floating dtype is taken, and gets its gradient in that dtype."""
    layer = build(config, device=device)
    x = torch.randn(2, 5, 24, device=device)
    state = random_state(layer, 2)
    state = with_floats(state, [t.bfloat16().requires_grad_() for t in floats(state)])
    y, new = layer(x, state)
    expected, _ = layer(x, with_floats(state, [t.float() for t in floats(state)]))
    assert_close(y, expected, 1e-6)
    assert new.recurrent.dtype == torch.float32
    y.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in floats(state))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_is_a_pytree(config):
    layer = build(config)
    state = random_state(layer, 2)
    x = torch.randn(1, 3, 24)
    picked = pytree.tree_map(lambda t: t[[1]], state)
    assert torch.equal(layer(x, picked)[0], layer(x, row(state, 1))[0])
    for copied in (
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        pytree.tree_map(torch.clone, state),
    ):
        assert isinstance(copied, RecurrentState)
        assert all(torch.equal(a, b) for a, b in zip(tensors(copied), tensors(state), strict=True))
    spec = pytree.tree_structure(state)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
