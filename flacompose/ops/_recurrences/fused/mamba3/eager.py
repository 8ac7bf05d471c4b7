"""One token of Mamba-3 in PyTorch, for every device without a Triton kernel.

    c = sigmoid(Trap) DT        b = exp(ADT) (DT - c)        k = turn(K + K_bias)        q = turn(Q + Q_bias)
    Z = exp(ADT) S_0 + b k_0 v_0^T        o = (Z^T q + (c k . q + D) V) * silu(gate)        S = Z + c k V^T

The written and returned keys ``k`` are rounded to the dtype of `K`, as for many tokens.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._recurrences.elementwise.cumulative_angle import eager as cumulative_angle
from flacompose.ops._recurrences.elementwise.cumulative_angle.inputs import Inputs as AngleInputs
from flacompose.ops._recurrences.fused.gated_skip import eager as gated_skip
from flacompose.ops._recurrences.fused.gated_skip.inputs import Inputs as SkipInputs
from flacompose.ops._recurrences.fused.mamba3.inputs import Inputs
from flacompose.ops._recurrences.fused.rotary.eager import biased, turned
from flacompose.ops._recurrences.matrix import token
from flacompose.ops._tensors.dtype import state_dtype


def forward(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(o [B, 1, HV, P], final_angle [B, HV, A], final_state, final_k [B, HV, S], final_v [B, HV, P])``."""
    Q, K, V, *others, D, gate, values_first = inputs
    g, DT, Trap, Q_bias, K_bias, Angles, angle_0, S_0, k_0, v_0 = others
    dtype = state_dtype(V.dtype)
    g, DT, Trap, Angles, k_0, v_0 = (x.to(dtype) for x in (g, DT, Trap, Angles, k_0, v_0))
    c = Trap.sigmoid() * DT
    # 1. The rotation of queries and keys.
    angle, final_angle = cumulative_angle.forward(AngleInputs(Angles, DT, angle_0))
    q, k = (
        turned(biased(x.unsqueeze(2), bias.unsqueeze(1)), angle, halves=False).squeeze(2)
        for x, bias in ((Q, Q_bias), (K, K_bias))
    )  # [B, 1, HV, S]
    # 2. The state decays, the token before is written, and the read of the state is added to the token's own
    # part.
    y, Z = token.token(
        q, k_0.unsqueeze(1), v_0.unsqueeze(1), S_0.mT if values_first else S_0, None, 1.0,
        g=g, beta=g.exp() * (DT - c),
    )  # fmt: skip
    own = None if D is None else D.unsqueeze(-1)
    (o,) = gated_skip.forward(SkipInputs(y, V, own, c * (q * k).sum(-1), gate))
    # 3. The write of the token.
    final_k, v = k.squeeze(1).to(K.dtype), (c.unsqueeze(-1) * V).squeeze(1)
    S = Z + final_k.to(dtype).unsqueeze(-1) * v.unsqueeze(-2)
    return o, final_angle, S.mT if values_first else S, final_k, V.squeeze(1).clone()
