"""The registered ops of diagonal plus low rank: a chunked form and a recurrent one, with one backward.

    S' = diag(exp gk_t) S_{t-1}      S_t = S' + b_t (a_t^T S*) + k_t v_t^T      o_t = scale * S_t^T q_t

``S*`` is what `a` reads: ``S_{t-1}``, or S' unless `read_before`.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flacompose.ops.families._op import define_forms, start_gradient
from flacompose.ops.families._stretches import Matrix
from flacompose.ops.families.low_rank import eager
from flacompose.ops.families.low_rank.inputs import SIGNATURE, Ends, Inputs


def _flops(q, k, v, *_, **__) -> int:
    """Two reads and two writes of the state a token."""
    B, T, H, V = v
    return 8 * B * T * H * q[-1] * V


_chunk, _recurrent, _ends, _steps = define_forms("low_rank", SIGNATURE, eager, ends=Ends, flops=_flops)


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
d_start = partial(start_gradient, "low_rank", SIGNATURE)
