"""Linear-attention recurrences as PyTorch ops that compile, export and compose."""

from typing import TYPE_CHECKING

from flacompose import layers, models, ops
from flacompose._peer import absent_from
from flacompose.ops._operators.checked import checked

__version__ = "0.6.0"
__all__ = ["checked", "layers", "models", "ops"]

if not TYPE_CHECKING:  # a type checker would accept every name through it
    __getattr__ = absent_from(__name__)
