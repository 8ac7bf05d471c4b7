"""The registered op of one token of mLSTM, and its backward.

The op is the composition of the running maximum, the gates, head decay and the denominator, as one kernel.
"""

from __future__ import annotations

from flacompose.ops._recurrences.forms import define_ops, matrix_state_flops
from flacompose.ops._recurrences.fused.mlstm import eager
from flacompose.ops._recurrences.fused.mlstm.inputs import SIGNATURE
from flacompose.ops._recurrences.fused.mlstm.inputs import Inputs as Inputs  # for the public functions

token = define_ops(SIGNATURE, eager, forms=("token",), flops=matrix_state_flops)["token"]
