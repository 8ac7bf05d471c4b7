"""A package of flash-linear-attention that does not exist here. The error names the replacements."""

from flacompose._peer import NAMES

raise ImportError(f"flacompose has no modules: {NAMES['modules']}", name=__name__)
