"""Linear-attention recurrences as PyTorch ops that compile, export and compose."""

from flacompose import layers, models, ops
from flacompose.ops._checked import checked

__version__ = "0.1.0"
__all__ = ["checked", "layers", "models", "ops"]
