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
    P, the products of pairs of tokens     `_Launches.gated`  channel_decay_score_kernel

The kernel of plain axes with gates and that of gated axes are launched twice: first for the chunks or tiles
whose gates are factorisable, then for the others. Gates are factorisable if the sums over each half of a
chunk, of 32 tokens, are above -45, and, where their gradient is wanted, if each gate is above -8 (float32:
-4) or `lets_through` says so: see `gates`. `_Launches.plain` and `_Launches.gated` choose.
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
    chunks = _Launches(inputs)
    o = chunks.per_token(
        *inputs.v.shape[2:], dtype=torch.float32 if inputs.full_precision else inputs.v.dtype
    )
    final_state = chunks.state(torch.float32)
    q, k, v = map(operand, (inputs.q, inputs.k, inputs.v))
    S = chunks.states(k, v, inputs.initial_state, final_state)
    if inputs.gv is None:
        chunks.plain(q, k, v, S, o, for_gradient=False)
    else:
        chunks.gated(q, k, v, None, S, None, Results(read=o))
    return chunks.batched(o), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, H, K, V], sum_gk [N, H, K], sum_gv [N, H, V])``."""
    chunks = _Launches(inputs)
    return chunks.row.map(partial(chunks.sweep, operand(inputs.k), operand(inputs.v)))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, d_final_state = _with_probabilities(call.inputs), call.arriving.final_state
    q, k, v, gk, gv, u = inputs.q, inputs.k, inputs.v, inputs.gk, inputs.gv, inputs.u
    chunks = _Launches(inputs)
    dq, dk, dv, dgk, dgv = (
        None if x is None else chunks.per_token(*x.shape[2:], dtype=dtype or x.dtype)
        for x, dtype in (
            # The gradient of probabilities is float32: its terms cancel, and may be larger than float16 can hold.
            (call.wanted_input("q"), torch.float32 if inputs.softmax else None),
            *((call.wanted_input(name), None) for name in ("k", "v", "gk", "gv")),
        )
    )
    start, of_u = call.wanted_input("initial_state"), call.wanted_input("u")
    d_initial_state = None if start is None else chunks.state(start.dtype)
    # One row per chunk; rows without a chunk stay zero.
    du = None if of_u is None else q.new_zeros(chunks.chunks + 1, *of_u.shape, dtype=torch.float32)
    q, k, v, do = map(operand, (q, k, v, call.do))

    S = dS = mild_k = mild_v = None
    of_gates = dgk is not None or dgv is not None
    if dq is not None or of_gates:
        S = chunks.states(k, v, inputs.initial_state)
    stored = dk is not None or dv is not None or of_gates
    if stored or d_initial_state is not None:
        dS = chunks.states(q, do, d_final_state, d_initial_state, stored=stored, reverse=True)
    if gv is None and dv is not None:
        mild_k = chunks.plain(k, q, do, dS, dv, reverse=True)
    if gk is None and u is None:
        if dq is not None:
            mild_v = chunks.plain(do, v, k, S, dq, transpose=True)
        if dk is not None:
            mild_v = chunks.plain(v, do, q, dS, dk, reverse=True, transpose=True)
    if gv is not None:
        chunks.gated(q, k, v, do, S, dS, Results(write=dv, dg2=dgv), mild_v)
    if gk is not None or u is not None:
        chunks.gated(do, v, k, q, S, dS, Results(dq, dk, dgk, du), mild_k, transpose=True)

    dq, dk, dv, dgk, dgv = (None if x is None else chunks.batched(x) for x in (dq, dk, dv, dgk, dgv))
    if inputs.softmax and dq is not None:
        dq = slots.softmax_gradient(call.inputs.q, dq)
    du = None if du is None else du.sum(0)
    return call.made(q=dq, k=dk, v=dv, gk=dgk, gv=dgv, u=du, initial_state=d_initial_state)


def _with_probabilities(inputs: Inputs) -> Inputs:
    """`inputs`, with the logits `q` replaced by their softmax if `softmax` is set."""
    q, v = inputs.q, inputs.v
    return inputs._replace(q=slots.softmax(q, operand_dtype(v))) if inputs.softmax else inputs


class _Launches(MatrixSequences):
    """The launches of one call, and their gates and bonus.

    Each launch works along the value axis or, with `transpose`, along the key axis: it has the gates of the
    axis that it contracts and of the axis that it writes. The bonus belongs to the key axis.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs.q, inputs.v, inputs.cu_seqlens, inputs.scale, CHUNK)
        self.gk, self.gv, self.u = operand(inputs.gk), operand(inputs.gv), operand(inputs.u)
        self.arguments["READ_BEFORE"] = inputs.u is not None
        self.state_config = plan.state_config(self.chip, self.bfloat16, self.K, self.V, self.gk is not None)
        self.tiles = tile_count(self.K, self.state_config["BK"]) * tile_count(self.V, self.state_config["BV"])
        state, gates = (self.H, self.K, self.V), {"gk": "sum_gk", "gv": "sum_gv"}
        self.row = Segments(self, self.chunks_of_row, self.H * self.tiles, state, gates)

    def sweep(self, a: Tensor, x: Tensor, reverse: bool = False, **tensors: Tensor | None) -> None:
        """Launch `channel_decay_state_passing_kernel`, which fills the given ones of its results."""
        absent = dict.fromkeys(("initial", "states", "ends", "sum_gk", "sum_gv", "final"))
        given = {**absent, **tensors, "a": a, "x": x, "gk": self.gk, "gv": self.gv}
        sizes = {"K": self.K, "V": self.V, "SEGMENTS": self.row.count, **self.state_config}
        grid = (self.tiles * self.row.count * self.N * self.H,)
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
        sweep = partial(self.sweep, a, x, reverse)
        initial = self.row.starts(sweep, operand(initial))
        states = self.per_chunk_state() if stored else None
        sweep(initial=initial, states=states, final=final)
        return states

    def score(
        self, a: Tensor, b: Tensor, g: Tensor | None, u: Tensor | None, mild: Tensor | None = None
    ) -> Tensor:
        """``P[t, s] = scale * a_t . b_s`` within each chunk, decayed by `g`, or for ``s = t`` weighted by `u`.

        Chunks marked in ``mild [chunks, H]`` are left out.
        """
        D = a.shape[-1]
        P = self.per_chunk(self.H, CHUNK, CHUNK)
        config = plan.score_config(self.bfloat16, D)
        grid, tensors = (self.chunks * self.H,), (a, b, g, u, P, mild)
        launch(channel_decay_score_kernel, grid, *tensors, **self.arguments, D=D, **config)
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
        """Fill `out`, along an axis without gates; return which chunks have factorisable gates.

        With `for_gradient` they are so for the gradient of these gates too.
        """
        g, u = (self.gv, None) if transpose else (self.gk, self.u)
        axes = self.axes(transpose)
        config = plan.plain_config(self.bfloat16, axes.D1, axes.D2)
        programs = tile_count(axes.D2, config["BD2"]) * self.chunks * self.H
        mild = None if g is None else self.per_chunk(self.H, dtype=torch.int8)
        tensors = {"a": a, "b": b, "x": x, "g": g, "u": u, "S": S, "out": out, "mild": mild}
        flags = {"REVERSE": reverse, "FOR_GRADIENT": for_gradient}
        parts = tensors, self.arguments, {"axes": axes}, flags, config
        launch_by_gates(channel_decay_plain_axis_kernel, programs, *parts, gated=g is not None)
        return mild

    def gated(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        y: Tensor | None,
        S: Tensor | None,
        dS: Tensor | None,
        made: Results,
        mild: Tensor | None = None,
        transpose: bool = False,
    ) -> None:
        """Fill the given ones of `made`, along an axis with gates or a bonus.

        `mild` are the marks that `plain` has returned for these gates. Without it, each tile tests its gates.
        """
        writes = made.write is not None or made.dg2 is not None
        reads = made.read is not None or made.dg2 is not None
        if all(x is None for x in made):
            return
        g1, g2 = (self.gv, self.gk) if transpose else (self.gk, self.gv)
        if g2 is None:  # there is a bonus, and no gate
            g2 = torch.zeros_like(x)
        axes = self.axes(transpose)
        config = plan.gated_config(self.bfloat16, axes.D1, axes.D2)
        tiles = tile_count(axes.D2, config["BD2"])
        # If only reads are wanted and one tile has the whole axis, the kernel computes P itself for chunks
        # with factorisable gates. The tile sees all gates of a chunk, so `mild` tells `score` which whole
        # chunks to leave out.
        fused = not writes and g1 is None and self.u is None and isinstance(tiles, int) and tiles == 1
        P = None if fused else self.score(a, b, g1, None if transpose else self.u)
        known = mild is not None
        if mild is None:
            mild = self.per_chunk(self.H, tiles, dtype=torch.int8)
        tensors: dict[str, Any] = {
            "vectors": Vectors(a, b, x, y),
            "g1": g1,
            "g2": g2,
            "u": self.u if transpose else None,
        }
        tensors |= {"S": S if reads else None, "dS": dS if writes else None, "made": made, "mild": mild}
        grid = (tiles * self.chunks * self.H,)
        arguments = {**self.arguments, "axes": axes, "KNOWN": known, **config}
        for only_mild in (True, False):
            if fused and not only_mild:
                P = self.score(a, b, None, None, mild)
            launch(channel_decay_gated_axis_kernel, grid, P=P, **tensors, MILD=only_mild, **arguments)
