"""Results as JSON and as a Markdown table.

``python -m benchmarks.report`` renders saved results again, ``python -m benchmarks.summary`` the figures on pages.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("results")

NAMES = {
    "fla": "flash-linear-attention",
    "floor": "reading and writing alone",
    "python": "PyTorch alone",
    "softmax": "softmax attention",
}
"""Names of implementations in reports, where they differ from the names in the results."""


@dataclass(frozen=True)
class Row:
    """One figure of both sides. ``None`` stands for a missing measurement, which ``note`` explains."""

    op: str
    case: str
    quantity: str
    unit: str
    ours: float | None = None
    other: float | None = None
    max_ratio: float | None = None
    max_value: float | None = None
    note: str = ""
    beside: str = ""
    """The implementation compared with, if it is not `other` of the run."""

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or not self.other else self.ours / self.other

    @property
    def met(self) -> bool | None:
        """Whether all targets are met, or ``None`` without targets. A missing figure meets no target."""
        if self.max_ratio is None and self.max_value is None:
            return None
        by_ratio = self.max_ratio is None or (self.ratio is not None and self.ratio <= self.max_ratio)
        by_value = self.max_value is None or (self.ours is not None and self.ours <= self.max_value)
        return by_ratio and by_value


@dataclass
class Results:
    """The environment and rows of a run. ``other`` names the implementation compared with."""

    other: str
    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Replace the file at once, so that an interrupted run leaves a complete file."""
        rows = [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in self.rows]
        content = {"other": self.other, "environment": self.environment, "notes": self.notes, "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        content = json.loads(path.read_text())
        names = Row.__dataclass_fields__  # results of earlier versions lack newer fields
        rows = [Row(**{name: row[name] for name in names if name in row}) for row in content["rows"]]
        return cls(content["other"], content["environment"], rows, content["notes"])


def number(x: float | None) -> str:
    """Three significant digits, in scientific notation if the number would be long."""
    if x is None:
        return ""
    if x != x:
        return "nan"
    if x == 0 or 1e-2 <= abs(x) < 1e5:
        return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"
    return f"{x:.2e}"


def target(row: Row) -> str:
    parts = []
    if row.max_ratio is not None:
        parts.append(f"ratio ≤ {row.max_ratio:g}")
    if row.max_value is not None:
        parts.append(f"≤ {row.max_value:g} {row.unit}".rstrip())
    return ", ".join(parts)


def cells(row: Row) -> list[str]:
    verdict = {None: "", True: "met", False: "short"}[row.met]
    quantity = f"{row.quantity}, {row.unit}" if row.unit else row.quantity
    if row.note:
        quantity += f" ({row.note})"
    return [row.case, quantity, number(row.ours), number(row.other), number(row.ratio), target(row), verdict]


def title(results: Results) -> str:
    ops = ", ".join(dict.fromkeys(row.op for row in results.rows))
    return f"{ops} compared with {NAMES.get(results.other, results.other)}, {results.environment['device']}"


def table(results: Results) -> str:
    """The whole run in Markdown: environment, notes, one table per op."""
    lines = [f"- {name}: {value}" for name, value in results.environment.items() if name != "command"]
    if "command" in results.environment:
        lines.append(f"- command: `{results.environment['command']}`")
    lines += [f"- note: {note}" for note in results.notes]
    for op, beside in dict.fromkeys((row.op, row.beside) for row in results.rows):
        header = ["shape", op, "flacompose", beside or results.other, "ratio", "target", ""]
        lines += ["", "| " + " | ".join(header) + " |", "|---|---|--:|--:|--:|---|---|"]
        lines += [
            "| " + " | ".join(cells(row)).replace("\n", " ") + " |"
            for row in results.rows
            if (row.op, row.beside) == (op, beside)
        ]
    return "\n".join(lines) + "\n"


def section(results: Results) -> str:
    """The section of a run in docs/saved-runs.md: a heading, and a table that opens at a click."""
    run = ", ".join(results.environment[name] for name in ("date", "commit") if name in results.environment)
    folded = (
        f'<details markdown="1">\n<summary>{run or "Figures"}</summary>\n\n{table(results)}\n</details>\n'
    )
    return f"## {title(results)}\n\n{folded}"


def put_between(page: Path, text: str, begin: str, end: str, block: str) -> str:
    """The `text` of `page`, with `block` between the two markers."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page} must have the markers {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{block}\n{end}{rest.split(end)[1]}"


def saved(folder: Path) -> list[Path]:
    """The results in a folder."""
    return [path for path in sorted(folder.glob("*.json")) if path.name != "peer-configs.json"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Render saved results.")
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        help="JSON files that benchmarks.run wrote (default: all in the repository)",
    )
    arguments = parser.parse_args()
    for path in arguments.results or saved(RESULTS):
        results = Results.load(path)
        path.with_suffix(".md").write_text(section(results))
        print(table(results))


if __name__ == "__main__":
    main()
