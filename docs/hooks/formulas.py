"""MkDocs hook: renders the formulas of every page to MathML, so that no browser needs a script or a network."""

from __future__ import annotations

import html
import re

from math_core import LatexError, LatexToMathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# The output of the Markdown extension arithmatex for `\( ... \)`, `\[ ... \]` and `$$ ... $$`.
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL
)
# Formulas on consecutive lines of a docstring are one such block.
NEXT = re.compile(r"\$\$\s*\$\$")
CONVERTER = LatexToMathML(fancy_error=False)


def on_page_content(
    content: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    def render(found: re.Match[str]) -> str:
        tag, bracket, text = found.groups()
        try:
            formulas = [
                CONVERTER.convert_with_local_state(formula, displaystyle=bracket == "[")
                for formula in NEXT.split(html.unescape(text))
            ]
        except LatexError as error:
            raise PluginError(
                f"{page.file.src_uri}: {text!r} is no formula: {error}"
            ) from None
        return f'<{tag} class="formula">{"".join(formulas)}</{tag}>'

    return FORMULA.sub(render, content)
