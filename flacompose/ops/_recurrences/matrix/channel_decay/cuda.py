"""Launches of channel decay on CUDA, in float32, bfloat16 and float16, and the table of their kernels.

All are in kernels.py:

    result                                 condition          kernel
    states before chunks, their gradients  always             channel_decay_state_passing_kernel
    o                                      no gv              channel_decay_plain_axis_kernel
                                           gv                 channel_decay_gated_axis_kernel
    dv                                     no gv              channel_decay_plain_axis_kernel
    dv, dgv                                gv                 channel_decay_gated_axis_kernel
    dq, dk                                 neither gk nor u   channel_decay_plain_axis_kernel
    dq, dk, dgk, du                        gk or u            channel_decay_gated_axis_kernel
    P, the products of pairs of tokens     see `AxisPlan`     channel_decay_score_kernel

The kernels of plain axes with gates, and of gated axes, are launched twice: first for the chunks or tiles whose
gates are factorisable, then for the others. Gates are factorisable if the sums over each half of a
chunk, of 32 tokens, are above -45, and, where their gradient is wanted, if each gate is above -8 (float32:
-4) or `has_bounded_means` says so: see `gates_of_channels`. `plan` chooses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import launch_by_gates, operand, operand_dtype, tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix.channel_decay import plan, slots
from flacompose.ops._recurrences.matrix.channel_decay.kernels import (
    Results,
    Vectors,
    channel_decay_gated_axis_kernel,
    channel_decay_plain_axis_kernel,
    channel_decay_score_kernel,
    channel_decay_state_passing_kernel,
)
from flacompose.ops._recurrences.matrix.gates_of_channels import C
from flacompose.ops._recurrences.matrix.inputs import Inputs

CHUNK = C.value


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    inputs = _with_probabilities(inputs)
    launches = _Launches(inputs)
    tokens, dtype = launches.tokens, torch.float32 if inputs.full_precision else inputs.v.dtype
    o, final_state = tokens.per_token(tokens.H, tokens.V, dtype=dtype), tokens.state(torch.float32)
    q, k, v = map(operand, (inputs.q, inputs.k, inputs.v))
    S = launches.states(k, v, inputs.initial_state, final_state)
    if inputs.gv is None:
        launches.plain(q, k, v, S, o, for_gradient=False)
    else:
        launches.gated(q, k, v, None, S, None, Results(read=o))
    return tokens.batched(o), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, H, K, V], sum_gk [N, H, K], sum_gv [N, H, V])``."""
    launches = _Launches(inputs)
    return launches.row.map(partial(launches.pass_states, operand(inputs.k), operand(inputs.v)))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, d_final_state = _with_probabilities(call.inputs), call.arriving.final_state
    q, k, v, gk, gv, u = inputs.q, inputs.k, inputs.v, inputs.gk, inputs.gv, inputs.u
    launches = _Launches(inputs)
    tokens = launches.tokens
    dq, dk, dv, dgk, dgv = (
        None if x is None else tokens.per_token(*x.shape[2:], dtype=dtype or x.dtype)
        for x, dtype in (
            # The gradient of probabilities is float32: its terms cancel, and may be larger than float16 can hold.
            (call.wanted_input("q"), torch.float32 if inputs.softmax else None),
            *((call.wanted_input(name), None) for name in ("k", "v", "gk", "gv")),
        )
    )
    start, wanted_u = call.wanted_input("initial_state"), call.wanted_input("u")
    d_initial_state = None if start is None else tokens.state(start.dtype)
    # One row per chunk; rows without a chunk stay zero.
    du = None if wanted_u is None else q.new_zeros(tokens.chunks + 1, *wanted_u.shape, dtype=torch.float32)
    q, k, v, do = map(operand, (q, k, v, call.do))

    S = dS = marks_k = marks_v = None
    wants_gates = dgk is not None or dgv is not None
    if dq is not None or wants_gates:
        S = launches.states(k, v, inputs.initial_state)
    stored = dk is not None or dv is not None or wants_gates
    if stored or d_initial_state is not None:
        dS = launches.states(q, do, d_final_state, d_initial_state, stored=stored, reverse=True)
    if gv is None and dv is not None:
        marks_k = launches.plain(k, q, do, dS, dv, reverse=True)
    if gk is None and u is None:
        if dq is not None:
            marks_v = launches.plain(do, v, k, S, dq, transpose=True)
        if dk is not None:
            marks_v = launches.plain(v, do, q, dS, dk, reverse=True, transpose=True)
    if gv is not None:
        launches.gated(q, k, v, do, S, dS, Results(write=dv, dg2=dgv), marks_v)
    if gk is not None or u is not None:
        launches.gated(do, v, k, q, S, dS, Results(dq, dk, dgk, du), marks_k, transpose=True)

    dq, dk, dv, dgk, dgv = (None if x is None else tokens.batched(x) for x in (dq, dk, dv, dgk, dgv))
    if inputs.softmax and dq is not None:
        dq = slots.softmax_gradient(call.inputs.q, dq)
    du = None if du is None else du.sum(0)
    return call.select(q=dq, k=dk, v=dv, gk=dgk, gv=dgv, u=du, initial_state=d_initial_state)


def _with_probabilities(inputs: Inputs) -> Inputs:
    """`inputs`, with the logits `q` replaced by their softmax if `softmax` is set."""
    q, v = inputs.q, inputs.v
    return inputs._replace(q=slots.softmax(q, operand_dtype(v))) if inputs.softmax else inputs


class _Launches:
    """The launches of one call, and their gates and bonus.

    Each launch works along the value axis or, with `transpose`, along the key axis: it has the gates of the
    axis that it contracts and of the axis that it writes. The bonus belongs to the key axis.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.tokens = tokens = MatrixSequences(inputs.q, inputs.v, inputs.cu_seqlens, inputs.scale, CHUNK)
        self.gk, self.gv, self.u = operand(inputs.gk), operand(inputs.gv), operand(inputs.u)
        self.arguments = tokens.arguments | {"READ_BEFORE": inputs.u is not None}
        self.plan = plan.plan_of(tokens, inputs)
        state, gates = (tokens.H, tokens.K, tokens.V), {"gk": "sum_gk", "gv": "sum_gv"}
        self.row = Segments(tokens, tokens.chunks_of_row, tokens.H * self.plan.tiles, state, gates)

    def pass_states(self, a: Tensor, x: Tensor, reverse: bool = False, **tensors: Tensor | None) -> None:
        """Launch `channel_decay_state_passing_kernel`, which fills the given ones of its results."""
        tokens = self.tokens
        absent = dict.fromkeys(("initial", "states", "ends", "sum_gk", "sum_gv", "final"))
        given = {**absent, **tensors, "a": a, "x": x, "gk": self.gk, "gv": self.gv}
        sizes = {"K": tokens.K, "V": tokens.V, "SEGMENTS": self.row.count, **self.plan.passing}
        grid = (self.plan.tiles * self.row.count * tokens.N * tokens.H,)
        launch(channel_decay_state_passing_kernel, grid, **given, **self.arguments, **sizes, REVERSE=reverse)

    def states(
        self,
        a: Tensor,
        x: Tensor,
        initial: Tensor | None,
        final: Tensor | None = None,
        stored: bool = True,
        reverse: bool = False,
    ) -> Tensor | None:
        """The state before each chunk, ``[chunks, H, K, V]``, if `stored`; with `reverse`, backwards in time.

        Fills `final`, if it is given.
        """
        pass_states = partial(self.pass_states, a, x, reverse)
        initial = self.row.starts(pass_states, operand(initial))
        states = self.tokens.per_chunk_state() if stored else None
        pass_states(initial=initial, states=states, final=final)
        return states

    def score(
        self, a: Tensor, b: Tensor, transpose: bool, factorisable_chunks: Tensor | None = None
    ) -> Tensor:
        """``P[t, s] = scale * a_t . b_s`` within each chunk, decayed by gates, or for ``s = t`` weighted by the bonus.

        Chunks marked in ``factorisable_chunks [chunks, H]`` are left out.
        """
        tokens, (g, u) = self.tokens, (self.gv, None) if transpose else (self.gk, self.u)
        P = tokens.per_chunk(tokens.H, CHUNK, CHUNK)
        grid, tensors = (tokens.chunks * tokens.H,), (a, b, g, u, P, factorisable_chunks)
        config = self.plan.axes[transpose].score
        launch(channel_decay_score_kernel, grid, *tensors, **self.arguments, D=a.shape[-1], **config)
        return P

    def plain(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        S: Tensor | None,
        out: Tensor,
        reverse: bool = False,
        transpose: bool = False,
        for_gradient: bool = True,
    ) -> Tensor | None:
        """Fill `out`, along an axis without gates; return the marks of chunks whose gates are factorisable.

        With `for_gradient`, the gates of a marked chunk are factorisable for their gradient too.
        """
        tokens, (g, u) = self.tokens, (self.gv, None) if transpose else (self.gk, self.u)
        axes, config = tokens.axes(transpose), self.plan.axes[transpose].plain
        programs = tile_count(axes.D2, config["BD2"]) * tokens.chunks * tokens.H
        marks = None if g is None else tokens.per_chunk(tokens.H, dtype=torch.int8)
        tensors = {"a": a, "b": b, "x": x, "g": g, "u": u, "S": S, "out": out, "factorisable_chunks": marks}
        flags = {"REVERSE": reverse, "FOR_GRADIENT": for_gradient}
        parts = tensors, self.arguments, {"axes": axes}, flags, config
        launch_by_gates(channel_decay_plain_axis_kernel, programs, *parts, gated=g is not None)
        return marks

    def gated(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        y: Tensor | None,
        S: Tensor | None,
        dS: Tensor | None,
        results: Results,
        marks: Tensor | None = None,
        transpose: bool = False,
    ) -> None:
        """Fill the given ones of `results`, along an axis with gates or a bonus.

        `marks` are the chunks that `plain` has returned for these gates. Without them, each tile tests its gates.
        """
        if all(x is None for x in results):
            return
        tokens, plan = self.tokens, self.plan.axes[transpose]
        writes = results.write is not None or results.dg2 is not None
        reads = results.read is not None or results.dg2 is not None
        g1, g2 = (self.gv, self.gk) if transpose else (self.gk, self.gv)
        if g2 is None:  # there is a bonus, and no gate
            g2 = torch.zeros_like(x)
        # Chunks with factorisable gates need no P, and their marks tell `score` to leave them out.
        alone = plan.reads_alone and not writes
        P = None if alone else self.score(a, b, transpose)
        known = marks is not None
        if marks is None:
            marks = tokens.per_chunk(tokens.H, plan.tiles, dtype=torch.int8)
        arguments: dict[str, Any] = {
            "vectors": Vectors(a, b, x, y),
            "g1": g1,
            "g2": g2,
            "u": self.u if transpose else None,
            "S": S if reads else None,
            "dS": dS if writes else None,
            "results": results,
            "factorisable_tiles": marks,
            "axes": tokens.axes(transpose),
            "KNOWN": known,
            **self.arguments,
            **plan.gated,
        }
        grid = (plan.tiles * tokens.chunks * tokens.H,)
        for factorisable in (True, False):
            if alone and not factorisable:
                P = self.score(a, b, transpose, marks)
            launch(channel_decay_gated_axis_kernel, grid, P=P, **arguments, FACTORISABLE=factorisable)
