"""A language model that reads prompts, generates tokens, and checks proposed tokens.

The model is a `RecurrentLM` of gated linear attention with random weights in bfloat16 and fused projections. It runs in
a process of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose.layers import join_projections
from flacompose.models import Decoder, RecurrentLM

from . import measure, models
from .processes import Figure, answer, attempt, command, figures, give
from .report import Row

MODEL = "gla"
QUANTITIES = ("prefill", "token", "check")
MODES = EAGER, COMPILED, GRAPH, TUNED = "eager", "compiled", "CUDA graph", "compiled and tuned"
TUNING = {"max_autotune": True, "cpp_wrapper": True}
"""Options of Inductor for `TUNED`, which only decodes: fewer and faster kernels."""
DEFAULT_MODES = EAGER, COMPILED, GRAPH
"""`TUNED` compiles for minutes."""
PROMPT, TOKEN, KERNELS = "prompt", "one token", "kernels of one token"
CHECKED, ACCEPTED = 8, 4
"""The number of tokens checked in one call, and of those that are right."""
CHECK = f"{CHECKED} tokens checked"
STEPS = f"{CHECKED} steps of one token"
AGAIN = f"{CHECKED} tokens, then {ACCEPTED} of them again"
LIMITS = {
    ("B1 T1", f"{TOKEN}, {GRAPH}"): 0.4,
    ("B64 T1", f"{TOKEN}, {GRAPH}"): 0.8,
    ("B1 T1", f"{TOKEN}, {COMPILED}"): 2.0,
    ("B64 T1", f"{TOKEN}, {COMPILED}"): 2.0,
    ("B1 T1", f"{TOKEN}, {TUNED}"): 2.0,
    ("B64 T1", f"{TOKEN}, {TUNED}"): 2.0,
}
"""Milliseconds."""


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 1024
    vocabulary: int = 32_000
    prompt: int = 2048
    batches: tuple[int, ...] = (1, 4, 16, 64)
    checked: tuple[int, ...] = (1, 16)
    """The batch sizes at which tokens are checked."""


SMALL = Size(layers=2, width=32, vocabulary=50, prompt=70, batches=(1, 2), checked=(1,))
"""For tests of the benchmark on a CPU."""


def build(size: Size, device: str, dtype: torch.dtype) -> RecurrentLM:
    model = models.recurrent(*models.LAYERS[MODEL], size.layers, size.width, size.vocabulary)
    model.to(device, dtype).eval()
    join_projections(model)
    return model


def read(model: RecurrentLM, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """The next token, and the state."""
    logits, state = model(tokens, state, last_only=True)
    return logits.argmax(-1, keepdim=True), state


def prompt(model: RecurrentLM, tokens: Tensor) -> tuple[Tensor, Any]:
    """`read` from the start. It is a function of its own, so that it is compiled separately."""
    return read(model, tokens)


def check(model: RecurrentLM, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Whether the model would choose these tokens, and the state after the last correct token of each row."""
    logits, states = model(tokens, state, num_states=CHECKED)
    right = (logits[:, :-1].argmax(-1) == tokens[:, 1:]).long().cumprod(1).sum(1)
    return right, tuple(s.at(right) for s in states)


def check_again(model: RecurrentLM, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """`check` without states after each token: the correct tokens are read again."""
    logits, _ = model(tokens, state)
    right = (logits[:, :-1].argmax(-1) == tokens[:, 1:]).long().cumprod(1).sum(1)
    return right, read(model, tokens[:, :ACCEPTED], state)[1]


Function = Callable[..., Any]
Compile = Callable[[Function], Function]


def compiler(
    mode: str, backend: str, options: dict[str, Any] | None = None, dynamic: bool | None = None
) -> Compile:
    """The compiler of a mode for functions of this module, which compiles each once."""
    if mode == EAGER:
        return lambda function: function
    made: dict[Function, Function] = {}

    def compiled(function: Function) -> Function:
        if function not in made:
            made[function] = torch.compile(
                function, fullgraph=True, backend=backend, options=options, dynamic=dynamic
            )
        return made[function]

    return compiled


def decoding(model: RecurrentLM, token: Tensor, mode: str, compiled: Compile) -> Callable[[], object]:
    """A function that decodes the next token of each row into ``token [B, 1]``."""
    state = model.init_state(token.shape[0])
    if mode == GRAPH:
        decoder = Decoder(partial(read, model), token, state)
        return lambda: token.copy_(decoder(token))
    step = compiled(read)

    def one() -> None:
        nonlocal state
        following, state = step(model, token, state)
        token.copy_(following)

    return one


@torch.no_grad()
def prefill(model: RecurrentLM, B: int, size: Size, mode: str, compiled: Compile, calls: int) -> None:
    """Give the time of prompts, with the last logits alone."""
    tokens = torch.randint(size.vocabulary, (B, size.prompt), device=_device(model))
    one = partial(compiled(prompt), model, tokens)
    give(f"B{B} T{size.prompt}", f"{PROMPT}, {mode}", "ms", measure.wall_us(one, calls=calls, rounds=3) / 1e3)


@torch.no_grad()
def decode(model: RecurrentLM, B: int, mode: str, compiled: Compile, calls: int) -> None:
    """Give the time and the number of kernels of one token in greedy decoding."""
    token = torch.zeros(B, 1, dtype=torch.int64, device=_device(model))
    one = decoding(model, token, mode, compiled)
    give(f"B{B} T1", f"{TOKEN}, {mode}", "ms", measure.wall_us(one, calls=calls) / 1e3)
    if on_gpu(model):
        give(f"B{B} T1", f"{KERNELS}, {mode}", "", measure.kernels(one))


@torch.no_grad()
def speculate(model: RecurrentLM, B: int, size: Size, mode: str, compiled: Compile, calls: int) -> None:
    """Give the time to check proposed tokens, with and without states after each token."""
    tokens = torch.randint(size.vocabulary, (B, CHECKED), device=_device(model))
    state = model.init_state(B)
    token = tokens[:, :1].contiguous()

    def steps() -> None:
        after = state
        for _ in range(CHECKED):
            _, after = compiled(read)(model, token, after)

    ways: dict[str, Callable[[], object]] = {
        CHECK: partial(compiled(check), model, tokens, state),
        STEPS: steps,
        AGAIN: partial(compiled(check_again), model, tokens, state),
    }
    for name, way in ways.items():
        one = measure.graph([way]) if mode == GRAPH else way
        give(f"B{B} T{CHECKED}", f"{name}, {mode}", "ms", measure.wall_us(one, calls=calls) / 1e3)


def take_all(
    model: RecurrentLM, size: Size, wanted: Sequence[str], modes: Sequence[str], backend: str, calls: int
) -> None:
    # In `GRAPH`, `speculate` records the code that `COMPILED` compiles.
    by_inductor = compiler(COMPILED, backend)
    compilers = {EAGER: compiler(EAGER, backend), COMPILED: by_inductor, GRAPH: by_inductor}
    tuned = partial(compiler, TUNED, backend, TUNING, dynamic=False)
    start = time.perf_counter()
    for mode in modes:
        if mode in (TUNED, GRAPH) and not on_gpu(model):
            answer(note=f"{mode}: needs a GPU")
            continue
        if "token" in wanted:
            for B in size.batches:
                # Tuned kernels are tuned for one batch size, so each batch size has a compiler of its own.
                compiled = compilers[mode] if mode in compilers else tuned()
                one = partial(decode, model, B, mode, compiled, calls)
                attempt(f"decoding, {mode}, at batch {B}", one)
        if "check" in wanted and mode in compilers:
            for B in size.checked:
                one = partial(speculate, model, B, size, mode, compilers[mode], max(1, calls // CHECKED))
                attempt(f"checking, {mode}, at batch {B}", one)
        if "prefill" in wanted and mode in compilers and mode != GRAPH:
            for B in size.batches:
                one = partial(prefill, model, B, size, mode, compilers[mode], max(1, calls // 10))
                attempt(f"{B} prompts, {mode}", one)
        answer(note=f"{mode}: all of it in {time.perf_counter() - start:.0f} s, compilation included")
        start = time.perf_counter()


def take(
    wanted: Sequence[str], modes: Sequence[str], device: str, backend: str, small: bool, timeout_s: float
) -> Iterator[Figure | str]:
    """Figures and notes."""
    options = ["--device", device, "--backend", backend, "--quantities", *wanted, "--modes", *modes]
    options += ["--small"] if small else []
    yield from figures(command("generation", options), MODEL, "flacompose", timeout_s)


def _numbers(case: str) -> tuple[int, int]:
    B, T = case.split()
    return int(B[1:]), int(T[1:])


def rows(taken: Sequence[Figure], small: bool = False) -> list[Row]:
    """Every figure beside eager mode, tokens per second, and checked tokens beside the alternatives."""
    layers = (SMALL if small else Size()).layers
    values = {(f.case, f.quantity): f.value for f in taken}
    found = []

    def add(
        case: str, quantity: str, unit: str, ours: float, other: float | None = None, baseline: str = ""
    ) -> None:
        limit = None if baseline else LIMITS.get((case, quantity))
        row = Row(f"{MODEL} model", case, quantity, unit, ours, other, max_value=limit, beside=baseline)
        found.append(row)

    for f in taken:
        name, mode = f.quantity.rsplit(", ", 1)
        if name in (STEPS, AGAIN):
            continue
        if name == CHECK:
            for way in (STEPS, AGAIN):
                add(f.case, f.quantity, f.unit, f.value, values.get((f.case, f"{way}, {mode}")), way)
            continue
        eager = None if mode == EAGER else values.get((f.case, f"{name}, {EAGER}"))
        add(f.case, f.quantity, f.unit, f.value, eager)
        if name == KERNELS:
            add(f.case, f"{name}, for each of {layers} layers, {mode}", "", f.value / layers)
        else:
            B, T = _numbers(f.case)
            add(f.case, f"tokens per second, {mode}", "", B * T / f.value * 1e3)
    return found


def _device(model: RecurrentLM) -> torch.device:
    return model.embeddings.weight.device


def on_gpu(model: RecurrentLM) -> bool:
    """Whether the model is on a GPU, with CUDA graphs and kernels to count."""
    return _device(model).type == "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description="The model in this process.")
    add = parser.add_argument
    add("--quantities", nargs="+", choices=QUANTITIES, default=list(QUANTITIES))
    add("--modes", nargs="+", choices=MODES, default=list(DEFAULT_MODES))
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--backend", default="inductor")
    add("--calls", type=int, default=50, help="tokens that are timed together")
    add("--small", action="store_true", help="a tiny model, to look at the benchmark itself")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    size = SMALL if arguments.small else Size()
    model = build(size, arguments.device, torch.bfloat16)
    take_all(model, size, arguments.quantities, arguments.modes, arguments.backend, arguments.calls)


if __name__ == "__main__":
    main()
