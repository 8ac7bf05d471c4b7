"""Train, export and sample a byte-level language model of gated linear attention layers.

    python examples/train_lm.py                      # the text of Python's own language reference
    python examples/train_lm.py --text book.txt --steps 2000

The recurrent state is an argument and a result of the model. So training passes it from one segment of the text to the
next (truncated backpropagation through time), the exported program continues any sequence at any length, and generation
calls the same model with one token at a time.

All files are written to --out. Ctrl-C saves a checkpoint there, beside the compiler's cache, and the same command
continues from it. A complete run removes both. On one CPU thread, an interrupted run gives the same result to the bit.
On several threads or a GPU any two runs differ in the last bits, since the order in which the embedding's gradient is
summed varies.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.nn import functional as F
from tqdm import tqdm

from flacompose.layers import GatedLinearAttention, RecurrentState

VOCAB = 256  # bytes

States = tuple[RecurrentState, ...]  # one per block


# ---------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Pre-norm residual block: gated linear attention mixes tokens, an MLP mixes channels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(width)
        self.attn = GatedLinearAttention(hidden_size=width, num_heads=heads, use_short_conv=True)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        mixed, state = self.attn(self.attn_norm(x), state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


class ByteLM(nn.Module):
    """`(tokens [B, T], states) -> (logits [B, T, 256], states)`, `T >= 1`."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def init_states(self, batch_size: int) -> States:
        return tuple(cast(Block, block).attn.init_state(batch_size) for block in self.blocks)

    def forward(self, tokens: Tensor, states: States) -> tuple[Tensor, States]:
        x = self.embed(tokens)
        new_states = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state)
            new_states.append(state)
        return self.head(self.norm(x)), tuple(new_states)


def segment_loss(model: ByteLM, tokens: Tensor, states: States) -> tuple[Tensor, States]:
    """Mean nats per byte of predicting `tokens[:, 1:]` from `tokens[:, :-1]`."""
    logits, states = model(tokens[:, :-1], states)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), states


# ----------------------------------------------------------------------------------------------------- data


@dataclass
class Streams:
    """A text as `batch` parallel streams, cut into consecutive segments: `segment(i + 1)` continues `segment(i)`."""

    data: Tensor  # uint8 [bytes]
    batch: int
    length: int

    def __post_init__(self) -> None:
        self.per_stream = (len(self.data) - 1) // self.batch
        self.segments = self.per_stream // self.length

    def segment(self, i: int, device: torch.device) -> Tensor:
        """Segment `i` of every stream, int64 `[batch, length + 1]`: inputs, and targets one byte later."""
        start = torch.arange(self.batch)[:, None] * self.per_stream + i * self.length
        return self.data[start + torch.arange(self.length + 1)].to(device, torch.long)


def read_text(path: Path | None) -> bytes:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return path.read_bytes()
    except OSError as error:
        raise SystemExit(f"error: --text {path}: {error.strerror}") from None


def split(text: bytes, batch: int, length: int) -> tuple[Streams, Streams]:
    """Split off the last tenth, at most 32 KiB, for validation."""
    held_out = min(len(text) // 10, 1 << 15)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    train = Streams(data[: len(data) - held_out], batch, length)
    valid = Streams(data[len(data) - held_out :], batch, length)
    if train.segments < 1 or valid.segments < 1:
        raise SystemExit(
            f"error: --text has {len(text)} bytes; --batch {batch} streams of --segment {length} bytes "
            f"need at least {10 * (batch * length + 1)}. Give a longer text, or a smaller --batch or --segment."
        )
    return train, valid


def byte_frequency_loss(train: Streams, valid: Streams) -> float:
    """Nats per held-out byte of always predicting the byte frequencies of the training text."""
    counts = torch.bincount(train.data.long(), minlength=VOCAB).double() + 1
    log_p = (counts / counts.sum()).log()
    return -log_p[valid.data.long()].mean().item()


# ------------------------------------------------------------------------------------------------- training


@contextmanager
def working(on: str) -> Iterator[None]:
    """Show a line that counts the seconds of a slow step."""
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(0.5):
            line.refresh()

    with tqdm(desc=on, bar_format="{desc}: {elapsed}") as line:
        counter = threading.Thread(target=count)
        counter.start()
        try:
            yield
        finally:
            ended.set()
            counter.join()


class StopOnInterrupt:
    """The first Ctrl-C asks the training loop to stop after its step; the second one stops at once."""

    requested = False
    compiling = False

    def __enter__(self) -> StopOnInterrupt:
        self.previous = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def handle(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        when = b"still compiling: stopping" if self.compiling else b"stopping"
        os.write(
            sys.stderr.fileno(), b"\n" + when + b" after this step; Ctrl-C again stops at once, unsaved\n"
        )


class Trainer:
    """The state of training, and its step."""

    def __init__(
        self, model: ByteLM, train: Streams, valid: Streams, args: argparse.Namespace, run: dict
    ) -> None:
        self.model, self.train, self.valid, self.args, self.run = model, train, valid, args, run
        self.device = next(model.parameters()).device
        for block in model.blocks:  # one graph serves all blocks and is compiled once
            block.compile(fullgraph=True)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.step = 0
        self.states = model.init_states(args.batch)
        self.train_losses: list[float] = []
        self.valid_losses: list[tuple[int, float]] = []

    def learning_rate(self) -> float:
        """Linear warm-up, then a half cosine down to a tenth."""
        warmup = min(20, self.args.steps // 10 + 1)
        if self.step < warmup:
            return self.args.lr * (self.step + 1) / warmup
        progress = (self.step - warmup) / max(1, self.args.steps - warmup)
        return self.args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train_step(self) -> None:
        position = self.step % self.train.segments
        states = self.states if position else self.model.init_states(self.args.batch)
        loss, states = segment_loss(self.model, self.train.segment(position, self.device), states)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.states = tuple(state.detach() for state in states)
        self.train_losses.append(loss.item())
        self.step += 1

    @torch.no_grad()
    def validate(self) -> float:
        """Mean nats per held-out byte, with the state passed from segment to segment."""
        states, total = self.model.init_states(self.args.batch), 0.0
        with torch.compiler.set_stance("force_eager"):  # the blocks are compiled for training alone
            for i in range(self.valid.segments):
                loss, states = segment_loss(self.model, self.valid.segment(i, self.device), states)
                total += loss.item()
        return total / self.valid.segments

    def advance(self, stop: StopOnInterrupt) -> None:
        """One step, and a validation after every fifth of the run."""
        try:
            self.train_step()
        except Exception:
            if stop.requested:  # the same Ctrl-C reached the C++ compiler: this step has not happened
                return
            raise
        if self.step % max(1, self.args.steps // 5) == 0 or self.step == self.args.steps:
            self.valid_losses.append((self.step, self.validate()))

    def fit(self, checkpoint: Path) -> None:
        """Train to the last step, or to Ctrl-C, which saves and exits with status 130."""
        steps = self.args.steps
        with StopOnInterrupt() as stop:
            if self.step < steps:
                stop.compiling = True
                with working("compiling the first step"):
                    self.advance(stop)
                stop.compiling = False
            # The clock starts here, so that the rate is the one of compiled steps.
            with tqdm(total=steps, initial=self.step, unit="step", desc="training") as bar:
                while self.step < steps and not stop.requested:
                    self.advance(stop)
                    held_out = f"{self.valid_losses[-1][1]:.3f}" if self.valid_losses else "-"
                    bar.set_postfix(loss=f"{self.train_losses[-1]:.3f}", held_out=held_out)
                    bar.update(self.step - bar.n)
            self.save(checkpoint)
        if self.step < steps:
            print(
                f"interrupted at step {self.step}; saved {checkpoint}. The same command continues from there, and "
                f"rm -r {checkpoint.parent} removes everything."
            )
            raise SystemExit(130)

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".tmp")
        torch.save(
            {
                "run": self.run,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "states": self.states,
                "step": self.step,  # which determines the position in the text
                "train_losses": self.train_losses,
                "valid_losses": self.valid_losses,
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all(),
            },
            partial,
        )
        os.replace(partial, path)  # so that a checkpoint is never incomplete

    def resume(self, path: Path) -> None:
        saved = torch.load(path, map_location=self.device, weights_only=True)
        for name, value in self.run.items():
            if saved["run"].get(name) != value:
                raise SystemExit(
                    f"error: {path} is of a run with {name} {saved['run'].get(name)}, this one has {value}. "
                    f"Run it with the same options, or delete the file, or choose another --out."
                )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.states, self.step = saved["states"], saved["step"]
        self.train_losses, self.valid_losses = saved["train_losses"], saved["valid_losses"]
        torch.set_rng_state(saved["rng"].cpu())
        if len(saved["cuda_rng"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([rng.cpu() for rng in saved["cuda_rng"]])


def bits(nats: Any) -> Any:
    return nats / math.log(2)


def nats(bits: Any) -> Any:
    return bits * math.log(2)


def plot(trainer: Trainer, baseline: float, path: Path) -> None:
    losses, reach = trainer.train_losses, max(1, trainer.step // 50)
    windows = (losses[max(0, i - reach) : i + reach + 1] for i in range(len(losses)))
    smooth = [sum(window) / len(window) for window in windows]
    steps = range(1, trainer.step + 1)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color="tab:blue", linewidth=1.8, label="training (smoothed)")
    axes.plot(
        *zip(*trainer.valid_losses, strict=True), "o-", color="tab:orange", label="held out", clip_on=False
    )
    axes.axhline(baseline, color="tab:gray", linestyle="--", label=f"byte frequencies ({baseline:.2f})")
    axes.set(
        xlabel="step", ylabel="loss (nats per byte)", title="Gated linear attention, bytes", ylim=(0, None)
    )
    axes.set_xlim(0, trainer.step)
    axes.secondary_yaxis("right", functions=(bits, nats)).set_ylabel("bits per byte")
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


# --------------------------------------------------------------------------------------- export and sampling


def export(model: ByteLM, out: Path) -> tuple[Path, Path]:
    """Export `(tokens [1, T], states) -> (logits, states)` twice: for any `T >= 2`, and for `T = 1`."""
    device = next(model.parameters()).device
    states = model.init_states(1)
    tokens, token = (torch.zeros(1, length, dtype=torch.long, device=device) for length in (16, 1))
    shapes = ShapesCollection()
    shapes[tokens] = {1: Dim("T", min=2, max=2**20)}
    with torch.no_grad():
        any_length = torch.export.export(
            model, (tokens, states), dynamic_shapes=shapes.dynamic_shapes(model, (tokens, states))
        )
        one_token = torch.export.export(model, (token, states))
    paths = out / "lm.pt2", out / "lm_step.pt2"
    torch.export.save(any_length, paths[0])
    torch.export.save(one_token, paths[1])
    return paths


def tensors(logits: Tensor, states: States) -> list[Tensor]:
    return [logits, *(x for state in states for x in (state.recurrent, *(state.conv or ())))]


@torch.no_grad()
def check(program: ExportedProgram, model: ByteLM, text: Tensor) -> None:
    """Compare logits and states with eager mode, at lengths for which the program was not traced."""
    device = next(model.parameters()).device
    exported = program.module()
    for length in (3, 64, 65, 165, 1000):
        tokens = text[:length].to(device, torch.long)[None]
        with torch.compiler.set_stance("force_eager"):
            expected = tensors(*model(tokens, model.init_states(1)))
        actual = tensors(*exported(tokens, model.init_states(1)))
        error = max(
            ((a - e).norm() / e.norm().clamp_min(1e-6)).item() for a, e in zip(actual, expected, strict=True)
        )
        print(f"  length {tokens.shape[1]:>5}: largest relative error {error:.1e}")
        if not error < 1e-4:
            raise SystemExit("error: the exported program and the eager model disagree")


@torch.no_grad()
def generate(
    any_length: ExportedProgram,
    one_token: ExportedProgram,
    states: States,
    prompt: bytes,
    count: int,
    seed: int,
) -> bytes:
    """Read the prompt in one call, then sample byte by byte. Only the state is kept."""
    read, step = any_length.module(), one_token.module()
    device = states[0].recurrent.device
    sampler = torch.Generator(device).manual_seed(seed)
    text, tokens = bytearray(prompt), torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        logits, states = (step if tokens.shape[1] == 1 else read)(tokens, states)
        probabilities = torch.softmax(logits[:, -1].float() / 0.7, dim=-1)
        tokens = torch.multinomial(probabilities, 1, generator=sampler)
        text.append(int(tokens))
    return bytes(text)


# ----------------------------------------------------------------------------------------------------- main


def positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {value!r}")
    return int(value)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="bytes to learn (default: the topics of Python's own help)")
    add("--out", type=Path, default=Path("runs/train_lm"), metavar="DIR", help="default: %(default)s")
    add("--steps", type=positive, default=160, metavar="N", help="optimizer steps (default: %(default)s)")
    add("--batch", type=positive, default=8, metavar="N", help="parallel streams (default: %(default)s)")
    add(
        "--segment",
        type=positive,
        default=256,
        metavar="N",
        help="bytes a step and stream (default: %(default)s)",
    )
    add("--width", type=positive, default=128, metavar="N", help="model width (default: %(default)s)")
    add("--depth", type=positive, default=2, metavar="N", help="blocks (default: %(default)s)")
    add("--heads", type=positive, default=2, metavar="N", help="attention heads (default: %(default)s)")
    add("--lr", type=float, default=4e-3, metavar="X", help="peak learning rate (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the weights and the sample; the same bits on one CPU thread only (default: %(default)s)",
    )
    add("--prompt", default="The value of ", help="what the sample begins with (default: %(default)r)")
    add("--sample", type=positive, default=400, metavar="N", help="bytes to sample (default: %(default)s)")
    args = parser.parse_args(argv)
    if not args.prompt:
        parser.error("argument --prompt: expected at least one character, got ''")
    if args.segment < 2:
        parser.error(f"argument --segment: expected at least 2, got {args.segment}")
    if not 0 < args.lr < math.inf:
        parser.error(f"argument --lr: expected a positive number, got {args.lr}")
    if args.width % (2 * args.heads):
        parser.error(f"argument --width: expected a multiple of twice --heads {args.heads}, got {args.width}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    started = time.perf_counter()
    text = read_text(args.text)
    train, valid = split(text, args.batch, args.segment)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"error: --out {args.out}: {error.strerror}") from None

    # The folder of the compiler's files, unless the user has set one. PyTorch reads these variables when it imports its
    # compiler, at the first use. Precompiled headers are always in the folder of temporary files.
    cache = (args.out / "compiler-cache").resolve()
    cache.mkdir(exist_ok=True)
    temporary = os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(cache)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ByteLM(args.width, args.depth, args.heads).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    baseline = byte_frequency_loss(train, valid)
    source = args.text or "Python's own help"
    print(
        f"training a byte-level language model of gated linear attention on {source}, then "
        "plotting, exporting, reloading and sampling it: about two minutes on two idle cores\n"
        f"{len(train.data):,} bytes to train on, {len(valid.data):,} held out; {parameters:,} parameters on {device}"
    )

    run: dict[str, object] = {
        f"--{name}": getattr(args, name)
        for name in ("steps", "batch", "segment", "width", "depth", "heads", "lr", "seed")
    }
    run["text (SHA-256)"] = hashlib.sha256(text).hexdigest()
    trainer = Trainer(model, train, valid, args, run)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
        print(f"continuing from step {trainer.step} ({checkpoint})")
    trainer.fit(checkpoint)

    final = trainer.valid_losses[-1][1]
    print(f"{'held-out loss':<30}{'nats/byte':>10}{'bits/byte':>11}")
    for name, loss in (("predicting byte frequencies", baseline), ("this model", final)):
        print(f"  {name:<28}{loss:>10.3f}{bits(loss):>11.3f}")
    plot(trainer, baseline, args.out / "loss.png")
    print(f"wrote {args.out / 'loss.png'}")

    model.eval()
    with working("exporting and loading"):
        paths = export(model, args.out)
        any_length, one_token = (torch.export.load(path) for path in paths)
    print(f"exported {paths[0]} and {paths[1]}; loaded again, against eager:")
    check(any_length, model, valid.data)
    with working("sampling"):
        sample = generate(
            any_length, one_token, model.init_states(1), args.prompt.encode(), args.sample, args.seed
        )
    print(f"sampled from the loaded programs:\n{'-' * 80}\n{sample.decode(errors='replace')}\n{'-' * 80}")
    checkpoint.unlink()
    tempfile.tempdir = None
    os.environ.pop("TMPDIR") if temporary is None else os.environ.update(TMPDIR=temporary)
    shutil.rmtree(cache, ignore_errors=True)
    print(f"removed {checkpoint} and the compiler's cache: the same command starts a new run")
    left = ", ".join(sorted(path.name for path in args.out.iterdir()))
    print(f"left {left} in {args.out}; rm -r {args.out} removes them")
    print(f"finished in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
