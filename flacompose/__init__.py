"""Linear-attention recurrences as PyTorch ops that compile, export and compose."""

from flacompose import layers, models, ops

__version__ = "0.6.0"
__all__ = ["layers", "models", "ops"]
