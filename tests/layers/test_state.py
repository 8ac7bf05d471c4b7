"""The state: what goes in comes out further on, and a sequence may be cut anywhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers.truth import (
    BOUNDED,
    EVERY,
    LINEAR,
    NORMALIZED,
    RETENTION,
    assert_close,
    assert_states_close,
    build,
    floats,
    made,
    random_state,
    row,
    sequence,
    tensors,
    with_floats,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from flacompose.layers import RecurrentState
from flacompose.layers.rotary import rotary

every_layer = pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)


@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("layout", ["rows", "mask", "packed"])
@every_layer
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


# What `init_state(3)` gives each layer: recurrent states, windows of convolutions, normalisers, positions, shifts. No
# layer has a cache.
STATES = {
    "gla": ((3, 4, 3, 6), [(3, 12, 4), (3, 6, 4), (3, 12, 4)], (), (), ()),
    "simple_gla": ((3, 4, 6, 6), [(3, 24, 4), (3, 12, 4), (3, 12, 4)], (), (), ()),
    "linear_attn": ((3, 4, 6, 6), [], (3, 4, 6), (), ()),
    "retention": ((3, 4, 6, 12), [(3, 24, 4), (3, 12, 4), (3, 24, 4)], (), (3,), ()),
    "lightning_attn": ((3, 4, 6, 6), [], (), (), ()),
    "mamba": ((3, 36, 5), [(3, 36, 4)], (), (), ()),
    "mamba2": ((3, 6, 5, 8), [(3, 78, 4)], (), (), ()),
    "mamba3": ([(3, 6, 3), (3, 6, 6, 8), (3, 1, 6, 6), (3, 6, 8)], [], (), (), ()),
    "mamba3 mimo": ([(3, 6, 1), (3, 6, 6, 8), (3, 2, 6, 6), (3, 6, 8)], [], (), (), ()),
    "rwkv6": ((3, 4, 3, 6), [], (), (), (3, 24)),
    "rwkv7": ((3, 4, 6, 6), [], (), (), (3, 24)),
    "mlstm": ([(3, 4, 3, 6), (3, 4, 3), (3, 4)], [], (), (), ()),
    "griffin": ((3, 36), [(3, 36, 3)], (), (3,), ()),
    "hgrn": ((3, 24), [(3, 24, 3)] * 2, (), (), ()),
    "bounded hgrn": ((3, 48), [(3, 48, 3)] * 2, (), (), ()),
    "hgrn2": ((3, 3, 8, 8), [(3, 24, 3)] * 3, (), (), ()),
    "lightnet": ((3, 3, 8, 8), [(3, 24, 3)] * 3, (3, 3, 8), (), ()),
    "gsa": ([(3, 2, 6, 5), (3, 2, 5, 6)], [(3, 24, 3), (3, 12, 3), (3, 12, 3)], (), (), ()),
    "abc": ([(3, 2, 6, 5), (3, 2, 5, 12)], [(3, 12, 3), (3, 12, 3), (3, 24, 3)], (3, 2, 5), (3,), ()),
    "delta_net": ((3, 4, 6, 6), [(3, 24, 3)] * 3, (), (), ()),
    "gated_deltanet": ((3, 4, 6, 12), [(3, 12, 3), (3, 12, 3), (3, 48, 3)], (), (), ()),
    "gated_deltaproduct": ((3, 4, 6, 12), [(3, 12, 3), (3, 24, 3), (3, 96, 3)], (), (), ()),
    "kda": ((3, 4, 6, 3), [(3, 12, 3)] * 3, (), (), ()),
    "gdn2": ((3, 4, 6, 3), [(3, 12, 3)] * 3, (), (), ()),
    "comba": ((3, 4, 6, 12), [(3, 12, 3), (3, 12, 3), (3, 48, 3)], (), (), ()),
    "rodimus": ((3, 1, 6, 48), [(3, 48, 3)], (), (), ()),
    "based": ((3, 4, 10, 7), [], (), (), ()),
    "rebased": ((3, 4, 10, 7), [], (), (), ()),
    "mapped keys": ((3, 4, 48, 6), [], (3, 4, 48), (), ()),
}


def shapes(part):
    """The shape of a tensor, or a list of those of a tuple of tensors; of an absent part that is ()."""
    if isinstance(part, torch.Tensor):
        return tuple(part.shape)
    return [tuple(t.shape) for t in part] or ()


@pytest.mark.parametrize("name", STATES)
def test_init_state(name, device):
    """A state has the parts of its layer and is zeros, but a running logsumexp is -inf; sums are kept in float32."""
    configs = EVERY | BOUNDED | {"mapped keys": LINEAR | NORMALIZED | {"feature_map": "dpfp"}}
    layer = build(configs[name], device=device)
    state = layer.init_state(3)
    assert [shapes(part) for part in state] == [shape or () for shape in (*STATES[name], ())]
    nothing = -torch.inf if name in ("abc", "lightnet") else 0
    assert all((t == nothing).all() for t in tensors(state.normalizer))
    assert not any(t.any() for t in tensors(state._replace(normalizer=())))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        recurrent, conv, normalizer, position, shift, _ = layer.to(dtype).init_state(3)
        assert {t.dtype for t in tensors((recurrent, normalizer))} == {sums}
        assert {t.dtype for t in tensors((conv, shift))} <= {dtype}
        assert {t.dtype for t in tensors(position)} <= {torch.int64}
        assert all(
            t.device.type == device.type for t in tensors((recurrent, conv, normalizer, position, shift))
        )
    with torch.device("meta"):
        state = layer.init_state(3, device="meta")
    assert [shapes(part) for part in state] == [shape or () for shape in (*STATES[name], ())]


@every_layer
@pytest.mark.parametrize("layout", ["mask", "packed"])
def test_nothing_is_read_on_the_host(layout, config, device):
    """No value of a tensor decides what a layer does: fake tensors, which have none, go through all of it.

    Rows do in test_states.py.
    """
    with FakeTensorMode():
        layer = made(config, device=device)
        layout = {
            "mask": {"attention_mask": torch.empty(1, 6, dtype=torch.long, device=device)},
            "packed": {"cu_seqlens": torch.empty(2, dtype=torch.long, device=device)},
        }[layout]
        state = layer.init_state(1)
        y, new = layer(torch.empty(1, 6, 24, device=device), state, **layout)
        assert y.shape == (1, 6, 24)
        assert [t.shape for t in tensors(new)] == [t.shape for t in tensors(state)]
        sum(t.sum() for t in (y, *floats(new))).backward()


@pytest.mark.parametrize("start", [0, 10_000])
def test_rotary_scores_depend_on_distance_alone(start):
    """Rotary positions leave a key and a query that are as far apart as others the same product."""
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    T = 50
    position = start + torch.arange(T)[None]
    turned_q, turned_k = rotary(q.expand(1, T, 1, 32), k.expand(1, T, 1, 32), position, 10000.0)
    scores = turned_q[0, :, 0] @ turned_k[0, :, 0].T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
    torch.testing.assert_close(scores[0, 0], (q * k).sum())
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1


def test_positions_count_tokens(device):
    """Positions count tokens on from the state, without pads, in every layout; they are of any integer dtype."""
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
    """After a hundred thousand tokens no table ends, and in float64 no angle is rounded to float32."""
    layer = build(RETENTION, device=device, dtype=torch.float64)
    state = random_state(layer, 1)._replace(position=torch.tensor([100_000], device=device))
    x = torch.randn(1, 5, 24, device=device, dtype=torch.float64)
    y, new = layer(x, state)
    expected, after = sequence(RETENTION, layer.state_dict(), x[0], state)
    assert_close(y[0], expected, 1e-10)
    assert_states_close(new, after, 1e-10)


@every_layer
def test_state_of_another_dtype(config, device):
    """A state of any floating dtype is taken, and gets its gradient in that dtype."""
    layer = build(config, device=device)
    x = torch.randn(2, 5, 24, device=device)
    state = random_state(layer, 2)
    state = with_floats(state, [t.bfloat16().requires_grad_() for t in floats(state)])
    y, new = layer(x, state)
    expected, _ = layer(x, with_floats(state, [t.float() for t in floats(state)]))
    assert_close(y, expected, 1e-6)
    assert {t.dtype for t in tensors(new.recurrent)} == {torch.float32}
    y.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in floats(state))


def same(a, b):
    """Two states of equal parts, dtypes and values."""
    assert isinstance(a, RecurrentState) and pytree.tree_structure(a) == pytree.tree_structure(b)
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def apart(a, b):
    """Whether two states share no memory."""
    storages = [t.untyped_storage().data_ptr() for t in (*tensors(a), *tensors(b))]
    return len(set(storages)) == len(storages)


@every_layer
def test_is_a_value(config):
    """A state can be chosen from, joined, copied, mapped and pickled, and no copy shares memory with it."""
    layer = build(config)
    state = random_state(layer, 3)
    best = state.select(torch.tensor([2, 0, 0, 1]))
    assert same(best, pytree.tree_map(lambda t: t[[2, 0, 0, 1]], state))
    for dtype in (torch.int32, torch.uint8):
        assert same(best, state.select(torch.tensor([2, 0, 0, 1], dtype=dtype)))
    assert same(best, state.select([2, 0, 0, 1]))
    assert all(t.shape[0] == 0 for t in tensors(state.select([])))
    assert same(RecurrentState.cat([state.select([0]), state.select([1, 2])]), state)
    assert same(state.clone(), state)
    assert same(state.map(lambda t: t + 1), pytree.tree_map(lambda t: t + 1, state))
    for copied in (best, state.clone(), RecurrentState.cat([state]), copy.deepcopy(state)):
        assert apart(copied, state)
    assert same(pickle.loads(pickle.dumps(state)), state)
    spec = pytree.tree_structure(state)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    x = torch.randn(2, 3, 24)
    assert_close(layer(x, state.select([1, 1]))[0][:1], layer(x[:1], row(state, 1))[0], 1e-6)


@every_layer
def test_to(config):
    """A state is moved to the dtypes that `init_state` gives it: recurrent states and normalisers are sums."""
    layer = build(config)
    state = random_state(layer, 3)
    for dtype in (torch.bfloat16, torch.float64):
        expected = [t.dtype for t in tensors(layer.init_state(3, dtype=dtype))]
        for moved in (state.to(dtype), state.to("cpu", dtype), state.to(dtype=dtype)):
            assert [t.dtype for t in tensors(moved)] == expected
            assert_states_close(moved, state, 2**-8)
    assert same(state.to(torch.float64).to(torch.float32), state)
    assert all(a is b for a, b in zip(tensors(state.to("cpu")), tensors(state), strict=True))
    assert all(t.is_meta for t in tensors(state.to("meta")))
    assert same(state.to(device="cpu"), state)


@pytest.mark.parametrize("name", ["abc", "rwkv6"])  # which have states of every kind between them
def test_as_a_value_in_graphs(name):
    """States are copied, joined and moved in compiled and exported programs too, and gradients pass through."""
    state = random_state(build(EVERY[name]), 3)

    class Twice(torch.nn.Module):
        def forward(self, state, indices):
            both = RecurrentState.cat([state.select(indices), state.clone()])
            return both.map(lambda t: 2 * t).to(torch.float64), state.detach()

    indices = torch.tensor([2, 0])
    expected = Twice()(state, indices)
    compiled = torch.compile(Twice(), fullgraph=True, backend="aot_eager")
    program = torch.export.export(Twice(), (state, indices))
    for call in (compiled, program.module()):
        assert all(same(a, b) for a, b in zip(call(state, indices), expected, strict=True))
    leaves = with_floats(state, [t.requires_grad_() for t in floats(state)])
    for call in (Twice(), compiled):
        assert not any(t.requires_grad for t in tensors(call(leaves, indices)[1]))
    sum(t.sum() for t in floats(compiled(leaves, indices)[0])).backward()
    counts = torch.tensor([4.0, 2.0, 4.0])  # each sequence once, selected ones twice, doubled
    for t in floats(leaves):
        torch.testing.assert_close(t.grad, counts.reshape(-1, *[1] * (t.ndim - 1)).expand_as(t).to(t.dtype))


def test_refused_uses():
    """States refuse indices, dtypes and companions that they cannot take."""
    state = random_state(build(EVERY["gla"]), 3)
    with pytest.raises(TypeError, match="indices must be an integer dtype, got bool"):
        state.select(torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match=r"indices must have shape \[M\], got \(\)"):
        state.select(torch.tensor(1))
    with pytest.raises(ValueError, match="indices must be on cpu, got meta"):
        state.select(torch.tensor([0], device="meta"))
    for states, i, got in (
        (state, 0, "Tensor"),
        ([state, None], 1, "NoneType"),
        ([None, state], 0, "NoneType"),
    ):
        with pytest.raises(TypeError, match=rf"states\[{i}\] must be a RecurrentState, got {got}"):
            RecurrentState.cat(states)
    with pytest.raises(TypeError, match=r"indices\[1\] must be an int, got float"):
        state.select([0, 1.0])
    with pytest.raises(TypeError, match="dtype must be float32, bfloat16, float16 or float64, got int8"):
        state.to(dtype=torch.int8)
    with pytest.raises(TypeError, match="device must be a device where dtype is given, got torch.bfloat16"):
        state.to(torch.bfloat16, torch.float64)
    with pytest.raises(ValueError, match="states must hold at least one RecurrentState, got none"):
        RecurrentState.cat([])
    with pytest.raises(ValueError, match=r"states\[1\] must have the same parts as states\[0\]"):
        RecurrentState.cat([state, random_state(build(EVERY["rwkv6"]), 3)])
