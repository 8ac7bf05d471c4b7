"""The registered ops of scalar decay: a chunked form and a recurrent one, of the same function, with one backward.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

`v`, `g` and states may have a multiple of the heads of `q` and `k`. `gate_kind` says what `g` and its gradient are, as
`eager` explains; with `FIXED` every token must have the gates of the first, which may be all that is read.
"""

from flacompose.ops.families._op import define_family
from flacompose.ops.families.scalar_decay import eager
from flacompose.ops.families.scalar_decay.eager import FIXED, PER_TOKEN, SUMMED

__all__ = ["FIXED", "PER_TOKEN", "SUMMED", "chunk", "recurrent"]

chunk, recurrent = define_family("scalar_decay", eager, ("g",), options="int gate_kind")
