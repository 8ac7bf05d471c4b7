"""Layers and models of tokens whose number only the data know, and of bounds made in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from contract.test_sizes import bounds, places
from helpers.truth import OF_EACH_KIND, assert_close, build
from models.test_recurrent_lm import small
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flacompose.models.softmax_attention import SoftmaxAttention
from flacompose.ops._composed import logsumexp

LAYERS = OF_EACH_KIND | {"attention": {"layer": SoftmaxAttention, "num_heads": 2, "hidden_size": 24}}
MODELS: dict[str, dict[str, Any]] = {
    "model": {},
    "hybrid": {"attn": [{"layers": [1], "num_heads": 2}]},
    "model of rwkv6": {"layer": "RWKV6Attention", "feed_forward": "rwkv6"},
    "model of rwkv7": {"layer": "RWKV7Attention", "layer_options": {"head_dim": 16}, "feed_forward": "rwkv7"},
}
# The models have these layers.
NAMES = [name for name in LAYERS if name not in ("gla", "rwkv6", "rwkv7", "attention")] + [*MODELS]


@pytest.fixture(autouse=True)
def few_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logsumexp, "LEVELS", 4)


class Chosen(nn.Module):
    """A layer, or a model, of the tokens and the rows that masks have chosen, from a state; or of packed tokens."""

    def __init__(self, layer: nn.Module, layout: str) -> None:
        super().__init__()
        self.layer = layer
        self.layout = layout

    def forward(self, x: Tensor, tokens: Tensor, other: Tensor) -> tuple[Tensor, Any]:
        x = x[:, places(tokens)]
        if self.layout == "packed":
            x = x[places(torch.arange(4, device=x.device) < 1)]  # one row, which the graph does not know
            return self.layer(x, cu_seqlens=bounds(other[places(tokens)]))
        x = x[places(other)]
        state = self.layer.init_state(x.shape[0])
        if self.layout == "rows":
            return self.layer(x, state)
        if self.layout == "states":
            y, states = self.layer(x, state, num_states=2)
            return y, states.at(torch.zeros(4, dtype=torch.int64, device=x.device)[places(other != 0)])
        # Of masks of its own, as above, so that the graph does not know that its shape is that of x.
        attention_mask = torch.ones(4, 16, dtype=torch.bool, device=x.device)
        attention_mask = attention_mask[:, places(tokens != 0)][places(other != 0)]
        return self.layer(x, state, attention_mask=attention_mask)


def made(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    if name in MODELS:
        return small(**MODELS[name]).to(device), torch.randint(11, (4, 16), device=device)
    return build(LAYERS[name], device=device), torch.randn(4, 16, 24, device=device)


def calls(x: Tensor, layout: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Two of the same shapes, which differ in how many tokens, and how many rows or sequences, they are of."""
    made = []
    for kept, lengths in (15, [5, 10]), (9, [4, 2, 3]):
        tokens = torch.arange(16, device=x.device) < kept
        if layout == "packed":
            positions = torch.cat([*map(torch.arange, lengths), torch.ones(16 - kept, dtype=torch.int64)])
            made.append((x, tokens, positions.to(x.device)))
        else:
            made.append((x, tokens, torch.arange(4, device=x.device) < len(lengths)))
    return made


def results(module: nn.Module, layer: nn.Module, call: tuple[Tensor, ...]) -> list[Tensor]:
    outputs = pytree.tree_leaves(module(*call))
    loss = sum((y**2).sum() for y in outputs if y.requires_grad)
    return [*outputs, *torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)]


def agree(actual: list[Tensor | None], expected: list[Tensor | None], relative: float) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert_close(x, y, relative)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # One of each kind of code that reads a size: of convolutions, slots, keys and values.
        # `test_training_through_inductor` has shifts and positions, and `test_export` models.
        *((name, "rows") for name in ("mamba2", "gsa", "hgrn", "gated_deltaproduct", "attention")),
        # These two have a convolution, a running logsumexp and positions.
        ("abc", "mask"),
        ("gla", "states"),
    ],
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True)
def test_training(name: str, layout: str, device: torch.device) -> None:
    """Most are captured alone; the gradients of softmax attention are traced too."""
    layer, x = made(name, device)
    module = Chosen(layer, layout)
    compiled = torch.compile(module, backend="aot_eager" if name == "attention" else "eager", fullgraph=True)
    for call in calls(x, layout):
        agree(results(compiled, layer, call), results(module, layer, call), 1e-4)


class Kept(nn.Module):
    """A layer of the tokens of one row that a mask has chosen."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.layer(x[:, places(tokens)])[0]


@pytest.mark.parametrize("name", ["rwkv6", "retention"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True)
def test_training_through_inductor(name: str, device: torch.device) -> None:
    """Inductor asks for the order of strides; gradients of norms for the number of tokens.

    Sums with zeros, as of retention's positions, ask for it too; retention is not trained here.
    """
    layer, x = made(name, device)
    module = Kept(layer)
    compiled = torch.compile(module, fullgraph=True)
    for kept in (15, 9):
        call = x[:1], torch.arange(16, device=device) < kept
        if name == "retention":
            with torch.no_grad():
                agree([compiled(*call)], [module(*call)], 1e-4)
        else:
            agree(results(compiled, layer, call), results(module, layer, call), 1e-4)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_export(name: str, device: torch.device) -> None:
    layout = "rows" if name == "hybrid" else "packed"  # `test_packed_hybrid_exported` packs one
    layer, x = made(name, device)
    module = Chosen(layer, layout)
    first, second = calls(x, layout)
    program = torch.export.export(module, first).module()
    for call in (first, second):
        agree(*(pytree.tree_leaves(f(*call)) for f in (program, module)), 1e-5)
