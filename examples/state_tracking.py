"""Train small models of five kinds of layers to track a state, and plot their accuracy on longer sequences.

    python examples/state_tracking.py                          # all, about five minutes on one CPU thread
    python examples/state_tracking.py --tasks 2 --steps 100    # parity alone

Objects lie in a row. Each token swaps two of them or none, and after each token the model predicts their order. With
two objects this is parity: whether the number of swaps so far is odd. With five objects it is the word problem of the
symmetric group S5. The answer depends on all tokens: the state must hold the order, and a token must exchange two parts
of the state without loss.

A token multiplies the state of a layer by a matrix, and the possible matrices decide. Gated linear attention multiplies
channels by numbers between 0 and 1, which only shrinks them. The gated delta rule and RWKV7 also mix channels. But an
exchange has the eigenvalue -1, and their eigenvalues are at least 0 and -0.46, unless `allow_neg_eigval` is on. Such a
model may fit the training sequences, but fails on longer ones.

On one CPU thread a run gives the same numbers each time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

from flacompose.models import RecurrentConfig, RecurrentLM

WIDTH, HEADS = 64, 8
LAYERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gla": ("GLA", "GatedLinearAttention", {"num_heads": HEADS, "expand_k": 1.0}),
    "deltanet": ("Gated DeltaNet", "GatedDeltaNet", {}),
    "deltanet-neg": ("Gated DeltaNet, allow_neg_eigval", "GatedDeltaNet", {"allow_neg_eigval": True}),
    "rwkv7": ("RWKV7", "RWKV7Attention", {}),
    "rwkv7-neg": ("RWKV7, allow_neg_eigval", "RWKV7Attention", {"allow_neg_eigval": True}),
}
OPTIONS = {
    "GatedLinearAttention": {},
    "GatedDeltaNet": {"num_heads": HEADS, "head_dim": WIDTH // HEADS, "expand_v": 1},
    "RWKV7Attention": {"head_dim": WIDTH // HEADS},
}
TITLES = {2: "Parity", 3: "S3", 5: "S5"}
"""Titles, by the number of objects."""


def vocabulary(objects: int) -> int:
    """The number of tokens (swaps, no swap, start) or of orders, whichever is larger."""
    return max(math.comb(objects, 2) + 2, math.factorial(objects))


def batches(
    objects: int, size: int, length: int, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: a start and swaps, `[size, length]`, and the index of the order after each token, likewise."""
    orders = list(permutations(range(objects)))
    swaps = [(0, 0), *combinations(range(objects), 2)]

    def swapped(order: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
        row = list(order)
        row[i], row[j] = row[j], row[i]
        return tuple(row)

    after = torch.tensor([[orders.index(swapped(order, *swap)) for swap in swaps] for order in orders])
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(len(swaps), (size, length - 1), generator=generator)
        reached = [torch.zeros(size, dtype=torch.int64)]
        for token in tokens.unbind(1):
            reached.append(after[reached[-1], token])
        tokens = F.pad(tokens, (1, 0), value=len(swaps))
        yield tokens.to(device), torch.stack(reached, 1).to(device)


def train(name: str, objects: int, args: argparse.Namespace) -> RecurrentLM:
    """A model of one layer, trained with sequences of `args.length` tokens."""
    title, layer, own = LAYERS[name]
    torch.manual_seed(args.seed)
    model = RecurrentLM(
        RecurrentConfig(
            vocab_size=vocabulary(objects), hidden_size=WIDTH, num_hidden_layers=1, intermediate_size=2 * WIDTH,
            layer=layer, layer_options=OPTIONS[layer] | own,
        )
    ).to(args.device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, args.steps, pct_start=0.1)
    data = batches(objects, 64, args.length, args.seed, args.device)
    for _ in (bar := trange(args.steps, unit="step", desc=f"{TITLES[objects]}, {title}")):
        tokens, orders = next(data)
        loss = F.cross_entropy(model(tokens)[0].flatten(0, 1), orders.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return model


@torch.no_grad()
def accuracies(model: RecurrentLM, objects: int, args: argparse.Namespace) -> dict[int, float]:
    """The accuracy in the last quarter of sequences, by their length, up to eight times the length in training."""
    tokens, orders = next(batches(objects, 256, 8 * args.length, args.seed + 1, args.device))
    right = (model(tokens)[0].argmax(-1) == orders).float().mean(0)
    lengths = [args.length * 2**i // 4 for i in range(6)]
    return {n: right[n - max(1, n // 4) : n].mean().item() for n in lengths}


# Legible on white and on dark pages, since the background is transparent.
COLOURS = ("#1f77b4", "#d1661a", "#2ca02c", "#d62728", "#9467bd")
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "state_tracking",
    "svg.fonttype": "none",
    "savefig.transparent": True,
}


@matplotlib.rc_context(STYLE | dict.fromkeys(INKED, "#808080"))
def plot(found: dict[int, dict[str, dict[int, float]]], length: int, path: Path) -> None:
    figure = Figure(figsize=(3.3 * len(found), 3.6), layout="constrained")
    for axes, (objects, models) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items()):
        for i, name in enumerate(models):
            by_length = models[name]
            style = "o--" if name.endswith("-neg") else "o-"
            axes.plot(
                list(by_length), list(by_length.values()), style, color=COLOURS[i], markersize=4, label=LAYERS[name][0]
            )  # fmt: skip
        axes.axvline(length, color="tab:gray", linewidth=0.8)
        axes.axhline(1 / math.factorial(objects), color="tab:gray", linestyle=":", linewidth=0.8)
        axes.set_xscale("log", base=2)
        lengths = list(next(iter(models.values())))
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set(title=TITLES[objects], xlabel="tokens", ylabel="right answers", ylim=(-0.03, 1.05))
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def at_least(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < least:
            raise argparse.ArgumentTypeError(f"expected an integer, at least {least}, got {value!r}")
        return int(value)

    return parse


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tasks", nargs="+", type=int, choices=TITLES, default=[2, 5], help="objects (default: 2 5)")
    add("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="LAYER", help=", ".join(LAYERS))
    add("--steps", type=at_least(2), default=500, metavar="N", help="optimizer steps (default: %(default)s)")
    add(
        "--length",
        type=at_least(4),
        default=16,
        metavar="N",
        help="tokens in training (default: %(default)s)",
    )
    add("--seed", type=at_least(0), default=0, metavar="N", help="default: %(default)s")
    add("--out", type=Path, default=Path("state_tracking.svg"), help="the plot (default: %(default)s)")
    args = parser.parse_args(argv)
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[int, dict[str, dict[int, float]]] = {}
    for objects in args.tasks:
        for name in args.layers:
            started = time.perf_counter()
            model = train(name, objects, args)
            by_length = found.setdefault(objects, {})[name] = accuracies(model, objects, args)
            rights = ", ".join(f"{right:.1%} at {n}" for n, right in by_length.items())
            print(
                f"{TITLES[objects]}, {name}: {rights}; {args.steps} steps in {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    plot(found, args.length, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
