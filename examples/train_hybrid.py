"""Train a hybrid of gated delta rule and softmax attention, three layers to one, to recall the last written values.

    python examples/train_hybrid.py                # about a minute on one CPU thread
    python examples/train_hybrid.py --compile      # the whole model as one graph, forward and backward

A sequence writes values under keys, under some keys several times, and then asks for the last value of every key. The
delta rule replaces the value of a key, as the task does. After training, the model reads a sequence once, keeps the
states of its layers, and answers the questions from them, one token at a time.

On one CPU thread a run gives the same numbers each time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

from flacompose.layers import GatedDeltaNet

KEYS = VALUES = 8  # tokens: first the keys, then the values


class Attention(nn.Module):
    """Causal softmax attention, called like a layer of flacompose. Its state is all keys and values so far."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Any]:
        B, T, width = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        # After the first call there is one token per call, which sees all earlier tokens.
        assert state is None or T == 1
        o = F.scaled_dot_product_attention(q, k, v, is_causal=state is None)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, width)), (k, v)


class Hybrid(nn.Module):
    """`(tokens [B, T], states) -> (logits [B, T, VALUES], states)`; every fourth layer is softmax attention."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(KEYS + VALUES, width)
        self.layers = nn.ModuleList(
            Attention(width, heads)
            if i % 4 == 3
            else GatedDeltaNet(hidden_size=width, num_heads=heads, head_dim=width // heads, expand_v=1)
            for i in range(layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, VALUES))

    def forward(self, tokens: Tensor, states: Sequence[Any] | None = None) -> tuple[Tensor, list[Any]]:
        x = self.embed(tokens)
        new = []
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            y, state = layer(norm(x), None if states is None else states[i])
            x = x + y
            new.append(state)
        return self.head(x), new


def batches(
    size: int, writes: int, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless batches: the writes, `[B, 2 * writes]`, the questions and the answers, `[B, KEYS]` each."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        keys = torch.randint(KEYS, (size, writes), generator=generator)
        # Every key is written at least once.
        keys[:, :KEYS] = torch.rand(size, KEYS, generator=generator).argsort(1)
        values = torch.randint(VALUES, (size, writes), generator=generator)
        answers = torch.zeros(size, KEYS, dtype=torch.int64)
        for i in range(writes):
            answers.scatter_(1, keys[:, i : i + 1], values[:, i : i + 1])
        written = torch.stack([keys, KEYS + values], 2).flatten(1)
        questions = torch.rand(size, KEYS, generator=generator).argsort(1)
        yield written.to(device), questions.to(device), answers.gather(1, questions).to(device)


@torch.no_grad()
def recalled(model: Hybrid, written: Tensor, questions: Tensor, answers: Tensor) -> float:
    """The share of right answers to questions, asked one token at a time after the writes."""
    _, states = model(written)
    right = []
    for question, answer in zip(questions.split(1, 1), answers.unbind(1), strict=True):
        logits, states = model(question, states)
        right.append(logits[:, 0].argmax(-1) == answer)
    return torch.stack(right).float().mean().item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=300, metavar="N", help="optimizer steps (default: %(default)s)")
    add(
        "--writes", type=int, default=16, metavar="N", help="of a sequence, at least 8 (default: %(default)s)"
    )
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--compile", action="store_true", help="compile the training step")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.writes < KEYS:
        parser.error(f"--steps must be at least 1 and --writes at least {KEYS}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = Hybrid().to(device)

    def loss_of(written: Tensor, questions: Tensor, answers: Tensor) -> Tensor:
        logits, _ = model(torch.cat([written, questions], 1))
        return F.cross_entropy(logits[:, -KEYS:].flatten(0, 1), answers.flatten())

    step = torch.compile(loss_of, fullgraph=True) if args.compile else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    data = batches(32, args.writes, args.seed, device)
    held_out = next(batches(256, args.writes, args.seed + 1, device))
    started = time.perf_counter()
    for _ in (bar := trange(args.steps, unit="step")):
        loss = step(*next(data))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    print(
        f"{recalled(model, *held_out):.1%} of held-out questions answered, {1 / VALUES:.1%} by chance; "
        f"{args.steps} steps in {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
