"""The states after each of the last tokens: each is that of a shorter call, and a sequence goes on from any of them."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
import torch._dynamo
from helpers.truth import (
    ALIKE,
    DISTINCT,
    EVERY,
    assert_close,
    assert_states_close,
    build,
    floats,
    made,
    precision,
    random_state,
    row,
    tensors,
    tokens_of,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.utils import _pytree as pytree

from flacompose.layers import RecurrentState, RecurrentStates, ShortConvolution
from flacompose.layers.recurrent import StatefulLayer
from flacompose.models.feed_forward import RWKV6FeedForward, RWKV7FeedForward
from flacompose.models.softmax_attention import SoftmaxAttention

from .test_laws import LAYOUTS

# With those that only models have, which are built with other arguments.
OTHERS = {
    "softmax attention": {"layer": SoftmaxAttention, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2},
    "windowed attention": {"layer": SoftmaxAttention, "hidden_size": 24, "num_heads": 2, "window_size": 3},
    "rwkv6 feed-forward": {"layer": RWKV6FeedForward, "hidden_size": 24, "intermediate_size": 40},
    "rwkv7 feed-forward": {"layer": RWKV7FeedForward, "hidden_size": 24, "intermediate_size": 40},
}
ALL = {name: config for name, config in LAYOUTS.items() if name not in ALIKE} | OTHERS
each_case = pytest.mark.parametrize("config", ALL.values(), ids=ALL)
each_layer = pytest.mark.parametrize("config", (DISTINCT | OTHERS).values(), ids=DISTINCT | OTHERS)
# A convolution, positions, shifts, several tokens in one's place and each other recurrence are compiled or exported.
COMPILED = ("gla", "abc", "rwkv6", "mamba3", "griffin", "hgrn", "gated_deltaproduct", *list(OTHERS)[:3])
EXPORTED = ("retention", "gsa", "rwkv7", "mamba", "mamba2", "mlstm", *list(OTHERS)[1:])


def state_of(layer: StatefulLayer, N: int) -> RecurrentState:
    """Any state, of softmax attention one after five tokens, whose cache has more places than those."""
    if not isinstance(layer, SoftmaxAttention):
        return random_state(layer, N)
    mask = torch.arange(7, device=next(layer.parameters()).device) < 5
    with torch.no_grad():
        return layer(tokens_of(layer, N, 7), attention_mask=mask.expand(N, 7))[1]


def assert_state_is(actual: RecurrentState, expected: RecurrentState, relative: float) -> None:
    """Of a cache, what the first tokens have written: what is in the other places means nothing."""
    assert type(actual) is RecurrentState
    if expected.cache:
        count = int(expected.position.max())
        actual, expected = (
            s._replace(cache=tuple(x[:, :count] for x in s.cache)) for s in (actual, expected)
        )
    assert [t.dtype for t in tensors(actual)] == [t.dtype for t in tensors(expected)]
    assert_states_close(actual, expected, relative)


@each_case
@torch.no_grad()
def test_states_are_those_of_shorter_calls(config, device):
    """For every token, from zeros and from a state, and the output is what it is without them."""
    dtype, relative = precision(device)
    layer = build(config, device=device, dtype=dtype)
    for T, n in ((1, 1), (6, 6), (20, 3)):
        x = tokens_of(layer, 2, T)
        for state in (None, state_of(layer, 2)):
            y, states = layer(x, state, num_states=n)
            assert type(states) is RecurrentStates
            assert all(t.shape[:2] == (2, n) for t in tensors(states._replace(cache=())))
            assert all(t.is_contiguous() for t in tensors(states))
            assert_close(y, layer(x, state)[0], relative)
            for i in range(n):
                _, expected = layer(x[:, : T - n + 1 + i], state)
                assert_state_is(states.at(i), expected, relative)
                assert_state_is(states.at(i - n), expected, relative)


@each_case
@torch.no_grad()
def test_going_on_from_one_state_for_each_row(config, device):
    """Some rows take back more tokens than others, and what they then read gives what it gives without those."""
    dtype, relative = precision(device)
    layer = build(config, device=device, dtype=dtype)
    x, following = tokens_of(layer, 3, 5), tokens_of(layer, 3, 4)
    state = state_of(layer, 3)
    index = torch.tensor([3, 0, 2], device=device)
    _, states = layer(x, state, num_states=4)
    for given in (index, index.int()):
        y, new = layer(following, states.at(given))
        _, newer = layer(following, states.at(given), num_states=2)
        for b in range(3):
            kept = 2 + int(index[b])
            whole = torch.cat([x[b : b + 1, :kept], following[b : b + 1]], 1)
            expected, after = layer(whole, row(state, b))
            assert_close(y[b : b + 1], expected[:, kept:], relative)
            assert_state_is(row(new, b), after, relative)
            assert_state_is(row(newer.at(-1), b), after, relative)


def with_places(state: RecurrentState, places: int) -> RecurrentState:
    """Its cache, if it has one, with so many places."""
    pads = [(0, 0, 0, 0, 0, places - t.shape[1]) for t in state.cache]
    return state._replace(cache=tuple(map(nn.functional.pad, state.cache, pads)))


@each_case
def test_gradients(config, device):
    """Through a state that one row of several goes on from."""
    layer = build(config, device=device, dtype=torch.float64)
    x = tokens_of(layer, 2, 4)
    state = state_of(layer, 2)
    index = torch.tensor([0, 2], device=device)

    def gradients(through_states: bool) -> list[torch.Tensor]:
        layer.zero_grad()
        inputs, start = x.clone().requires_grad_(), state.map(lambda t: t.clone())
        leaves = [t.requires_grad_() for t in floats(start)]
        if through_states:
            y, states = layer(inputs, start, num_states=3)
            chosen = states.at(index)
        else:
            y, _ = layer(inputs, start)
            calls = [layer(inputs[b : b + 1, : 2 + i], row(start, b))[1] for b, i in enumerate([0, 2])]
            chosen = RecurrentState.cat([with_places(call, 12) for call in calls])
        out, _ = layer(inputs, chosen)
        (y.square().sum() + out.sin().sum()).backward()
        grads = [inputs.grad, *(t.grad for t in leaves), *(p.grad for p in layer.parameters())]
        return [torch.zeros(()) if g is None else g for g in grads]

    for actual, expected in zip(gradients(True), gradients(False), strict=True):
        # Of terms that cancel, as keys that are normed have: the largest gradient is the scale.
        assert (actual - expected).norm() <= 1e-9 * (1 + expected.norm())


def verify(layer, x, state, index):
    """A call of a few tokens, some of which are taken back."""
    y, states = layer(x, state, num_states=3)
    return y, states.at(index)


@pytest.mark.parametrize("name", COMPILED)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_graph_for_every_length(name, device, few_levels):
    layer = build(ALL[name], device=device)
    # Graphs and guards are Dynamo's. What follows it sees these layers in `test_export`, one of each kind of state in
    # test_laws, and the ops in the contract's test of this name.
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(partial(verify, layer), backend=counter, fullgraph=True, dynamic=True)
    state = state_of(layer, 2)
    graphs = set()
    # The first is no other size of the layer, with which the compiler would take it to be equal.
    for T in (11, 4, 17):
        x, index = tokens_of(layer, 2, T), torch.tensor([2, T % 3], device=device)
        (y, new), (expected, after) = (f(x, state, index) for f in (compiled, partial(verify, layer)))
        assert_close(y, expected, 1e-5)
        assert_states_close(new, after, 1e-5)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


class Verify(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, state):
        return self.layer(x, state, num_states=3)


@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_export(name, device):
    """At every length, and with the states as the layer has them."""
    layer = build(ALL[name], device=device)
    state = state_of(layer, 2)
    T, N = Dim("T", min=3, max=2**16), Dim("sequences", min=1, max=64)
    dims = pytree.tree_map(lambda t: {0: N}, state)
    if state.cache:
        dims = dims._replace(cache=({0: N, 1: Dim("L", min=1, max=2**16)},) * 2)
    program = torch.export.export(
        Verify(layer), (tokens_of(layer, 2, 37), state), dynamic_shapes={"x": {0: N, 1: T}, "state": dims}
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    for T in (3, 5, 70):
        x = tokens_of(layer, 3, T)
        y, states = module(x, state_of(layer, 3))
        assert type(states) is RecurrentStates
        assert y.shape == x.shape
    x, state = tokens_of(layer, 3, 5), state_of(layer, 3)
    actual, expected = (pytree.tree_leaves(f(x, state)) for f in (module, Verify(layer)))
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, 1e-5)


@each_layer
def test_nothing_is_read_on_the_host(config, device):
    with FakeTensorMode():
        layer = made(config, device=device)
        _, states = layer(tokens_of(layer, 2, 5), layer.init_state(2), num_states=3)
        states.at(torch.zeros(2, dtype=torch.int64, device=device))


@pytest.mark.parametrize("config", [EVERY[name] for name in ("gla", "hgrn", "rwkv6", "rwkv7", "abc")])
def test_errors(config, device):
    layer = build(config, device=device)
    x = tokens_of(layer, 2, 5)
    mask, bounds = torch.ones(2, 5, device=device).long(), torch.tensor([0, 5], device=device)
    for kind, message, tokens, arguments in [
        (ValueError, "num_states must be from 1 to 16, got 0", x, {"num_states": 0}),
        (ValueError, "num_states must be from 1 to 16, got 17", x, {"num_states": 17}),
        (ValueError, "num_states must be at most the number of tokens T = 5, got 6", x, {"num_states": 6}),
        (TypeError, "num_states must be an int, got float", x, {"num_states": 2.0}),
        (ValueError, "num_states must not be given with attention_mask", x, {"num_states": 2, "attention_mask": mask}),
        (
            ValueError,
            "cu_seqlens, whose sequences would have to be rows of a batch",
            x[:1],
            {"num_states": 2, "cu_seqlens": bounds},
        ),
    ]:  # fmt: skip
        with pytest.raises(kind, match=message):
            layer(tokens, **arguments)
    _, states = layer(x, num_states=3)
    with pytest.raises(
        TypeError, match=r"state must be a RecurrentState, got RecurrentStates, several states, of"
    ):
        layer(x, states)
    for kind, message, index in [
        (ValueError, "index must be from -3 to 2, for 3 states, got 3", 3),
        (ValueError, "index must be from -3 to 2, for 3 states, got -4", -4),
        (TypeError, "index must be an int or a tensor of one for each sequence, got float", 1.0),
        (TypeError, "index must be an int or a tensor of one for each sequence, got list", [0, 1]),
        (TypeError, "index must be an integer dtype, got float32", torch.zeros(2)),
        (ValueError, r"index must have shape \(2,\), got \(3,\)", torch.zeros(3, dtype=torch.int64)),
        (ValueError, "index must be on", torch.zeros(2, dtype=torch.int64, device="meta")),
    ]:
        if isinstance(index, torch.Tensor) and index.device.type == "cpu":
            index = index.to(device)
        with pytest.raises(kind, match=message):
            states.at(index)


def test_states_are_new(device):
    """The chosen state shares no memory with those it is chosen from, which may then be given back."""
    layer = build(EVERY["gla"], device=device)
    _, states = layer(tokens_of(layer, 2, 5), num_states=3)
    old = {t.untyped_storage().data_ptr() for t in tensors(states)}
    for state in (states.at(1), states.at(torch.tensor([1, 1], device=device))):
        assert not old & {t.untyped_storage().data_ptr() for t in tensors(state)}
        assert all(t.is_contiguous() for t in tensors(state))


def test_a_convolution(device):
    convolution = build(
        {"layer": ShortConvolution, "hidden_size": 6, "kernel_size": 3, "bias": True}, device=device
    )
    x, state = torch.randn(2, 5, 6, device=device), torch.randn(2, 6, 3, device=device)
    for given in (None, state):
        y, states = convolution(x, given, num_states=5)
        assert torch.equal(y, convolution(x, given)[0])
        for i in range(5):
            assert torch.equal(states[:, i], convolution(x[:, : 1 + i], given)[1])
    lengths = torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match="num_states must not be given with lengths"):
        convolution(x, num_states=2, lengths=lengths)
    with pytest.raises(ValueError, match="num_states must not be given with cu_seqlens"):
        convolution(x[:1], num_states=2, cu_seqlens=torch.tensor([0, 5], device=device))
    with pytest.raises(ValueError, match="num_states must be at most the number of tokens T = 5, got 6"):
        convolution(x, num_states=6)
