"""What a layer keeps, whatever it computes: laws of a layer and of its truth.

A truth is the layer said again slowly, one sequence token by token in float64: ``truth(parameters, x [T, D], state)``,
the state of one row, gives ``(y [T, D], state)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from flacompose.layers import RecurrentState

from .truth import (
    assert_close,
    assert_states_close,
    floats,
    precision,
    random_state,
    row,
    tensors,
    with_floats,
)

Truth = Callable[[dict[str, Tensor], Tensor, RecurrentState], tuple[Tensor, RecurrentState]]
LENGTHS = [70, 2, 3, 64, 65, 165]


def perturbed(layer: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """The layer with no parameter at its first value, in the most precise dtype of a device unless in this one."""
    layer = layer.to(device, dtype or precision(device)[0])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def tokens_of(layer: nn.Module, B: int, T: int) -> Tensor:
    like = next(layer.parameters())
    return torch.randn(B, T, layer.hidden_size, device=like.device, dtype=like.dtype)


def assert_true(
    layer: nn.Module, truth: Truth, x: Tensor, state: RecurrentState, y: Tensor, new: RecurrentState
) -> None:
    """One sequence ``x [T, D]`` from the state of one row gave `y` and `new`."""
    p = {name: value.detach().cpu().double() for name, value in layer.state_dict().items()}
    start = pytree.tree_map(lambda t: t.cpu().double(), state)
    expected, after = truth(p, x.detach().cpu().double(), start)
    relative = 1e-11 if x.dtype == torch.float64 else 2e-5
    assert_close(y, expected, relative)
    assert_states_close(new, after, relative)


@torch.no_grad()
def check_values(layer: nn.Module, truth: Truth) -> None:
    """One token, a few and more than a chunk, from zeros and from a state."""
    for T in (1, 3, 67):
        x = tokens_of(layer, 2, T)
        for state in (None, random_state(layer, 2)):
            y, new = layer(x, state)
            assert y.dtype == x.dtype
            start = layer.init_state(2) if state is None else state
            for b in range(2):
                assert_true(layer, truth, x[b], row(start, b), y[b], row(new, b))


@torch.no_grad()
def check_split(layer: nn.Module) -> None:
    """A sequence cut anywhere gives what the whole gives, and no state is written to."""
    x = tokens_of(layer, 2, 138)
    expected, last = layer(x)
    relative = precision(x.device)[1]
    for pieces in ([70, 1, 67], [1, 1, 1, 135], [3, 65, 70]):
        state, out = layer.init_state(2), []
        for piece in x.split(pieces, 1):
            before = [t.clone() for t in tensors(state)]
            y, new = layer(piece, state)
            assert all(torch.equal(a, b) for a, b in zip(tensors(state), before, strict=True))
            assert all(t.is_contiguous() for t in tensors(new))
            storages = {t.untyped_storage().data_ptr() for t in (*tensors(state), *tensors(new), y)}
            assert len(storages) == 2 * len(before) + 1
            state = new
            out.append(y)
        assert_close(torch.cat(out, 1), expected, relative)
        assert_states_close(state, last, relative)


@torch.no_grad()
def check_padding(layer: nn.Module, truth: Truth) -> None:
    """Pads anywhere in a row, whatever they hold, change nothing; a row of none but pads keeps its state."""
    T = 70
    t = torch.arange(T, device=next(layer.parameters()).device)
    mask = torch.stack([t >= 0, t >= 30, t < 30, (t >= 3) & (t < 64), t % 3 > 0, t >= T])
    x = tokens_of(layer, len(mask), T)
    x[~mask] = torch.nan
    state = random_state(layer, len(mask))
    for attention_mask in (mask, mask.long()):
        y, new = layer(x, state, attention_mask=attention_mask)
        assert not y[~mask].any()
        for b in range(len(mask) - 1):
            assert_true(layer, truth, x[b, mask[b]], row(state, b), y[b, mask[b]], row(new, b))
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(tensors(new), tensors(state), strict=True))
    token = mask[:, -1:].long()
    y, new = layer(x[:, -1:], state, attention_mask=token)
    for b in range(len(mask)):
        if token[b]:
            assert_true(layer, truth, x[b, -1:], row(state, b), y[b], row(new, b))


def check_padding_gradients(layer: nn.Module) -> None:
    """Of tokens and of parameters as without pads, of pads none, whatever they hold."""
    x = tokens_of(layer, 2, 9)
    mask = torch.arange(9, device=x.device) >= torch.tensor([[0], [4]], device=x.device)
    x[~mask] = torch.inf
    x.requires_grad_()
    parameters = list(layer.parameters())

    def loss(y: Tensor, new: RecurrentState) -> Tensor:
        return sum((t**2).sum() for t in (y, *floats(new)))

    dx, *rest = torch.autograd.grad(loss(*layer(x, attention_mask=mask)), [x, *parameters])
    alone = loss(*layer(x[:1])) + loss(*layer(x[1:, 4:]))
    dx_alone, *rest_alone = torch.autograd.grad(alone, [x, *parameters])
    assert not dx[~mask].any()
    relative = 10 * precision(x.device)[1]
    for a, b in zip([dx[mask], *rest], [dx_alone[mask], *rest_alone], strict=True):
        assert_close(a, b, relative)


@torch.no_grad()
def check_packed(layer: nn.Module, truth: Truth) -> None:
    """Sequences in one row as if alone: empty ones, one token, more than a chunk, a tail."""
    bounds, T = [0, 0, 70, 71, 71, 74, 80], 83
    x = tokens_of(layer, 1, T)
    x[:, bounds[-1] :] = torch.nan
    state = random_state(layer, len(bounds) - 1)
    for dtype in (torch.int32, torch.int64):
        y, new = layer(x, state, cu_seqlens=torch.tensor(bounds, dtype=dtype, device=x.device))
        assert not y[:, bounds[-1] :].any()
        for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if begin == end:
                assert all(torch.equal(a[n], b[n]) for a, b in zip(tensors(new), tensors(state), strict=True))
            else:
                assert_true(layer, truth, x[0, begin:end], row(state, n), y[0, begin:end], row(new, n))


def check_gradients(layer: nn.Module) -> None:
    """In float64 against finite differences: the input, the state that comes in, every parameter."""
    names, values = zip(*layer.named_parameters(), strict=True)
    state = random_state(layer, 1)
    count = 1 + len(floats(state))
    leaves = [t.detach().requires_grad_() for t in (tokens_of(layer, 1, 5), *floats(state), *values)]

    def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        parameters = dict(zip(names, rest[count - 1 :], strict=True))
        given = with_floats(state, rest[: count - 1])
        y, new = torch.func.functional_call(layer, parameters, (x, given))
        return y, *floats(new)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@torch.no_grad()
def check_compiled_decoding(layer: nn.Module) -> None:
    """One graph for segments and one for tokens, whatever the order."""
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = tokens_of(layer, 2, 90)
    state, out = layer.init_state(2), []
    for i, piece in enumerate(x.split([70, 1, 5, 1, 12, 1], 1)):
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            y, state = compiled(piece, state)
        out.append(y)
    expected, last = layer(x)
    assert_close(torch.cat(out, 1), expected, 2e-5)
    assert_states_close(state, last, 2e-5)


def exported(layer: nn.Module) -> ExportedProgram:
    T, B = Dim("T", min=2, max=2**20), Dim("B", max=2**10)
    state = random_state(layer, 2)
    shapes = ({0: B, 1: T}, pytree.tree_map(lambda _: {0: B}, state))
    return torch.export.export(layer, (tokens_of(layer, 2, 37), state), dynamic_shapes=shapes)


@torch.no_grad()
def check_exported(layer: nn.Module, op: str, path: Path, nodes: int = 1) -> None:
    """One node, or so many, and exact at lengths that were not traced, after saving and loading too."""
    program = exported(layer)
    ops = [n.target for n in program.graph.nodes if "flacompose" in str(n.target)]
    assert ops == [getattr(torch.ops.flacompose, op).default] * nodes
    torch.export.save(program, path)
    for module in (program.module(), torch.export.load(path).module()):
        for T in (*LENGTHS[1:], 2048):
            x, state = tokens_of(layer, 1, T), random_state(layer, 1)
            y, new = module(x, state)
            assert isinstance(new, RecurrentState)
            expected, last = layer(x, state)
            assert_close(y, expected, 1e-6)
            assert_states_close(new, last, 1e-6)


def check_bfloat16(
    layer: nn.Module, autocast: bool, bound: float, cu_seqlens: Tensor | None = None
) -> RecurrentState:
    """As a module in bfloat16, or a float32 one under autocast: near float64, its recurrent state in float32."""
    if not autocast:
        layer = layer.to(torch.bfloat16)
    B = 2 if cu_seqlens is None else 1
    given = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    x = tokens_of(layer, B, 40)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        zeros = layer.init_state(B if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        y, state = layer(x, zeros, **given)
    assert y.dtype == torch.bfloat16
    assert [t.dtype for t in tensors(state)] == [t.dtype for t in tensors(zeros)]
    assert {t.dtype for t in tensors((state.recurrent, state.normalizer))} == {torch.float32}
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.parameters())
    expected, after = layer.double()(x.double(), **given)
    assert_close(y, expected, bound)
    assert_states_close(state, after, bound)
    return state


def check_arguments(layer_type: type[nn.Module], expected: Mapping[str, object]) -> None:
    """Names, order and defaults of the constructor's arguments, then PyTorch's two by keyword, and no others."""
    arguments = inspect.signature(layer_type).parameters
    # As lists, for their order.
    listed = [*expected.items(), ("device", None), ("dtype", None)]
    assert [(name, a.default) for name, a in arguments.items()] == listed
    assert all(arguments[name].kind == inspect.Parameter.KEYWORD_ONLY for name in ("device", "dtype"))
    assert all(x.is_meta for x in layer_type(device="meta").parameters())
    with pytest.raises(TypeError, match="use_cache"):
        layer_type(hidden_size=64, use_cache=True)


def check_names_and_shapes(layer: nn.Module, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Of a layer made on the device "meta": what a checkpoint holds, in its order."""
    parameters = layer.state_dict()
    assert [(name, tuple(x.shape)) for name, x in parameters.items()] == list(expected.items())
    assert all(x.is_meta for x in parameters.values())
