"""MkDocs hook: three pages are files in the root of the repository, with links adapted to the folder docs."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

SOURCES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
PAGES = {source: page for page, source in SOURCES.items()}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    source = SOURCES.get(page.file.src_uri)
    if source is None:
        return markdown
    text = Path(config.config_file_path).with_name(source).read_text(encoding="utf-8")
    return LINK.sub(
        lambda found: PAGES.get(found[1], found[1].removeprefix("docs/")), text
    )
