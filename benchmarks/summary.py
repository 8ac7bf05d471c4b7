"""The figures of saved results that pages quote.

README.md, also the home page, has three reasons, a few figures, and cases where another library is faster.
docs/choosing.md has the costs of recurrences, docs/performance.md the plot and the tables, and the page of the gated
delta rule a comparison with FlashQLA. ``python -m benchmarks.summary`` rewrites the text between two markers of a page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from . import context
from .cases import OPS, TRAINING
from .cuda import FORWARD, STEP, WITH_HOST
from .processes import ROOT
from .report import NAMES, RESULTS, Results, Row, number, put_between, saved

IMAGE = Path("docs/images/summary.svg")
INK = "#808080"
"""The colour of text and axes. It is legible on white and on dark pages, since the background is transparent."""
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "savefig.transparent": True,
    "font.size": 10,
    **dict.fromkeys(INKED, INK),
}

PEER, MAMBA, XLSTM, QLA, SOFTMAX = "fla", "mamba-ssm", "mlstm_kernels", "FlashQLA", "softmax"
FLOOR = "floor"
MEMORY, FIRST = "peak memory over the inputs", "first step, cold caches"
MODEL_STEP, MODEL_MEMORY = "step", "peak memory of a step"
PUBLIC_STEP = "training step, compiled"

Figures = dict[tuple[str, str, str, str], tuple[Row, Results]]
Taken = tuple[Row, Results]


def collect(runs: Sequence[Results]) -> Figures:
    """The newest figure of each op, case, quantity and other side. A complete row has precedence."""
    figures: Figures = {}
    for run in sorted(runs, key=lambda run: run.environment.get("date", "")):
        for row in run.rows:
            key = (row.op, row.beside or run.other, row.case, row.quantity)
            whole = key in figures and figures[key][0].other is not None
            if row.ours is not None and (row.other is not None or not whole):
                figures[key] = (row, run)
    return figures


def ops(
    figures: Figures, baseline: str, quantity: str, *, alone: bool = False, each: bool = False
) -> dict[str, Taken]:
    """For each op that has this quantity for both sides, its figure and the run that it comes from.

    The figure is at the shape common to all ops, if there is one, else the oldest.

    With `alone`, figures without the other side are included. With `each`, all figures of an op are included, under its
    name and their case.
    """
    found: dict[str, Taken] = {}
    for (op, other, case, name), (row, run) in figures.items():
        complete = alone or row.ratio is not None
        first = OPS[op].label(TRAINING[0]) if op in OPS else case
        elsewhere = not each and case != first and (op, other, first, name) in figures
        if (other, name) == (baseline, quantity) and complete and not elsewhere:
            found.setdefault(f"{op}, {case}" if each else op, (row, run))
    # In the order of the benchmark, not of the runs.
    return {op: found[op] for op in sorted(found, key=[*OPS, *found].index)}


def the(figures: Figures, op: str, baseline: str, quantity: str) -> Taken:
    """The figure of one op that the README quotes. A missing figure is an error."""
    try:
        return ops(figures, baseline, quantity)[op]
    except KeyError:
        raise LookupError(f"the saved results must have {quantity!r} of {op!r} beside {baseline!r}") from None


def in_the_same_run(taken: Taken, quantity: str) -> Row | None:
    """Another quantity of the same op and case."""
    row, run = taken
    key = (row.op, row.beside, row.case, quantity)
    return next((r for r in run.rows if (r.op, r.beside, r.case, r.quantity) == key), None)


def gpu(run: Results) -> str:
    """The GPU's short name: `H100` of `NVIDIA H100 80GB HBM3`."""
    return run.environment.get("device", "unknown").removeprefix("NVIDIA ").split(" ")[0]


def commit(run: Results) -> str:
    return run.environment.get("commit", "")[:7]


def where(run: Results) -> str:
    return f"{gpu(run)}, commit {commit(run)}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> str:
    """A table of the columns that are not empty. Columns in `words` are text, other columns are numbers."""
    rows = list(rows)
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    line = f"|{'|'.join('---' if header[i] in words else '--:' for i in kept)}|\n"
    first, *lines = (f"| {' | '.join(cells[i] for i in kept)} |\n" for cells in (header, *rows))
    return "".join([first, line, *lines])


def reasons(figures: Figures) -> str:
    """Three reasons to use this library, with a measured number each."""
    breaks, breaks_run = the(figures, "kimi-linear model", PEER, "graph breaks of a token")
    step, step_run = the(figures, "gla", PEER, STEP)
    memory, _ = the(figures, "gla", PEER, MEMORY)
    error, error_run = the(figures, "gsa", PEER, "relative error of dg")
    peer = NAMES[PEER]
    return f"""\
- **A model stays one graph.** It compiles with `fullgraph=True`, exports with `torch.export`, and is exact at lengths
  that it was not traced with. A compiled decoding step of Kimi Linear in transformers has
  **{number(breaks.ours)} graph breaks**; with {peer} it has {number(breaks.other)} ({where(breaks_run)}).
- **Gated linear attention trains in half the time.** A forward and backward pass takes {number(step.ours)} ms, which is
  **{step.ratio:.2f} of the time** of {peer}, and {memory.ratio:.2f} of its memory ({where(step_run)}).
- **Gradients stay accurate.** Every gate from 0 to -inf is legal. In bfloat16 the gradient of the gates of gated slot
  attention has a **relative error of {error.ours:.4f}**; that of {peer} has {error.other:.4f}
  ({where(error_run)}).
"""


CHOSEN = (
    ("Gated linear attention", "gla", PEER, STEP),
    ("Mamba-2's scan, without D and z", "mamba2", MAMBA, STEP),
    ("Gated delta rule", "gated_delta_rule", PEER, STEP),
    ("Gated delta rule", "gated_delta_rule", QLA, STEP),
    ("Kimi Linear, a whole model", "kimi-linear model", PEER, PUBLIC_STEP),
    ("A model of gated linear attention", "gla model", SOFTMAX, MODEL_STEP),
)
"""The rows of the README: title, op, other side, quantity."""


def few(figures: Figures) -> str:
    """The table of the README, narrow enough for a telephone."""
    rows = []
    for told, op, baseline, quantity in CHOSEN:
        row, run = the(figures, op, baseline, quantity)
        rows.append(
            [told, number(row.ours), f"{number(row.other)} ({NAMES.get(baseline, baseline)})", gpu(run)]
        )
    return markdown(["Training step", "ours, ms", "others, ms", "GPU"], rows, ["Training step", "GPU"])


def ratios(figures: Figures, quantity: str) -> list[float]:
    """The ratios of flacompose to FlashQLA at every measured shape."""
    taken = ops(figures, QLA, quantity, each=True).values()
    return [row.ratio for row, _ in taken if row.ratio is not None]


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def faster(figures: Figures) -> str:
    """The text about FlashQLA in the README."""
    step, run = the(figures, "gated_delta_rule", QLA, STEP)
    on_gpu, called = ratios(figures, STEP), ratios(figures, WITH_HOST.format(STEP))
    with_host = ""
    if called:
        with_host = f"""\
  With the host's time, in single calls in eager mode, a step takes {span(called)} times as long: where calls are
  short, FlashQLA's launches take longer than its kernels.
"""
    return f"""\
- You train with the gated delta rule on a Hopper GPU, with heads of 128.
  [{QLA}](https://github.com/QwenLM/FlashQLA) has faster kernels for it: on the GPU, at {len(on_gpu)} measured shapes
  and gates, a step of flacompose takes **{span(on_gpu)} times as long**, and a forward pass
  {span(ratios(figures, FORWARD))} times ({where(run)}).
{with_host}  [The page of the op](docs/ops/gated_delta_rule.md#beside-flashqla) has each figure.
"""


def beside_flashqla(figures: Figures) -> str:
    """The ratios to FlashQLA at each shape, on the GPU and with the host, for the page of the gated delta rule."""
    kinds = {
        "forward": FORWARD,
        "step": STEP,
        "forward, with the host": WITH_HOST.format(FORWARD),
        "step, with the host": WITH_HOST.format(STEP),
        "memory": MEMORY,
    }
    rows, run = [], None
    for (op, other, case, quantity), taken in figures.items():
        if (other, quantity) == (QLA, STEP):
            gates = "weak" if op.endswith("with weak gates") else "strong"
            found = [in_the_same_run(taken, name) for name in kinds.values()]
            rows.append([gates, case, *(f"{row.ratio:.2f}" if row and row.ratio else "" for row in found)])
            run = taken[1]
    assert run is not None, "the saved results must have FlashQLA"
    table = markdown(["gates", "shape", *kinds], rows, ["gates", "shape"])
    return f"{table}\nMeasured on one {where(run)}, with FlashQLA {run.environment.get(QLA, '')}.\n"


RECURRENCES = (
    ("[RG-LRU](ops/rg_lru.md)", "rg_lru", PEER),
    ("[HGRN](ops/hgrn.md)", "hgrn", PEER),
    ("[RWKV4](ops/rwkv4.md)", "rwkv4", PEER),
    ("[Linear attention](ops/linear_attn.md)", "linear_attn", PEER),
    ("[Retention](ops/retention.md)", "retention", PEER),
    ("[Simple gated linear attention](ops/simple_gla.md)", "simple_gla", PEER),
    ("[SSD of Mamba-2](ops/ssd.md)", "mamba2", MAMBA),
    ("[Delta rule](ops/delta_rule.md)", "delta_rule", PEER),
    ("[Gated delta rule](ops/gated_delta_rule.md)", "gated_delta_rule", PEER),
    ("[Comba](ops/comba.md)", "comba", PEER),
    ("[Gated linear attention](ops/gla.md)", "gla", PEER),
    ("[RWKV6](ops/rwkv6.md)", "rwkv6", PEER),
    ("[Kimi Delta Attention](ops/kda.md)", "kda", PEER),
    ("[Gated DeltaNet-2](ops/gdn2.md)", "gdn2", PEER),
    ("[Gated slot attention](ops/gsa.md)", "gsa", PEER),
    ("[RWKV7](ops/rwkv7.md)", "rwkv7", PEER),
)
"""The rows of the page on choosing: title, op, other side."""


def costs(figures: Figures) -> str:
    """The cost of a step of each recurrence, for the page on choosing."""
    rows = []
    for told, op, baseline in RECURRENCES:
        step = the(figures, op, baseline, STEP)
        memory = in_the_same_run(step, MEMORY)
        rows.append([told, number(step[0].ours), number(memory.ours if memory else None), gpu(step[1])])
        if op == "gated_delta_rule":
            step = the(figures, op, QLA, STEP)
            memory = in_the_same_run(step, MEMORY)
            theirs = "the same by [FlashQLA](ops/gated_delta_rule.md#beside-flashqla)"
            rows.append(
                [theirs, number(step[0].other), number(memory.other if memory else None), gpu(step[1])]
            )
    return markdown(["recurrence", "step, ms", "memory, MiB", "GPU"], rows, ["recurrence", "GPU"])


def all_figures(figures: Figures) -> str:
    """The plot and the tables of the page on performance."""
    words = ["op", "model", "compared with", "GPU", "commit"]

    def steps(what: str, kinds: Sequence[tuple[str, str, str]]) -> str:
        header = [what, "compared with", "step, ms", "theirs, ms", "ratio", "memory ratio", "GPU", "commit"]
        rows = []
        for baseline, quantity, memory in kinds:
            for op, (row, run) in ops(figures, baseline, quantity, each=baseline == QLA).items():
                other = in_the_same_run((row, run), memory)
                times = number(row.ours), number(row.other), number(row.ratio)
                ratio = number(other.ratio if other else None)
                rows.append([op, NAMES.get(baseline, baseline), *times, ratio, gpu(run), commit(run)])
        return markdown(header, rows, words)

    def first_calls(what: str, baseline: str, theirs: str) -> str:
        taken = ops(figures, baseline, FIRST, alone=True).items()
        rows = [[op, number(row.ours), number(row.other), gpu(run), commit(run)] for op, (row, run) in taken]
        return markdown([what, "first call, s", theirs, "GPU", "commit"], rows, words)

    def rows_on_several() -> str:
        header = [
            "model",
            "tokens",
            "one GPU, ms",
            "several, ms",
            "of linear",
            "memory ratio",
            "GPUs",
            "commit",
        ]
        rows = []
        for op, taken in long_rows(figures).items():
            for tokens, (row, run) in taken:
                ranks, memory = int(run.environment["ranks"]), in_the_same_run((row, run), context.MEMORY)
                share = number(1 / (ranks * row.ratio)) if row.ratio else ""
                ratio = number(memory.ratio if memory else None)
                times = [number(row.other) or "does not fit", number(row.ours), share, ratio]
                rows.append([op, f"{tokens:,}", *times, f"{ranks} {gpu(run)}", commit(run)])
        picture = (
            "![Step time of one row by its number of tokens, on one GPU and on several](images/context.svg)"
        )
        table = markdown(header, rows, [*words, "GPUs"])
        return f"\n### One row on several GPUs\n\n{picture}\n\n{table}" if rows else ""

    return "\n".join(
        [
            "![Time and memory of a training step of each op, relative to the other library's](images/summary.svg)\n",
            "### Training steps of ops\n",
            steps("op", [(side, STEP, MEMORY) for side in (PEER, MAMBA, XLSTM, QLA, FLOOR)]),
            "### Training steps of models\n",
            steps("model", [(SOFTMAX, MODEL_STEP, MODEL_MEMORY), (PEER, PUBLIC_STEP, MODEL_MEMORY)]),
            "### First calls of ops\n",
            first_calls("op", PEER, "theirs, s"),
            "### First calls of models\n",
            first_calls("model", SOFTMAX, f"{NAMES[SOFTMAX]}, s") + rows_on_several(),
        ]
    )


def long_rows(figures: Figures) -> dict[str, list[tuple[int, Taken]]]:
    """For each model, the steps of one row on several GPUs, by the number of tokens."""
    found: dict[str, list[tuple[int, Taken]]] = {}
    for (op, other, case, quantity), taken in figures.items():
        if (other, quantity) == (context.ONE, context.STEP):
            found.setdefault(op, []).append((int(case.rpartition("T")[2]), taken))
    return {op: sorted(taken, key=lambda each: each[0]) for op, taken in found.items()}


@contextlib.contextmanager
def drawing(path: Path, height: float) -> Iterator[Any]:
    """The axes of a picture, which is then saved without date or random names, so that it depends on figures alone."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": path.stem}):
        figure = Figure(figsize=(8, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        yield axes
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def plot_long_rows(figures: Figures, path: Path) -> None:
    """Step time of one row by its number of tokens, with a line for each model, dashed for one GPU."""
    rows = long_rows(figures)
    with drawing(path, 4) as axes:
        for colour, (op, taken) in zip(cycle(("#2a7f62", "#d1793a", "#3b6fb5")), rows.items()):
            for style, of_one in (("o-", False), ("s--", True)):
                points = [(tokens, row.other if of_one else row.ours, run) for tokens, (row, run) in taken]
                known = [(tokens, ms / 1000, run) for tokens, ms, run in points if ms is not None]
                ranks = "one GPU" if of_one else f"{known[0][2].environment['ranks']} GPUs"
                xs, ys = [tokens for tokens, *_ in known], [seconds for _, seconds, _ in known]
                axes.plot(xs, ys, style, color=colour, label=f"{op}, {ranks}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = sorted({tokens for taken in rows.values() for tokens, _ in taken})
        axes.set_xticks(lengths, [f"{tokens // 1024}k" for tokens in lengths])
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:g}")
        axes.set_xlabel("tokens of the row")
        axes.set_ylabel("training step, s")
        axes.legend(frameon=False)


def plot(figures: Figures, path: Path) -> None:
    """Bars of the step time and memory of every op, relative to the peer and to FlashQLA."""
    steps = ops(figures, PEER, STEP)
    steps |= {f"{op}\nbeside {QLA}": taken for op, taken in ops(figures, QLA, STEP).items()}
    memories = [in_the_same_run(taken, MEMORY) for taken in steps.values()]
    series = {
        "time of forward and backward": ([step.ratio for step, _ in steps.values()], "#2a7f62"),
        "peak memory": ([None if row is None else row.ratio for row in memories], "#4f8fc9"),
    }
    with drawing(path, 1.3 + 0.55 * len(steps)) as axes:
        for i, (label, (ratios, colour)) in enumerate(series.items()):
            places = [place + 0.38 * (i - 0.5) for place, ratio in enumerate(ratios) if ratio is not None]
            known = [ratio for ratio in ratios if ratio is not None]
            bars = axes.barh(places, known, height=0.36, color=colour, label=label)
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_yticks(range(len(steps)), list(steps))
        axes.set_ylim(len(steps) - 0.4, -0.6)
        axes.set_xlim(0, max(1.1, *(r * 1.15 for ratios, _ in series.values() for r in ratios if r)))
        axes.set_xlabel(f"flacompose / {NAMES[PEER]}, or / {QLA}; less is better")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)


PAGES: dict[str, dict[str, Callable[[Figures], str]]] = {
    "README.md": {"reasons": reasons, "figures": few, "faster": faster},
    "docs/choosing.md": {"costs": costs},
    "docs/performance.md": {"figures": all_figures},
    "docs/ops/gated_delta_rule.md": {"flashqla": beside_flashqla},
}
"""The functions that make the blocks of pages, by the name of the markers."""


def pages(runs: Sequence[Results], root: Path = ROOT) -> dict[Path, str]:
    """The text of each page with the figures of the runs. A page without its markers is an error."""
    figures, texts = collect(runs), {}
    for name, blocks in PAGES.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        for block, made in blocks.items():
            begin, end = (f"<!-- {block}:{edge} -->" for edge in ("begin", "end"))
            text = put_between(path, text, begin, end, made(figures))
        texts[path] = text
    return texts


def write(runs: Sequence[Results], root: Path = ROOT) -> None:
    """Write every page, and draw the plot."""
    texts = pages(runs, root)
    plot(collect(runs), root / IMAGE)
    if long_rows(collect(runs)):
        plot_long_rows(collect(runs), (root / IMAGE).with_name("context.svg"))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def main() -> None:
    write([Results.load(path) for path in saved(RESULTS)])


if __name__ == "__main__":
    main()
