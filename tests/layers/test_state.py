"""The state: what goes in comes out further on, and a sequence may be cut anywhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from flacompose.layers import RecurrentState

from .truth import assert_close, assert_states_close, build, random_state, row, sequence, tensors

CONFIG = {"hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "use_short_conv": True}
CONFIGS = [{"hidden_size": 24, "num_heads": 4}, CONFIG, CONFIG | {"conv_size": 1}]


@pytest.mark.parametrize("config", CONFIGS, ids=["recurrent", "conv", "conv of 1"])
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


def test_gradients_cross_a_split(device):
    """Through a carried state as through the whole; and through a detached one not at all."""
    layer = build(CONFIG, device=device, dtype=torch.float64)
    x = torch.randn(2, 9, 24, device=device, dtype=torch.float64, requires_grad=True)

    def loss(y, state):
        return sum((t**2).sum() for t in (y, *tensors(state)))

    parameters = [x, *layer.parameters()]
    y, state = layer(x)
    whole = torch.autograd.grad(loss(y, state), parameters)
    y1, between = layer(x[:, :4])
    y2, state = layer(x[:, 4:], between)
    split = torch.autograd.grad(loss(torch.cat([y1, y2], 1), state), parameters)
    for a, b in zip(split, whole, strict=True):
        assert_close(a, b, 1e-10)

    y1, between = layer(x[:, :4])
    cut = between.detach()
    assert not any(t.requires_grad for t in tensors(cut))
    assert all(torch.equal(a, b) for a, b in zip(tensors(cut), tensors(between), strict=True))
    (dx,) = torch.autograd.grad(loss(*layer(x[:, 4:], cut)), x)
    assert not dx[:, :4].any()
    assert dx[:, 4:].all()


@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("layout", ["rows", "mask", "packed"])
def test_never_written_to(layout, T, device):
    """Inputs stay as they are, and what comes out shares memory with nothing that went in."""
    layer = build(CONFIG, device=device)
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
    layer = build(CONFIG, device=device)
    state = layer.init_state(3)
    assert state.recurrent.shape == (3, 4, 3, 6)
    assert state.recurrent.dtype == torch.float32
    assert [tuple(c.shape) for c in state.conv] == [(3, 12, 4), (3, 6, 4), (3, 12, 4)]
    assert all(t.device.type == device.type and not t.any() for t in tensors(state))
    assert {c.dtype for c in layer.bfloat16().init_state(1).conv} == {torch.bfloat16}
    assert {t.dtype for t in tensors(layer.double().init_state(1))} == {torch.float64}
    assert build(CONFIGS[0]).init_state(3).conv == ()


def test_state_of_another_dtype(device):
    """A state of any floating dtype is taken, and gets its gradient in that dtype."""
    layer = build(CONFIG, device=device)
    x = torch.randn(2, 5, 24, device=device)
    state = pytree.tree_map(lambda t: t.bfloat16().requires_grad_(), random_state(layer, 2))
    y, new = layer(x, state)
    expected, _ = layer(x, pytree.tree_map(torch.Tensor.float, state))
    assert_close(y, expected, 1e-6)
    assert new.recurrent.dtype == torch.float32
    y.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in tensors(state))


@pytest.mark.parametrize("config", CONFIGS[:2], ids=["recurrent", "conv"])
def test_is_a_pytree(config):
    state = random_state(build(config), 2)
    for copied in (
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        pytree.tree_map(torch.clone, state),
    ):
        assert isinstance(copied, RecurrentState)
        assert all(torch.equal(a, b) for a, b in zip(tensors(copied), tensors(state), strict=True))
    spec = pytree.tree_structure(state)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
