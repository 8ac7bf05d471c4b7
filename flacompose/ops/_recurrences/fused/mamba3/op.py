"""The registered op of one token of Mamba-3.

The op is the composition of the cumulative angle, the rotary embedding, head decay and the gated skip, as one
kernel. Training on single tokens is rare, so its derivatives are computed by PyTorch.
"""

from __future__ import annotations

from flacompose.ops._recurrences.forms import define_ops, matrix_state_flops
from flacompose.ops._recurrences.fused.mamba3 import eager
from flacompose.ops._recurrences.fused.mamba3.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.mamba3.inputs import Inputs as Inputs  # for `ops/_composed/mamba3.py`

token = define_ops(SIGNATURE, eager, forms=("token",), flops=matrix_state_flops)["token"]
