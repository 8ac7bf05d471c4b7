"""Training in segments, of every layer: truncated where a state is detached, exact where it is not.

Sequences are rows, all cut at the same places, or packed, each cut at places of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.truth import (
    BOUNDED,
    DISTINCT,
    EVERY,
    OF_EACH_KIND,
    assert_close,
    assert_states_close,
    build,
    floats,
    random_state,
    tensors,
    tokens_of,
    with_floats,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

import flacompose.layers
from flacompose.layers import Mamba3, RecurrentState
from flacompose.layers.recurrent import RecurrentLayer

# Tokens, and what tells the layer where they lie.
Segment = tuple[Tensor, dict[str, Any]]

CASES = DISTINCT | BOUNDED  # lower bounds are shared by all segments
each_layer = pytest.mark.parametrize("config", CASES.values(), ids=CASES)
PIECES = [35, 3, 1, 66, 2, 1]  # unequal, of one token, of more than a chunk
LONG_PIECES = [70, 2, 3, 64, 130]  # for which one graph does
# Sequences of 38, 3, 2 and 72 tokens, segment by segment: one is over before the last, one begins there.
PACKED = [[5, 2, 0, 2], [0, 0, 0, 67], [32, 1, 0, 1], [1, 0, 2, 2]]
# In norm. The whole sums the tokens of a gradient in another order than its segments do.
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}


def test_every_layer_is_listed():
    """Every recurrent layer of the library is one of those that are tested."""
    layers = {getattr(flacompose.layers, name) for name in flacompose.layers.__all__}
    recurrent = {layer for layer in layers if isinstance(layer, type) and issubclass(layer, RecurrentLayer)}
    assert {config["layer"] for config in EVERY.values()} == recurrent


def rows(x: Tensor, pieces: list[int] = PIECES) -> list[Segment]:
    return [(segment, {}) for segment in x.split(pieces, 1)]


def bounds(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def packed(x: Tensor) -> tuple[Segment, list[Segment]]:
    """All tokens of the sequences ``x [1, T, D]``, and each one's next tokens segment by segment."""
    lengths = [sum(each) for each in zip(*PACKED, strict=True)]
    sequences, segments = x[0].split(lengths), []
    taken = [0] * len(lengths)
    for pieces in PACKED:
        tokens = [s[t : t + n] for s, t, n in zip(sequences, taken, pieces, strict=True)]
        segments.append((torch.cat(tokens)[None], {"cu_seqlens": bounds(pieces, x.device)}))
        taken = [t + n for t, n in zip(taken, pieces, strict=True)]
    return (x, {"cu_seqlens": bounds(lengths, x.device)}), segments


def side_by_side(outputs: list[Tensor]) -> Tensor:
    """The inverse of `rows`, of outputs."""
    return torch.cat(outputs, 1)


def whole_again(outputs: list[Tensor]) -> Tensor:
    """The inverse of `packed`, of outputs."""
    parts = [y[0].split(pieces) for y, pieces in zip(outputs, PACKED, strict=True)]
    return torch.cat([part for sequence in zip(*parts, strict=True) for part in sequence])[None]


def loss_of(y: Tensor, state: RecurrentState) -> Tensor:
    """Of what is put out, and of the float tensors of a state: their norms, so that no part drowns another.

    A shift of all logits, as by the bias of LightNet's keys, changes nothing but the logsumexp: in its gradient the
    outputs' part cancels from token to token, and squares would leave of it more rounding than the law allows.
    """
    return sum(t.norm() for t in (y, *floats(state)))


def exact(
    call: Callable, segments: list[Segment], state: RecurrentState
) -> tuple[list[Tensor], RecurrentState]:
    """One graph through all segments."""
    outputs = []
    for x, given in segments:
        y, state = call(x, state, **given)
        outputs.append(y)
    return outputs, state


def differentiable(state: RecurrentState) -> RecurrentState:
    return with_floats(state, [t.detach().requires_grad_() for t in floats(state)])


def start_of(layer: nn.Module, N: int, start: str) -> RecurrentState:
    return differentiable(layer.init_state(N) if start == "nothing" else random_state(layer, N))


def check_exact(
    layer: nn.Module,
    call: Callable,
    x: Tensor,
    whole: Segment,
    segments: list[Segment],
    joined: Callable[[list[Tensor]], Tensor],
    state: RecurrentState,
) -> None:
    """Segments give the outputs, the last state and all the gradients of the whole."""
    relative = RELATIVE[x.dtype]
    leaves = [x, *floats(state), *layer.parameters()]
    expected, last = exact(layer, [whole], state)
    gradients = torch.autograd.grad(loss_of(expected[0], last), leaves)
    outputs, new = exact(call, segments, state)
    y = joined(outputs)
    assert_close(y, expected[0], relative)
    assert_states_close(new, last, relative)
    # A shift of all angles of Mamba-3 turns queries and keys alike, so that large terms of its gradient cancel, all but
    # those of the last angles. It is the second, and in float32 accurate to about 1e-5.
    cancelled = 1 if isinstance(layer, Mamba3) and x.dtype == torch.float32 else None
    found = torch.autograd.grad(loss_of(y, new), leaves)
    for i, (a, b) in enumerate(zip(found, gradients, strict=True)):
        assert_close(a, b, 5 * relative if i == cancelled else relative)


def check_truncated(layer: nn.Module, call: Callable, x: Tensor, segments: list[Segment]) -> None:
    """The gradients of a step are those of segments computed by themselves, each from the state that it is given."""
    N = len(x)
    parameters = list(layer.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    expected_dx, begin = torch.zeros_like(x), 0
    for segment, _ in segments:
        end = begin + segment.shape[1]
        alone = x.detach()[:, begin:end].requires_grad_()
        with torch.no_grad():
            before = layer(x[:, :begin])[1] if begin else layer.init_state(N)
        dx, *gradients = torch.autograd.grad(loss_of(*layer(alone, before)), [alone, *parameters])
        expected_dx[:, begin:end] = dx
        for sum_, gradient in zip(expected, gradients, strict=True):
            sum_ += gradient
        begin = end

    state = layer.init_state(N)
    for segment, given in segments:
        y, state = call(segment, state.detach(), **given)
        loss_of(y, state).backward()
    for a, b in zip([x.grad, *(p.grad for p in parameters)], [expected_dx, *expected], strict=True):
        assert_close(a, b, RELATIVE[x.dtype])


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("start", ["nothing", "a state"])
@each_layer
def test_exact(config, start, dtype, device):
    """Rows cut at the same places have the outputs, the last states and the gradients of the whole."""
    layer = build(config, device=device, dtype=dtype)
    # A first token alone takes the recurrent form, and in float32 shows how far off the chunked whole is: in RWKV6 by
    # 2.5e-5 of the gradient of a state of zeros, which the norm of a group of small outputs multiplies.
    pieces = [1, *PIECES] if dtype == torch.float64 else PIECES
    x = tokens_of(layer, 2, sum(pieces)).requires_grad_()
    state = start_of(layer, 2, start)
    check_exact(layer, layer, x, (x, {}), rows(x, pieces), side_by_side, state)


@pytest.mark.parametrize("start", ["nothing", "a state"])
@each_layer
def test_exact_packed(config, start, device):
    """Each packed sequence is cut at places of its own; one without tokens in a segment passes through it."""
    layer = build(config, device=device)
    x = tokens_of(layer, 1, sum(map(sum, PACKED))).requires_grad_()
    state = start_of(layer, len(PACKED[0]), start)
    whole, segments = packed(x)
    check_exact(layer, layer, x, whole, segments, whole_again, state)


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@each_layer
def test_truncated(config, dtype, device):
    """A detached state ends the gradient: a step has the sum of the gradients of its segments."""
    layer = build(config, device=device, dtype=dtype)
    x = tokens_of(layer, 2, sum(PIECES)).requires_grad_()
    check_truncated(layer, layer, x, rows(x))


class Compiled:
    """A layer compiled whole, for which another graph is an error but in the calls of these numbers."""

    def __init__(self, layer: nn.Module, graphs: set[int], **options: str) -> None:
        self.layer = torch.compile(layer, fullgraph=True, dynamic=True, **options)
        self.graphs, self.calls = graphs, 0

    def __call__(self, *args: Any, **given: Any) -> tuple[Tensor, RecurrentState]:
        with torch._dynamo.config.patch(error_on_recompile=self.calls not in self.graphs):
            self.calls += 1
            return self.layer(*args, **given)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_exact_compiled(name, device, few_levels):
    """A compiled layer has one graph for segments of every length and, as everywhere in PyTorch, one for a token.

    Each goes to the backend once: no number of ours becomes symbolic, and Dynamo does not begin again.
    Inductor checks the strides of what each operator returns. In its mode "lite" PyTorch does what it would generate
    code for, and that takes a tenth of the time.
    """
    layer = build(BOUNDED["bounded hgrn"] if name == "hgrn" else EVERY[name], device=device)
    pieces = PIECES if name == "hgrn" else LONG_PIECES
    x = tokens_of(layer, 1, sum(pieces)).requires_grad_()
    graphs = {pieces.index(1), pieces.index(35)} if name == "hgrn" else {0}
    compiled = Compiled(layer, graphs, mode="lite")
    state = start_of(layer, 1, "a state")
    counters.clear()
    check_exact(layer, compiled, x, (x, {}), rows(x, pieces), side_by_side, state)
    assert compiled.calls == len(pieces)
    assert counters["aot_autograd"]["total"] == len(graphs)


@pytest.mark.parametrize(("name", "backend"), [("gla", "eager"), ("rwkv6", "aot_eager")])
def test_exact_packed_compiled(name, backend, device):
    """A compiled layer has one graph for packed sequences that are cut anywhere, and the gradients of the whole."""
    layer = build(EVERY[name], device=device)
    x = tokens_of(layer, 1, sum(map(sum, PACKED))).requires_grad_()
    whole, segments = packed(x)
    state = start_of(layer, len(PACKED[0]), "a state")
    check_exact(layer, Compiled(layer, {0}, backend=backend), x, whole, segments, whole_again, state)


@each_layer
def test_saved_states(config, device):
    """No segment, backward pass or step of an optimizer changes a state, and training goes on from any of them."""
    layer = build(config, device=device)
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    segments = [x for x, _ in rows(tokens_of(layer, 2, sum(PIECES)))]

    def trained(x: Tensor, state: RecurrentState) -> tuple[list[Tensor], RecurrentState]:
        x, state = x.clone().requires_grad_(), differentiable(state)
        y, new = layer(x, state)
        loss = loss_of(y, new)
        leaves = [x, *floats(state), *layer.parameters()]
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        loss.backward()
        return [y, *tensors(new), *gradients], new

    state, saved, copies, results = layer.init_state(2), [], [], []
    for x in segments:
        saved.append(state)
        copies.append([t.detach().clone() for t in tensors(state)])
        result, state = trained(x, state)
        results.append(result)
    optimizer.step()
    optimizer.zero_grad()
    outputs, state = exact(layer, [(x, {}) for x in segments], saved[1].detach())
    loss_of(torch.cat(outputs, 1), state).backward()
    optimizer.step()
    assert not all(torch.equal(layer.state_dict()[name], value) for name, value in weights.items())

    for state, copy in zip(saved, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(state), copy, strict=True))
    layer.load_state_dict(weights)
    for x, state, result in zip(segments, saved, results, strict=True):
        again, _ = trained(x, state)
        assert all(torch.equal(a, b) for a, b in zip(again, result, strict=True))


@each_layer
def test_two_continuations(config, device):
    """Two continuations of a state that is still in the graph have a backward pass each, as if begun twice."""
    layer = build(config, device=device, dtype=torch.float64)
    x, *endings = tokens_of(layer, 2, 9 + 5 + 3).split([9, 5, 3], 1)
    parameters = list(layer.parameters())
    expected = [torch.autograd.grad(loss_of(*layer(torch.cat([x, e], 1))), parameters) for e in endings]
    begun, between = layer(x)
    losses = [loss_of(torch.cat([begun, y], 1), new) for y, new in (layer(e, between) for e in endings)]
    for loss, gradients in zip(losses, expected, strict=True):
        for a, b in zip(torch.autograd.grad(loss, parameters, retain_graph=True), gradients, strict=True):
            assert_close(a, b, RELATIVE[x.dtype])
