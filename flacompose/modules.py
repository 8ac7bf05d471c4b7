"""There is no such package here, and the error says where to find what flash-linear-attention has in its own."""

from flacompose._peer import NAMES

raise ImportError(f"flacompose has no modules: {NAMES['modules']}", name=__name__)
