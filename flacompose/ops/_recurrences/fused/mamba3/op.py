"""The registered op of one token of Mamba-3.

The op is the same function as the turns, the rotation, head decay and the gated skip one after the other. What it has
for itself is the kernel: it reads and writes the state in one launch. A token is seldom trained on, so its derivatives
are those of the function in PyTorch.
"""

from __future__ import annotations

from flacompose.ops._recurrences.forms import define_ops, matrix_state_flops
from flacompose.ops._recurrences.fused.mamba3 import eager
from flacompose.ops._recurrences.fused.mamba3.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.mamba3.inputs import Inputs as Inputs  # for `ops/_mamba3.py`

token = define_ops(SIGNATURE, eager, forms=("token",), flops=matrix_state_flops)["token"]
