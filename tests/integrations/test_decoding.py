"""A step of decoding is exported with its states as inputs and outputs, once for all lengths of what came before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.capture import Uncached, cache_argument, cache_of, captured, ops_of, prompt
from helpers.tiny import tiny
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

StaticCache = pytest.importorskip("transformers", minversion="5.17").StaticCache

from flacompose.integrations.transformers import enable  # noqa: E402

STEPS = 24
# The ops of one step. What Mamba computes of one token beside its convolution, it computes in PyTorch's ops.
OPS = {
    "kimi_linear": ["short_conv_update", "matrix_recurrence_update"],
    "lfm2": ["short_conv_update"],
    "mamba": ["short_conv_update"] * 2,
    "mamba2": ["short_conv_update"] * 2,
    "minimax": ["matrix_recurrence_recurrent"],
    "qwen3_next": ["short_conv_update", "matrix_recurrence_update"],
    "rwkv": ["rwkv4_recurrent"] * 2,
}


class Step(nn.Module):
    """One token, its position and the states before it, to its logits and the states after it."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        self.argument = cache_argument(model)
        self.takes_position = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: Tensor, position: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        places = places_of(self.cache)
        for (holder, key), state in zip(places, states, strict=True):
            holder[key] = state.clone()  # which the model writes to
        options = {self.argument: self.cache, **({"position_ids": position} if self.takes_position else {})}
        logits = self.model(ids, use_cache=True, **options).logits
        return logits, [holder[key] for holder, key in places]


def places_of(cache: Any) -> list[tuple[Any, Any]]:
    """Where a cache of transformers keeps its tensors: of convolutions, recurrences and softmax attention."""
    if isinstance(cache, list):  # of RWKV
        return [(cache, i) for i in range(len(cache))]
    holders: list[tuple[Any, Any]] = []
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            holders += [(states, i) for i in states]
        # A static cache has the number of its tokens in a tensor, a dynamic one in the size of the keys.
        holders += [
            (vars(layer), name) for name in ("keys", "values", "cumulative_length") if name in vars(layer)
        ]
    return [(h, key) for h, key in holders if isinstance(h[key], Tensor) and h[key].numel() > 0]


def after(model: nn.Module, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any, list[Tensor]]:
    """The logits of a prompt, its cache, and the tensors in it."""
    out = model(ids, use_cache=True, **{cache_argument(model): cache})
    cache = cache_of(out)
    return out.logits[:, -1:], cache, [holder[key].clone() for holder, key in places_of(cache)]


def exported(model: nn.Module, cache: Any = None) -> ExportedProgram:
    """Of a step after 9 tokens, for any batch, and any number of tokens that a dynamic cache has keys and values of."""
    _, cache, states = after(model, prompt(model, 9, batch=2), cache)
    B, kept = Dim("B", min=1, max=64), Dim("kept", min=2, max=8192)
    grows = [key in ("keys", "values") and not isinstance(cache, StaticCache) for _, key in places_of(cache)]
    shapes = [{0: B, 2: kept} if g else {0: B} if x.dim() else {} for g, x in zip(grows, states, strict=True)]
    ids, position = prompt(model, 1, batch=2), prompt(model, 1, batch=2)  # one tensor would be one input
    return torch.export.export(
        Step(model, cache), (ids, position, states), dynamic_shapes=({0: B}, {0: B}, shapes),
        # PyTorch asks whether the keys are contiguous, in a form of which it cannot prove that it always holds.
        prefer_deferred_runtime_asserts_over_guards=True,
    )  # fmt: skip


def assert_decodes(
    name: str, model: nn.Module, load: Callable = ExportedProgram.module, static: bool = False
) -> None:
    """Greedily, after prompts of other lengths in other batches, as the whole sequence is without a cache."""

    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=96) if static else None

    model = captured(name, model)
    prompts = [prompt(model, T, B) for B, T in ((1, 2), (3, 70))]
    with enable():
        program = exported(model, cache())
        starts = [after(model, ids, cache()) for ids in prompts]
    assert [op.split(".")[1] for op in ops_of(program.graph_module)] == OPS[name]

    step, truth = load(program), Uncached(model)
    for ids, (logits, _, states) in zip(prompts, starts, strict=True):
        found, T = [logits], ids.shape[1]
        for t in range(T, T + STEPS - 1):
            token = found[-1].argmax(-1)
            ids = torch.cat([ids, token], 1)
            logits, states = step(token, torch.full_like(token, t), states)
            found.append(logits)
        expected = truth(ids)[:, T - 1 :]
        torch.testing.assert_close(torch.cat(found, 1).double(), expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(torch.cat(found, 1).argmax(-1), expected.argmax(-1))


# `test_decoding_is_packaged` has Mamba-2.
@pytest.mark.parametrize("name", ["kimi_linear", "mamba", "minimax", "rwkv"])
@torch.no_grad()
def test_decoding_is_exported(name: str, device: torch.device) -> None:
    assert_decodes(name, tiny(name).to(device))


# MiniMax takes no cache class but its own, which is dynamic; the models of Mamba have no keys and values.
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
@torch.no_grad()
def test_static_cache(name: str, device: torch.device) -> None:
    """All sizes but the batch are constants. The module of transformers for this wants keys of every layer."""
    assert_decodes(name, tiny(name).to(device), static=True)


@pytest.mark.parametrize(
    "name", ["mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in OPS if name != "mamba2")]
)
@pytest.mark.usefixtures("aoti_packages_load")
@torch.no_grad()
def test_decoding_is_packaged(name: str, device: torch.device, tmp_path: Path) -> None:
    def packaged(program: ExportedProgram) -> nn.Module:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
        return torch._inductor.aoti_load_package(path)

    assert_decodes(name, tiny(name).to(device), packaged)
