"""MkDocs hook: on a telephone, each row of a wide table becomes a block in which every cell names its column."""

from __future__ import annotations

import html
import re
from itertools import cycle

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

TABLE = re.compile(r"<table>(.*?</thead>)(.*?</table>)", re.DOTALL)
HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
COLUMNS = 3
"""Tables with fewer columns fit."""


def on_page_content(
    content: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    def label(table: re.Match[str]) -> str:
        head, body = table.groups()
        names = [
            html.unescape(re.sub("<[^>]+>", "", heading)).strip()
            for heading in HEADING.findall(head)
        ]
        if len(names) < COLUMNS:
            return table[0]
        name = cycle(html.escape(name) for name in names)
        labelled = re.sub(r"<td\b", lambda _: f'<td data-column="{next(name)}"', body)
        return f"<table data-stacked>{head}{labelled}"

    return TABLE.sub(label, content)
