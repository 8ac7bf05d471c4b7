"""What a reader wants to know first: one plot and one table out of all saved results.

To write both into README.md and the documentation: ``python -m benchmarks.summary``
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .cases import LARGER_HEADS, OPS
from .processes import ROOT
from .report import RESULTS, Results, Row, number, put_between, saved

BEGIN, END = "<!-- summary:begin -->", "<!-- summary:end -->"

IMAGE = ROOT / "docs" / "images" / "summary.svg"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "performance.md")
METHOD = ROOT / "docs" / "performance.md"
"""The page that says how the figures are taken."""

PEER, SOFTMAX = "fla", "softmax"
STEP, MEMORY, FIRST = "forward + backward", "peak memory over the inputs", "first step, cold caches"
MODEL_STEP, MODEL_MEMORY = "step", "peak memory of a step"
TOKENS = ("one token, CUDA graph", "one token, compiled")

Figures = dict[tuple[str, str, str, str], tuple[Row, Results]]


def collect(runs: Sequence[Results]) -> Figures:
    """The newest figure of each op, case, quantity and other side. A figure that is incomplete replaces no other."""
    figures: Figures = {}
    for run in sorted(runs, key=lambda run: run.environment.get("date", "")):
        for row in run.rows:
            key = (row.op, row.beside or run.other, row.case, row.quantity)
            if row.ours is not None and (row.other is not None or key not in figures):
                figures[key] = (row, run)
    return figures


def find(figures: Figures, op: str, beside: str, quantity: str, case: str | None = None) -> Row | None:
    """The first figure of an op beside another, at any case or at one."""
    for (*key, at, name), (row, _) in figures.items():
        if key == [op, beside] and name == quantity and case in (None, at):
            return row
    return None


def ops(figures: Figures, beside: str, quantity: str) -> dict[str, tuple[Row, Results]]:
    """For each op that has this quantity for both sides, the first such figure and the run that it comes from."""
    found: dict[str, tuple[Row, Results]] = {}
    apart = {(op.name, op.label(shape)) for op in OPS.values() if op.has_heads for shape in LARGER_HEADS}
    for (op, other, case, name), (row, run) in figures.items():
        if (other, name) == (beside, quantity) and row.ratio is not None and (op, case) not in apart:
            found.setdefault(op, (row, run))
    # In the order of the benchmark, not in that of the runs.
    return {op: found[op] for op in sorted(found, key=[*OPS, *found].index)}


def _cells(
    name: str, beside: str, step: Row, memory: Row | None, first: Row | None, token: Row | None
) -> str:
    def pair(row: Row | None) -> list[str]:
        return ["", ""] if row is None else [number(row.ours), number(row.other)]

    ratio = number(None if memory is None else memory.ratio)
    return " | ".join([name, beside, *pair(step), number(step.ratio), ratio, *pair(first), *pair(token)])


def table(figures: Figures) -> str:
    """One table in Markdown: ops beside the peer, then models beside the one with softmax attention."""
    header = [
        "",
        "beside",
        "step, ms",
        "the other's",
        "ratio",
        "memory ratio",
        "first call, s",
        "the other's",
    ]
    header += ["one token, ms", "the other's"]
    lines = [f"| {' | '.join(header)} |", "|---|---|" + "--:|" * 8]
    for op, (step, _) in ops(figures, PEER, STEP).items():
        memory = find(figures, op, PEER, MEMORY, step.case)
        first = find(figures, op, PEER, FIRST, step.case)
        lines.append(f"| {_cells(f'`{op}`', 'flash-linear-attention', step, memory, first, None)} |")
    for model, (step, _) in ops(figures, SOFTMAX, MODEL_STEP).items():
        memory = find(figures, model, SOFTMAX, MODEL_MEMORY, step.case)
        first = find(figures, model, SOFTMAX, FIRST, step.case)
        tokens = [row for name in TOKENS if (row := find(figures, model, SOFTMAX, name))]
        token = next(iter(tokens), None)
        lines.append(f"| {_cells(model, 'softmax attention', step, memory, first, token)} |")
    return "\n".join(lines) + "\n"


def _where(taken: Sequence[tuple[Row, Results]]) -> str:
    """The shapes and devices of some figures."""
    shapes = dict.fromkeys(row.case for row, _ in taken)
    devices = dict.fromkeys(run.environment.get("device", "an unknown device") for _, run in taken)
    return f"{'; '.join(shapes)} ({', '.join(devices)})"


def caption(figures: Figures) -> str:
    """What the table's figures are."""
    sentences = ["Less is better, and a ratio below 1 means that flacompose takes less than the other."]
    if taken := list(ops(figures, PEER, STEP).values()):
        sentences.append(
            f"An op's step is one forward and backward in bfloat16 at {_where(taken)}, its first call that of a fresh "
            "process with empty caches."
        )
    if taken := list(ops(figures, SOFTMAX, MODEL_STEP).values()):
        sentences.append(
            f"A model's step is that of a whole language model under `torch.compile` at {_where(taken)}, beside the "
            "same model with softmax attention; its first call contains the compilation, and a token is decoded at "
            "batch 1."
        )
    return " ".join(sentences)


def plot(figures: Figures, path: Path) -> None:
    """Step time and memory of every op over the peer's, as bars."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    steps = ops(figures, PEER, STEP)
    if not steps:
        return
    memories = [find(figures, op, PEER, MEMORY, step.case) for op, (step, _) in steps.items()]
    series = {
        "time of forward and backward": ([step.ratio for step, _ in steps.values()], "#2a7f62"),
        "peak memory": ([None if row is None else row.ratio for row in memories], "#8fb8de"),
    }
    # Neither the date nor random names go into the file: the same figures give the same picture.
    with matplotlib.rc_context({"svg.hashsalt": "summary", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(8, 1.3 + 0.55 * len(steps)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for i, (label, (ratios, colour)) in enumerate(series.items()):
            places = [place + 0.38 * (i - 0.5) for place, ratio in enumerate(ratios) if ratio is not None]
            known = [ratio for ratio in ratios if ratio is not None]
            bars = axes.barh(places, known, height=0.36, color=colour, label=label)
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(steps)), list(steps))
        axes.set_ylim(len(steps) - 0.4, -0.6)
        axes.set_xlim(0, max(1.1, *(r * 1.15 for ratios, _ in series.values() for r in ratios if r)))
        axes.set_xlabel("flacompose relative to flash-linear-attention (1.0 is equal, less is better)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def block(figures: Figures, page: Path, image: Path) -> str:
    """The summary with links as they are from `page`."""
    lines = []
    if ops(figures, PEER, STEP):
        link = Path(os.path.relpath(image, page.parent)).as_posix()
        lines.append(f"![Step time and memory of each op over flash-linear-attention's]({link})\n")
    lines.append(table(figures))
    text = caption(figures)
    if page.resolve() != METHOD:
        link = Path(os.path.relpath(METHOD, page.resolve().parent)).as_posix()
        text += f" [How the figures are taken]({link})."
    return "\n".join([*lines, text + "\n"])


def write(runs: Sequence[Results], image: Path = IMAGE, pages: Sequence[Path] = PAGES) -> None:
    """Draw the plot and put the summary between the markers of every page; a page without them is an error."""
    figures = collect(runs)
    texts = [put_between(page, page.read_text(), BEGIN, END, block(figures, page, image)) for page in pages]
    plot(figures, image)
    for page, text in zip(pages, texts, strict=True):
        page.write_text(text)


def main() -> None:
    write([Results.load(path) for path in saved(RESULTS)])


if __name__ == "__main__":
    main()
