"""The delta rule on CUDA, in float32, bfloat16 and float16. `plan` has the table of its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._launch.operands import operand
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix.delta_rule import launch_factors, launch_gradients
from flacompose.ops._recurrences.matrix.delta_rule import launch_state_passing as state_passing
from flacompose.ops._recurrences.matrix.delta_rule.arguments import ValueVectors
from flacompose.ops._recurrences.matrix.delta_rule.launch_state_passing import scratch
from flacompose.ops._recurrences.matrix.delta_rule.operands import operands
from flacompose.ops._recurrences.matrix.delta_rule.plan import chunk_size, plan_of
from flacompose.ops._recurrences.matrix.inputs import Inputs


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    x = operands(inputs, chunk_size(inputs.q, inputs.gk is not None))
    gates = launch_factors.compute_gates(x, inputs.g)
    passing = launch_factors.compute_factors(x, plan_of(x, "chunk"), gates)
    o = x.tokens.per_token(x.tokens.H, x.tokens.V, dtype=inputs.v.dtype)
    final_state = x.tokens.state(torch.float32)
    state_passing.forwards(passing, o=o, final=final_state)
    return x.tokens.batched(o), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, HV, K, V], matrix [N, HV, K, K])``."""
    inputs = inputs._replace(initial_state=None)
    x = operands(inputs, chunk_size(inputs.q, inputs.gk is not None))
    gates = launch_factors.compute_gates(x, inputs.g)
    return state_passing.transition(launch_factors.compute_factors(x, plan_of(x, "ends"), gates))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, inputs = call.wants, call.inputs
    by_writes = wants("k", "a", "beta", "g", "gk")
    by_reads = by_writes or wants("q")
    by_states = by_writes or (inputs.gk is not None and by_reads)
    x = operands(inputs, chunk_size(inputs.q, inputs.gk is not None))
    tokens = x.tokens
    do, d_final_state = operand(call.do), operand(call.arriving.final_state)
    plan = plan_of(x, "backward", do, with_keys=by_writes)
    gates = launch_factors.compute_gates(x, inputs.g)
    passing = launch_factors.compute_factors(x, plan, gates, with_r=by_reads)
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else tokens.state(start.dtype)
    in_one_kernel = plan.gradients.passes_states
    reverses = by_states or wants("v", "initial_state")
    at_once = by_reads and reverses and plan.passing.has_few_programs and not in_one_kernel
    r = S = dS = dv = None
    made: dict[str, Tensor] = {}
    if by_reads:
        r, S = scratch(tokens, tokens.V), tokens.per_chunk_state()
    if by_reads and not at_once:
        state_passing.forwards(passing, r=r, states=S)
        passing.factors = passing.factors._replace(Y=None)  # frees its memory for the kernels that follow
    if in_one_kernel:
        assert r is not None and S is not None
        of_heads = launch_gradients.with_state_passing(
            x, plan, passing, do, r, S, d_final_state, d_initial_state
        )
        del passing
        S = None  # gives its memory back to the sums that follow
        made = launch_gradients.of_heads(x, *of_heads, wants)
        return call.select(**made, v=tokens.batched(r), initial_state=d_initial_state)
    if reverses:
        dS = tokens.per_chunk_state() if by_states else None
        dv = state_passing.place_of_dv(passing, alone=not at_once)
        made["v"] = tokens.batched(dv)
        backwards = passing, do, d_final_state, dv, None, dS, d_initial_state
        if at_once:
            assert r is not None and S is not None
            state_passing.both_directions(*backwards, r=r, states=S)
        else:
            state_passing.backwards(*backwards)
        del backwards
    del passing  # which only state passing needs
    if r is not None and S is not None:
        values = ValueVectors(do, r, dv)
        made |= launch_gradients.compute_gradients(x, plan, gates, values, S, dS, wants("g", "gk"))
    if inputs.gk is not None and wants("g"):
        made["g"] = made["gk"].sum(-1)
    return call.select(**made, initial_state=d_initial_state)
