"""A step of decoding is exported with its states as inputs and outputs, once for all lengths of what came before."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .capture import captured, generated, ops_of, prompt
from .tiny import DOORS, tiny

pytest.importorskip("transformers", minversion="5.17")

from flacompose.integrations.transformers import enable

STEPS = 24
# The ops of one step. What Mamba computes of one token beside its convolution, it computes in PyTorch's ops.
OPS = {
    "kimi_linear": ["short_conv_forward", "delta_rule_recurrent"],
    "lfm2": ["short_conv_forward"],
    "mamba": ["short_conv_forward"] * 2,
    "mamba2": ["short_conv_forward"] * 2,
    "minimax": ["scalar_decay_recurrent"],
    "qwen3_next": ["short_conv_forward", "delta_rule_recurrent"],
}


class Step(nn.Module):
    """One token, its position and the states before it, to its logits and the states after it.

    `generate` gives the position too: MiniMax's cache counts the tokens of its first layer, which keeps none.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        takes = inspect.signature(model.forward).parameters
        self.argument = "past_key_values" if "past_key_values" in takes else "cache_params"
        self.counts = "position_ids" in takes

    def forward(self, ids: Tensor, position: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        places = places_of(self.cache)
        for (holder, key), state in zip(places, states, strict=True):
            holder[key] = state.clone()  # which the model writes to
        options = {self.argument: self.cache, **({"position_ids": position} if self.counts else {})}
        logits = self.model(ids, use_cache=True, **options).logits
        return logits, [holder[key] for holder, key in places]


def places_of(cache: Any) -> list[tuple[Any, Any]]:
    """Where a cache of transformers keeps its tensors: of convolutions, recurrences and softmax attention."""
    holders: list[tuple[Any, Any]] = []
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            holders += [(states, i) for i in states]
        holders += [(vars(layer), name) for name in ("keys", "values") if name in vars(layer)]
    states = getattr(cache, "linear_cache", [])  # MiniMax's
    holders += [(states, i) for i in range(len(states))]
    return [(h, key) for h, key in holders if isinstance(h[key], Tensor) and h[key].numel() > 0]


def after(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any, list[Tensor]]:
    """The logits of a prompt, its cache, and the tensors in it."""
    out = model(ids, use_cache=True)
    cache = out.get("past_key_values", out.get("cache_params"))
    return out.logits[:, -1:], cache, [holder[key].clone() for holder, key in places_of(cache)]


def exported(model: nn.Module) -> ExportedProgram:
    """Of a step after 9 tokens, for any number of them that softmax attention has kept the keys and values of."""
    _, cache, states = after(model, prompt(model, 9))
    kept = Dim("kept", min=2, max=8192)
    grows = [isinstance(key, str) for _, key in places_of(cache)]
    shapes = [{2: kept} if g else None for g in grows]
    return torch.export.export(
        Step(model, cache), (prompt(model, 1), prompt(model, 1), states), dynamic_shapes=(None, None, shapes),
        # PyTorch asks whether the keys are contiguous, in a form of which it cannot prove that it always holds.
        prefer_deferred_runtime_asserts_over_guards=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", [*DOORS, "mamba"])
@torch.no_grad()
def test_decoding_is_exported(name: str, device: torch.device) -> None:
    """The tokens and logits that transformers generates by itself, from the states of prompts of other lengths."""
    model = captured(name, tiny(name).to(device))
    prompts = [prompt(model, T) for T in (2, 70)]
    theirs = [generated(model, ids) for ids in prompts]
    with enable():
        program = exported(model)
        starts = [after(model, ids) for ids in prompts]
    assert [op.split(".")[1] for op in ops_of(program.graph_module)] == OPS[name]

    step = program.module()
    for ids, (tokens, expected), (logits, _, states) in zip(prompts, theirs, starts, strict=True):
        found = [logits]
        for t in range(ids.shape[1], ids.shape[1] + STEPS - 1):
            logits, states = step(found[-1].argmax(-1), torch.full_like(ids[:, :1], t), states)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found, 1)[0], expected[:, 0], atol=1e-4, rtol=1e-4)
        assert torch.equal(torch.cat(found, 1).argmax(-1), tokens[:, ids.shape[1] :])
