"""The registered ops of vector decay: a chunked form and a recurrent one, of the same function, with one backward.

    S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_t^T        o_t = scale * S_t^T q_t

With `u`, the bonus of the current token, the state is read before the decay and the write, and the token's own pair
joins with that weight: ``o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T q_t``. `softmax` reads with the softmax of `q`,
which may be wider than the other inputs. `wide` gives the output in the dtype of states, whatever that of the inputs.
"""

from flacompose.ops.families._op import define_family
from flacompose.ops.families.vector_decay import eager

chunk, recurrent = define_family(
    "vector_decay",
    eager,
    ("gk", "gv"),
    shared=("u",),
    options="bool softmax",
    wide=True,
    exempt="softmax",
)
