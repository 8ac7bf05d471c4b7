"""The registered op of one token of mLSTM, and its backward.

The op is the same function as the running maximum, head decay and the normaliser one after the other. What it has for
itself is the kernel: it reads and writes the state in one launch, with the gates made of what comes in.
"""

from __future__ import annotations

from flacompose.ops._recurrences.forms import define_ops, matrix_state_flops
from flacompose.ops._recurrences.fused.mlstm import eager
from flacompose.ops._recurrences.fused.mlstm.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.mlstm.inputs import Inputs as Inputs  # for the public functions

token = define_ops(SIGNATURE, eager, forms=("token",), flops=matrix_state_flops)["token"]
