"""The recurrences, each one function of its inputs: nothing is changed in place, states come back as new tensors."""

from flacompose.ops.gla import chunk_gla, fused_recurrent_gla

__all__ = ["chunk_gla", "fused_recurrent_gla"]
