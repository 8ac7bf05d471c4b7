"""Every Python block of the README and the docs runs, top to bottom, one namespace a page."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

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


# AOTInductor inside torch, on a class of its own
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name, code in CODE.items() if code.strip()])
def test_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "import transformers" in CODE[name]:
        pytest.importorskip("transformers", minversion="5.17")
    if "aoti_load_package" in CODE[name]:
        request.getfixturevalue("aoti_packages_load")
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("page_" + re.sub(r"\W", "_", name))
    # Registered, for what looks a class up by its module: pickle, dataclasses, torch.export.
    monkeypatch.setitem(sys.modules, page.__name__, page)
    exec(compile(CODE[name], str(ROOT / name), "exec", dont_inherit=True), page.__dict__)
