"""The registered op of one token of mLSTM, and its backward.

The op is the same function as the running maximum, head decay and the denominator one after the other. It
exists for its kernel, which reads and writes the state in one launch, and computes the gates itself.
"""

from __future__ import annotations

from flacompose.ops._recurrences.forms import define_ops, matrix_state_flops
from flacompose.ops._recurrences.fused.mlstm import eager
from flacompose.ops._recurrences.fused.mlstm.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.mlstm.inputs import Inputs as Inputs  # for the public functions

token = define_ops(SIGNATURE, eager, forms=("token",), flops=matrix_state_flops)["token"]
