"""Mamba-2's scan, composed of head decay and the gated skip.

Delta_t = clamp(softplus(dt_t + dt_bias))        S_t = exp(Delta_t A) S_{t-1} + Delta_t B_t x_t^T
o_t = (S_t^T C_t + D x_t) * silu(z_t)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.gated_skip import eager as gated_skip
from flacompose.ops._recurrences.fused.gated_skip.inputs import SIGNATURE as SKIP
from flacompose.ops._recurrences.fused.gated_skip.inputs import Inputs as Skip
from flacompose.ops._recurrences.fused.ssd.inputs import Inputs
from flacompose.ops._recurrences.matrix import eager as matrix
from flacompose.ops._recurrences.matrix.inputs import SIGNATURE as SCAN
from flacompose.ops._recurrences.matrix.inputs import Inputs as Scan
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.gate_formulas import clamped, decays_to_zero, log_decay_of_step, time_step
from flacompose.ops._tensors.packed import without_tail


def composed(
    inputs: Inputs, scan: Callable[..., tuple[Tensor, Tensor]], skip: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``, by the functions `scan` and `skip`."""
    x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens, softplus, *limit = inputs
    # A token in no sequence may be NaN. Set to 0, it adds nothing to the gradients of A and dt_bias.
    (dt,) = without_tail(cu_seqlens, dt)
    dt = time_step(dt, dt_bias, softplus, x, (limit[0], limit[1]))
    g = clamped(log_decay_of_step(dt, upcast(A, x)))
    # A literal, since with `dynamic=True` Dynamo would trace the default twice.
    given = Scan(C, B, x, g, beta=dt, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=1.0)
    y, final_state = scan(*given)
    return skip(y, x, D, None, z, cu_seqlens), final_state


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    return composed(inputs, lambda *x: matrix.forward(Scan(*x)), lambda *x: gated_skip.forward(Skip(*x))[0])


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients, through the gated skip, head decay, gates and time steps."""
    x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens, softplus, *limit = call.inputs
    (dt,) = without_tail(cu_seqlens, dt)
    raw, free = (time_step(dt, dt_bias, passes, x) for passes in (False, softplus))
    delta, rates = free.clamp(*limit), upcast(A, x)
    g = clamped(log_decay_of_step(delta, rates))
    scan = Scan(C, B, x, g, beta=delta, initial_state=initial_state, cu_seqlens=cu_seqlens)

    dy, of_skip = call.do, {}
    if D is not None or z is not None:
        wanted = {"x", "y"} | (call.wanted & {"D", "z"})
        skip = Skip(matrix.forward(scan)[0], x, D, None, z, cu_seqlens)
        of_skip = gated_skip.backward(BackwardCall(SKIP, skip, SKIP.outputs(dy), frozenset(wanted)))
        dy = of_skip.pop("y")
    wanted = {"q", "k", "v", "g", "beta"} | (call.wanted & {"initial_state"})
    arriving = SCAN.outputs(dy, call.arriving.final_state)
    found = matrix.backward(BackwardCall(SCAN, scan, arriving, frozenset(wanted)))
    dx = found["v"] + of_skip.pop("x") if of_skip else found["v"]

    d_delta = found["beta"] + found["g"] * rates.masked_fill(decays_to_zero(rates), 0)
    d_free = d_delta.masked_fill((free < limit[0]) | (free > limit[1]), 0)
    (ddt,) = without_tail(cu_seqlens, d_free * raw.sigmoid() if softplus else d_free)
    return call.select(
        x=dx,
        dt=ddt,
        A=lambda: (found["g"] * delta).sum((0, 1)),
        B=found["k"],
        C=found["q"],
        dt_bias=lambda: ddt.sum((0, 1)),
        initial_state=found.get("initial_state"),
        **of_skip,
    )
