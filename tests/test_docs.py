"""Every Python block of the README and the docs runs, one namespace per page; the site needs no network.

The figures that pages quote are those of the saved runs of the benchmark, and the home page is the README.

A page about several processes is run by two of them, as `torchrun` would run it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from helpers.ranks import programs_on_two_ranks

from benchmarks import report, summary

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def script(page: str) -> str:
    """The page's Python blocks, each on the lines it has in the page, so that a traceback points into the page."""
    lines = [""] * page.count("\n")
    for block in FENCE.finditer(page):
        start = page.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


CODE = {page.relative_to(ROOT).as_posix(): script(page.read_text(encoding="utf-8")) for page in PAGES}


def test_script_keeps_line_numbers() -> None:
    page = "text\n```python\na = 1\n```\n\n```bash\nls\n```\n```python\n\nb = a + 1\n```\n"
    assert script(page).split("\n") == ["", "", "a = 1", "", "", "", "", "", "", "", "b = a + 1", ""]


def test_every_block_is_found() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        opened = re.findall(r"^\s*(?:```|~~~)\s*(?:py|python|pycon)\b", text, re.MULTILINE)
        assert len(opened) == len(FENCE.findall(text)), f"{page.name}: a block fenced unlike the others"


def test_code_fits_beside_the_menus() -> None:
    """On a screen of 1,300 pixels a line of code has room for 88 characters."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^ *(```|~~~)(.*?)^ *\1$", text, re.MULTILINE | re.DOTALL):
            wide = [line for line in block[1].split("\n") if len(line) > 88]
            assert not wide, f"{page.relative_to(ROOT)}: {wide[0]}"


def test_quoted_figures_are_those_of_the_saved_runs() -> None:
    pages = summary.pages([report.Results.load(path) for path in report.saved(report.RESULTS)])
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, f"{page}: run python -m benchmarks.summary"


def test_every_saved_run_is_on_its_page() -> None:
    page = (ROOT / "docs" / "saved-runs.md").read_text(encoding="utf-8")
    for path in report.saved(report.RESULTS):
        section = path.with_suffix(".md")
        assert section.read_text() == report.section(report.Results.load(path)), (
            "run python -m benchmarks.report"
        )
        assert page.count(f'--8<-- "{section.relative_to(ROOT).as_posix()}"\n') == 1, section.name


def test_the_first_table_is_small() -> None:
    """With four columns and six rows it fits a telephone."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    header, _, *rows = re.findall(r"^\|.*\|$", readme[: readme.index("<!-- figures:end -->")], re.MULTILINE)
    assert len(rows) <= 6 and header.count("|") <= 5


# AOTInductor inside torch, on a class of its own
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name, code in CODE.items() if code.strip()])
def test_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "import transformers" in CODE[name]:
        pytest.importorskip("transformers", minversion="5.17")
    if "from torchao" in CODE[name]:
        pytest.importorskip("torchao")
        pytest.importorskip("peft")
    if "aoti_load_package" in CODE[name]:
        request.getfixturevalue("aoti_packages_load")
    monkeypatch.chdir(tmp_path)
    if "dist.get_rank()" in CODE[name]:
        programs_on_two_ranks(run_page, name)
    else:
        run_page(name)


def run_page(name: str) -> None:
    page = types.ModuleType("page_" + re.sub(r"\W", "_", name))
    with pytest.MonkeyPatch.context() as patch:
        # Registered, for what looks a class up by its module: pickle, dataclasses, torch.export.
        patch.setitem(sys.modules, page.__name__, page)
        exec(compile(CODE[name], str(ROOT / name), "exec", dont_inherit=True), page.__dict__)


def test_site(tmp_path: Path) -> None:
    """The documentation builds without a warning; it takes a while, so this is one test of all that it must be."""
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("math_core")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    check_formulas(tmp_path)
    check_home(tmp_path)
    check_opens_as_files(tmp_path)
    check_nothing_from_elsewhere(tmp_path)
    check_wide_tables(tmp_path)


def check_formulas(site: Path) -> None:
    """No page shows TeX, in its text or in the docstrings it quotes; code blocks apart."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"\$\$|\\[()\[\]]|\\[a-zA-Z]+\{|arithmatex", text), page.relative_to(site)
        assert "<math" in text or page.parent.name != "ops", f"{page.relative_to(site)} has no formula"


def check_home(site: Path) -> None:
    """It is the README, with the links as they are from the site, where `--strict` finds those that lead nowhere."""
    home = (site / "index.html").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", readme, re.MULTILINE)
    figures = re.findall(r"\*\*(.+?)\*\*", readme)
    assert headings and figures
    for text in (*headings, *figures):
        assert f">{text}<" in home
    for page in ("index.html", "changelog.html", "contributing.html"):
        assert 'href="docs/' not in (site / page).read_text(encoding="utf-8")


def check_opens_as_files(site: Path) -> None:
    """Each link within the site names a file, and the search has its index and its worker without a server."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        if page.name == "404.html":  # which a server shows, at any address
            continue
        for link in re.findall(r"""\bhref=["']?([^"'\s>#?]+)""", text):
            assert ":" in link or (page.parent / link).is_file(), f"{page.relative_to(site)}: {link}"
        scripts = re.findall(r'<script src="([^"]+)"', text)
        assert [Path(script).name.split(".")[0] for script in scripts] == ["iframe-worker", "bundle"]
    assert (site / "search" / "search_index.js").is_file()


def check_wide_tables(site: Path) -> None:
    """On a telephone, where the heading is hidden, each cell of a table of three columns or more names its column."""
    tables = re.findall(r"<table[^>]*>.*?</table>", (site / "choosing.html").read_text("utf-8"), re.DOTALL)
    wide = [table for table in tables if len(re.findall(r"<th\b", table)) >= 3]
    assert wide
    for table in wide:
        columns = re.findall(r"<th\b[^>]*>([^<]*)</th>", table)
        labels = re.findall(r'<td data-column="([^"]*)"', table)
        assert labels == columns * table.count("<tr>", table.index("<tbody>"))


def check_nothing_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and images are files of the site, which is complete without a network."""
    loaded = r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    linked = (
        r"""<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*href=["']?(?:https?:)?//"""
    )
    styled = r"""(?:url\(|@import\s+)["']?(?:https?:)?//"""
    for file in site.rglob("*"):
        if file.suffix in (".html", ".css"):
            found = re.search(f"{loaded}|{linked}|{styled}", file.read_text(encoding="utf-8"))
            assert not found, f"{file.relative_to(site)}: {found and found[0]}"
