"""The registered op of one token of Mamba-3.

The op is the same function as the cumulative angle, the rotary embedding, head decay and the gated skip one
after the other. It exists for its kernel, which reads and writes the state in one launch. Training on single
tokens is rare, so its derivatives are those of the function in PyTorch.
"""

from __future__ import annotations

from flacompose.ops._recurrences.forms import define_ops, matrix_state_flops
from flacompose.ops._recurrences.fused.mamba3 import eager
from flacompose.ops._recurrences.fused.mamba3.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.mamba3.inputs import Inputs as Inputs  # for `ops/_mamba3.py`

token = define_ops(SIGNATURE, eager, forms=("token",), flops=matrix_state_flops)["token"]
