"""Public models of transformers with random weights, on this library, on flash-linear-attention and on PyTorch alone.

The models have half their published width and 12 layers. Dense layers as wide as the active experts replace mixtures of
experts: PyTorch 2.11 cannot compile the routing of tokens on a GPU, and it is independent of the recurrence. Weights
and activations are bfloat16.

Each model runs in a process of its own on each of `SIDES`: ``flacompose`` is `enable()`, ``fla`` is transformers with
flash-linear-attention installed, ``python`` is transformers without it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import measure, peer, tuned
from .processes import Figure, answer, attempt, command, figures, give
from .report import Row

PEER = "fla"
SIDES = ("flacompose", PEER, "python")
QUANTITIES = ("prefill", "step", "token")
STEP, TOKEN, GRAPH = "training step, compiled", "one token, compiled", "one token, CUDA graph"
JOINED = ", projections joined"
"""The suffix of figures of a model with fused projections. The other side has no such projections."""
LIMITS = {STEP: 0.8}
"""Upper limits of the ratios to the peer."""
TOKEN_LIMIT = 0.333
"""The upper limit of a compiled token at batch 1."""
PROMPT, CACHE = 128, 1024
"""The number of tokens before decoding, and the capacity of the cache of softmax attention."""


@dataclass(frozen=True)
class Size:
    """The common sizes of both models."""

    layers: int = 12
    heads: int = 16
    head_dim: int = 128
    vocabulary: int = 32_000
    prefill: tuple[int, ...] = (4096, 32_768)
    training: tuple[int, int] = (4, 4096)
    batches: tuple[int, ...] = (1, 64)


SMALL = Size(layers=2, heads=2, head_dim=8, vocabulary=64, prefill=(70,), training=(2, 70), batches=(1,))
"""For tests of the benchmark on a CPU."""


def _layer_types(layers: int) -> list[str]:
    """Softmax attention in every fourth layer, and in the last."""
    return ["linear_attention" if i % 4 < 3 and i < layers - 1 else "full_attention" for i in range(layers)]


def qwen3_next(size: Size) -> nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    heads, D = size.heads, size.head_dim
    config = Qwen3NextConfig(
        vocab_size=size.vocabulary, hidden_size=heads * D // 2, intermediate_size=heads * D * 11 // 8,
        num_hidden_layers=size.layers, layer_types=_layer_types(size.layers), mlp_only_layers=list(range(size.layers)),
        num_attention_heads=max(1, heads // 2), num_key_value_heads=1, head_dim=2 * D,
        linear_num_key_heads=heads // 2, linear_num_value_heads=heads,
        linear_key_head_dim=D, linear_value_head_dim=D,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def kimi_linear(size: Size) -> nn.Module:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    heads, D = size.heads, size.head_dim
    width = heads * D * 9 // 16
    config = KimiLinearConfig(
        vocab_size=size.vocabulary, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=size.layers, layer_types=_layer_types(size.layers), mlp_layer_types=["dense"] * size.layers,
        num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=2 * D, qk_nope_head_dim=D,
        qk_rope_head_dim=D // 2, v_head_dim=D, linear_num_heads=heads, linear_head_dim=D,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return KimiLinearForCausalLM(config)


MODELS: dict[str, Callable[[Size], nn.Module]] = {"qwen3-next": qwen3_next, "kimi-linear": kimi_linear}


def compiled(function: Callable[..., Any], side: str, backend: str) -> Callable[..., Any]:
    """Compile `function`, on this library in one graph."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, fullgraph=side == "flacompose", dynamic=False, backend=backend)


def first_call(case: str, quantity: str, function: Callable[[], object]) -> None:
    """Call a compiled function for the first time; give its graph breaks and, as a note, its time."""
    measure.synchronize()
    start = time.perf_counter()
    function()
    measure.synchronize()
    answer(note=f"{case}, {quantity}: first call, compiled, in {time.perf_counter() - start:.0f} s")
    give(case, f"graph breaks of a {quantity}", "", sum(torch._dynamo.utils.counters["graph_break"].values()))


@torch.no_grad()
def prefill(model: Any, T: int, vocabulary: int, calls: int) -> None:
    """A prompt with a new cache, as in `generate`."""
    from transformers import DynamicCache

    ids = torch.randint(vocabulary, (1, T), device=model.device)

    def one() -> Tensor:
        cache = DynamicCache(config=model.config)
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    give(f"B1 T{T}", "prefill", "ms", measure.wall_us(one, calls=calls, rounds=3) / 1e3)


def train(model: Any, size: Size, side: str, backend: str, calls: int) -> None:
    """A training step: forward, loss and backward, without an optimizer."""
    B, T = size.training
    case = f"B{B} T{T}"
    torch.manual_seed(1)
    tokens, targets = torch.randint(size.vocabulary, (2, B, T), device=model.device)

    def loss() -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(loss: Callable[[], Tensor]) -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    give(case, "loss", "", loss().item())  # the same on all sides, which share weights and tokens
    give(case, "training step, eager", "ms", measure.wall_us(lambda: step(loss), calls=calls, rounds=3) / 1e3)
    if torch.cuda.is_available():
        model.zero_grad(set_to_none=True)
        give(case, "peak memory of a step", "MiB", measure.peak_mib(lambda: step(loss)))
    if side == "python":
        answer(note=f"{case}: no compiled training step, its loops over chunks take minutes to compile")
    else:
        faster = compiled(loss, side, backend)
        first_call(case, "training step", lambda: step(faster))
        give(case, STEP, "ms", measure.wall_us(lambda: step(faster), calls=calls, rounds=3) / 1e3)
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def decode(model: Any, B: int, vocabulary: int, side: str, backend: str, calls: int, kind: str = "") -> None:
    """Greedy decoding: eager, compiled, and compiled in a CUDA graph."""
    from transformers import StaticCache

    case = f"B{B} T1"
    cache = StaticCache(config=model.config, max_cache_len=CACHE)
    ids = torch.randint(vocabulary, (B, PROMPT), device=model.device)
    token = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    def next_token(token: Tensor) -> Tensor:
        return model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)

    def going_on(function: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def one() -> None:
            token.copy_(function(token))

        return one

    give(case, f"one token, eager{kind}", "ms", measure.wall_us(going_on(next_token), calls=calls) / 1e3)
    faster = going_on(compiled(next_token, side, backend))
    first_call(case, f"token{kind}", faster)
    give(case, f"{TOKEN}{kind}", "ms", measure.wall_us(faster, calls=calls) / 1e3)
    if torch.cuda.is_available():
        give(case, f"{GRAPH}{kind}", "ms", measure.wall_us(measure.graph([faster]), calls=2 * calls) / 1e3)


def take_all(model: Any, size: Size, side: str, wanted: Sequence[str], backend: str, calls: int) -> None:
    V = size.vocabulary
    if "token" in wanted:
        for B in size.batches:
            attempt(f"decoding at batch {B}", partial(decode, model, B, V, side, backend, calls))
    if "step" in wanted:
        attempt("the training step", partial(train, model, size, side, backend, max(1, calls // 4)))
    if "prefill" in wanted:
        for T in size.prefill:
            attempt(f"the prompt of {T} tokens", partial(prefill, model, T, V, max(1, calls // 8)))
    if side == SIDES[0] and "token" in wanted:
        from flacompose.integrations.transformers import join_projections

        join_projections(model)
        for B in size.batches:
            attempt(
                f"decoding at batch {B}{JOINED}", partial(decode, model, B, V, side, backend, calls, JOINED)
            )


def take(
    names: Sequence[str], sides: Sequence[str], options: Sequence[str], *, timeout_s: float = 400.0
) -> Iterator[Figure | str]:
    """Figures and notes."""
    for name in names:
        for side in sides:
            yield from figures(command("public", [name, "--side", side, *options]), name, side, timeout_s)


def rows(taken: Sequence[Figure]) -> list[Row]:
    """Every figure of this library beside each other side, and figures that only one side has."""
    values = {(f.model, f.side, f.case, f.quantity): f.value for f in taken}
    found = []
    for baseline in SIDES[1:]:
        for f in {(f.model, f.case, f.quantity): f for f in taken}.values():
            ours = values.get((f.model, SIDES[0], f.case, f.quantity))
            other = values.get((f.model, baseline, f.case, f.quantity.removesuffix(JOINED)))
            if other is None and baseline != PEER:
                continue
            limit = TOKEN_LIMIT if (f.case, f.quantity) == ("B1 T1", TOKEN) else LIMITS.get(f.quantity)
            limit = limit if baseline == PEER else None
            name = f"{f.model} model"
            found.append(Row(name, f.case, f.quantity, f.unit, ours, other, max_ratio=limit, beside=baseline))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One model on one side in this process.")
    add = parser.add_argument
    add("name", choices=MODELS)
    add("--side", choices=SIDES, required=True)
    add("--quantities", nargs="+", choices=QUANTITIES, default=list(QUANTITIES))
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--backend", default="inductor")
    add("--calls", type=int, default=20, help="decoded tokens that are timed together")
    add("--small", action="store_true", help="a tiny model, to look at the benchmark itself")
    add(
        "--peer-configs",
        type=Path,
        help="a file with launch configurations of the peer, which gets those it tunes",
    )
    arguments = parser.parse_args()
    side, size = arguments.side, SMALL if arguments.small else Size()
    if side != PEER:
        # It has no effect on `enable()`, which does not depend on installed libraries.
        sys.modules["fla"] = None  # type: ignore[assignment]
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = MODELS[arguments.name](size).to(torch.bfloat16)
    if side == "flacompose":
        from flacompose.integrations.transformers import enable

        enable()
    if side == PEER:
        if torch.cuda.get_device_capability() == (9, 0):
            peer.lift_hopper_check()
            answer(
                note="the peer refuses gated backwards on Hopper with this Triton; its check was lifted to time it"
            )
        # It is True for every compiled model in PyTorch 2.11, and transformers would then call its own loops.
        vars(importlib.import_module("transformers.integrations.hub_kernels"))["is_torchdynamo_exporting"] = (
            bool
        )
        if arguments.peer_configs and arguments.peer_configs.exists():
            tuned.install(arguments.peer_configs)
    take_all(model, size, side, arguments.quantities, arguments.backend, arguments.calls)
    if side == PEER and arguments.peer_configs:
        tuned.save(arguments.peer_configs, torch.cuda.get_device_name(), peer.version())


if __name__ == "__main__":
    main()
