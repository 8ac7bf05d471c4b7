"""Train a small model in segments, with truncated and with exact gradients, on a task that needs exact gradients.

    python examples/train_segments.py                     # both, one after the other
    python examples/train_segments.py --gradients exact

A sequence contains one of eight cues in the noise of its first segment, and ends with a query: which cue was it? Only
the answer to the query has a loss. At first all cues have the same embedding. So the model must learn to write a cue
into the states from a loss that comes several segments later. In both ways of training the states carry this
information forwards. Truncated backpropagation detaches them between segments, so no gradient ever reaches the cue.
Without the detach, one backward pass goes through all segments and reaches it.

On one CPU thread a run gives the same numbers each time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

from flacompose.layers import GatedSlotAttention, HGRN2Attention, RecurrentState, RWKV6Attention

CUES = NOISE = 8
QUERY = NOISE + CUES  # after the noise, 0 to NOISE - 1, and the cues

States = tuple[RecurrentState, ...]  # one per layer


class Model(nn.Module):
    """`(tokens [B, T], states) -> (logits [B, T, CUES], states)`, with three layers of different recurrences."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(QUERY + 1, width)
        self.layers = nn.ModuleList(
            [
                HGRN2Attention(hidden_size=width, expand_ratio=16),
                GatedSlotAttention(hidden_size=width, num_heads=2, num_slots=8),
                RWKV6Attention(hidden_size=width, num_heads=2, proj_low_rank_dim=8, gate_low_rank_dim=8),
            ]
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in self.layers)
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, CUES))
        with torch.no_grad():
            self.embed.weight[NOISE:QUERY] = self.embed.weight[NOISE]

    def init_states(self, batch_size: int) -> States:
        return tuple(cast(HGRN2Attention, layer).init_state(batch_size) for layer in self.layers)

    def forward(self, tokens: Tensor, states: States) -> tuple[Tensor, States]:
        x = self.embed(tokens)
        new_states = []
        for norm, layer, state in zip(self.norms, self.layers, states, strict=True):
            y, state = layer(norm(x), state)
            x = x + y
            new_states.append(state)
        return self.head(x), tuple(new_states)


def sequences(args: argparse.Namespace, batch: int, seed: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Endless batches: the segments of tokens, `[batch, length]` each, and the cues, `[batch]`."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(batch)
    while True:
        tokens = torch.randint(NOISE, (batch, args.segments * args.length), generator=generator)
        cue = torch.randint(CUES, (batch,), generator=generator)
        place = torch.randint(args.length, (batch,), generator=generator)
        tokens[rows, place] = NOISE + cue
        tokens[:, -1] = QUERY
        yield tokens.to(args.device).split(args.length, dim=1), cue.to(args.device)


def answer(model: Model, segments: tuple[Tensor, ...], gradients: str) -> Tensor:
    """The logits at the query, `[B, CUES]`."""
    states = model.init_states(len(segments[0]))
    for tokens in segments:
        if gradients == "truncated":
            states = tuple(state.detach() for state in states)
        logits, states = model(tokens, states)
    return logits[:, -1]


def reach(model: Model, segments: tuple[Tensor, ...], cue: Tensor, gradients: str) -> list[float]:
    """The norm of the gradient of the loss at the embedded tokens of each segment."""
    embedded: list[Tensor] = []
    hook = model.embed.register_forward_hook(lambda module, tokens, x: embedded.append(x))
    loss = F.cross_entropy(answer(model, segments, gradients), cue)
    hook.remove()
    norms = torch.autograd.grad(loss, embedded, allow_unused=True)
    return [0.0 if x is None else x.norm().item() for x in norms]


@torch.no_grad()
def accuracy(model: Model, segments: tuple[Tensor, ...], cue: Tensor) -> float:
    return (answer(model, segments, "exact").argmax(-1) == cue).float().mean().item()


def train(args: argparse.Namespace, gradients: str) -> None:
    torch.manual_seed(args.seed)
    model = Model().to(args.device)
    held_out = next(sequences(args, 512, args.seed + 1))
    norms = reach(model, *held_out, gradients)
    print(f"{gradients}: gradient at each segment " + " ".join(f"{norm:.1e}" for norm in norms))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    batches = sequences(args, 32, args.seed)
    started = time.perf_counter()
    for _ in (bar := trange(args.steps, unit="step", desc=gradients)):
        segments, cue = next(batches)
        loss = F.cross_entropy(answer(model, segments, gradients), cue)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    seconds = time.perf_counter() - started
    print(
        f"{gradients}: {accuracy(model, *held_out):.1%} of held-out cues recalled, {1 / CUES:.1%} by chance; "
        f"{args.steps} steps in {seconds:.0f} s"
    )


def at_least(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < least:
            raise argparse.ArgumentTypeError(f"expected an integer, at least {least}, got {value!r}")
        return int(value)

    return parse


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    ways = ("truncated", "exact")
    add("--gradients", choices=(*ways, "both"), default="both", help="default: %(default)s")
    add("--steps", type=at_least(1), default=250, metavar="N", help="optimizer steps (default: %(default)s)")
    add("--segments", type=at_least(2), default=3, metavar="N", help="of a sequence (default: %(default)s)")
    add("--length", type=at_least(2), default=8, metavar="N", help="tokens of each (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for gradients in ways if args.gradients == "both" else (args.gradients,):
        train(args, gradients)


if __name__ == "__main__":
    main()
