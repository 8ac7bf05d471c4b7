"""Launches of the delta rule on CUDA, in float32, bfloat16 and float16, and the table of their kernels.

Forward, for each chunk the WY factors, then state passing ("read by `k`" is: without `a` and `read_before`):

    gates          condition                                  kernel                          file
    heads or none  Hopper, K and V 64 or 128, read by `k`     hopper_inverse_kernel           hopper/head_factors.py
                                                              hopper_state_passing_kernel     hopper/state_passing.py
    heads or none  Hopper, K 64 or 128                        hopper_head_factor_kernel       hopper/head_factors.py
    heads or none  otherwise                                  delta_factor_kernel             kernels.py
    channels       Hopper, K 64 or 128, gates factorisable    hopper_channel_factor_kernel    hopper/channel_factors.py
                   about the middles of blocks
    channels       otherwise                                  delta_channel_factor_kernel     channel_kernels.py
    any            long rows: state before each segment       delta_join_kernel               kernels.py
    any            state passing, but in the first line       delta_state_passing_kernel      kernels.py

Backward, `delta_state_passing_kernel` or `delta_both_directions_kernel` for the states,
`delta_backward_state_passing_kernel` for their gradients, and for each chunk:

    heads or none  Hopper, read by `k`, K = V, many programs  hopper_backward_kernel          hopper/backward.py
    heads or none  Hopper, at most 4 heads share keys         hopper_head_gradient_kernel     hopper/head_gradients.py
    heads or none  K > 128 (float32: > 32)                    delta_stored_product_kernel,    stored_products.py
                                                              delta_stored_product_gradient_kernel
    heads or none  otherwise                                  delta_head_gradient_kernel      gradients.py
    channels       see the table of `channel_kernels`

The gradient of gates of heads follows from the gradients of their sums: `head_gate_gradient_kernel`.
`Launches`, `GradientLaunches` and `Sweeps` choose the kernels.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._launch.operands import operand
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix.delta_rule.gradient_launches import GradientLaunches, Swept
from flacompose.ops._recurrences.matrix.delta_rule.launches import Launches
from flacompose.ops._recurrences.matrix.inputs import Inputs


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    return Launches(inputs, forward=True).chunk(inputs.v.dtype)


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, HV, K, V], matrix [N, HV, K, K])``."""
    return Launches(inputs._replace(initial_state=None)).map()


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, inputs = call.wants, call.inputs
    of_channels = inputs.gk is not None
    by_writes = wants("k", "a", "beta", "g", "gk")
    by_reads = by_writes or wants("q")
    by_states = by_writes or (of_channels and by_reads)
    rule = GradientLaunches(inputs, with_r=by_reads)
    do, d_final_state = operand(call.do), operand(call.arriving.final_state)
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else rule.state(start.dtype)
    is_joint = by_writes and rule.has_joint_kernel(do)
    reverses = by_states or wants("v", "initial_state")
    both_ways = by_reads and reverses and rule.sweeps_at_once and not is_joint
    r = S = dS = dv = None
    made: dict[str, Tensor] = {}
    if by_reads:
        r = rule.scratch(rule.HV, rule.V)
        S = rule.per_chunk_state()
    if by_reads and not both_ways:
        rule.sweep(r=r, states=S)
        rule.factors["Y"] = None  # frees its memory for the kernels that follow
    if is_joint:
        assert r is not None and S is not None
        outputs, d_sums, d_total = rule.reverse_gradients(do, d_final_state, r, S, d_initial_state)
        made["v"] = rule.batched(r)
        S = None  # gives its memory back to the sums that follow
        made |= rule.added_up(rule.of_key_heads(outputs, wants))
        made |= rule.gate_gradient(d_sums, d_total, wants("g"))
        return call.made(**made, initial_state=d_initial_state)
    if reverses:
        dS = rule.per_chunk_state() if by_states else None
        dv = rule.place_of_dv(both_ways)
        made["v"] = rule.batched(dv)
        backwards = {"dv": dv, "d_states": dS, "d_initial": d_initial_state}
        if both_ways:
            rule.sweep_both_ways(do, d_final_state, r=r, states=S, **backwards)
        else:
            rule.reverse(do, d_final_state, **backwards)
    rule.free_sweep_memory()
    if by_reads:
        swept = Swept(do, r, dv, S, dS)
        if of_channels:
            made |= rule.channel_gradients(swept, gates=wants("g", "gk"))
            if wants("g"):
                made["g"] = made["gk"].sum(-1)
        else:
            made |= rule.gradients(swept, gates=wants("g"))
    return call.made(**made, initial_state=d_initial_state)
