"""The registered ops of the delta rule: a chunked form and a recurrent one, of the same function, with one backward.

    S' = diag(exp(g_t + gk_t)) S_{t-1}      S_t = S' + beta_t k_t (v_t - S'^T a_t)^T      o_t = scale * S_t^T q_t

`g` is a decay per token and head, `gk` one per channel of the keys besides. `a` is `k` where it is not given. `v`,
`beta`, the gates and states may have a multiple of the heads of `q` and `k`.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flacompose.ops.families._op import define_forms, start_gradient
from flacompose.ops.families._stretches import Matrix
from flacompose.ops.families.delta_rule import eager
from flacompose.ops.families.delta_rule.inputs import SIGNATURE, Ends, Inputs


def _flops(q, k, v, *_, **__) -> int:
    """Two reads and one write of the state a token."""
    B, T, HV, V = v
    return 6 * B * T * HV * q[-1] * V


_chunk, _recurrent, _ends, _steps = define_forms("delta_rule", SIGNATURE, eager, ends=Ends, flops=_flops)


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, in chunks of tokens: for training and for prompts."""
    return _chunk(*inputs)


def recurrent(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, final_state)``, token by token: for decoding."""
    return _recurrent(*inputs)


def steps(inputs: Inputs, count: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """`recurrent` with `count` states, ``[N, count, ...]``, those after the last tokens that are `stride` apart."""
    return _steps(*inputs, count, stride)


def stretch(inputs: Inputs) -> tuple[Matrix, Tensor]:
    """What the tokens of each sequence do to a state: a matrix times its keys, and the state they reach from zero."""
    # Queries do nothing to the state.
    end, matrix = _ends(*inputs._replace(q=inputs.k.detach(), initial_state=None))
    return Matrix(matrix), end


# Takes `Inputs` and the gradients of the outputs, and gives that of the state before each sequence: see `_stretches`.
d_start = partial(start_gradient, "delta_rule", SIGNATURE)
