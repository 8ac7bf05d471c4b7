"""The registered ops of vector decay: a chunked form and a recurrent one, of the same function, with one backward.

    S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T        o_t = scale * S_t^T q_t

`read_before` reads before the decay and the write: ``o_t = scale * S_{t-1}^T q_t``.
"""

from flacompose.ops.families._op import define_family
from flacompose.ops.families.vector_decay import eager

chunk, recurrent = define_family("vector_decay", eager, ("gk", "gv"), "bool read_before")
