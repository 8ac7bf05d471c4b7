"""Launches of head decay on CUDA, in float32, bfloat16 and float16, and the table of their kernels.

    result                                 condition             kernel                           file
    running sums of gates                  g, or gate gradients  head_gate_sum_kernel             gates_of_heads.py
    o, dv                                  always                head_decay_state_passing_kernel  kernels.py
    dq, dk                                 no gate gradients     head_decay_state_passing_kernel  kernels.py
    states before chunks, their gradients  gate gradients        head_decay_state_passing_kernel  kernels.py
    dq, dk, gradients of sums of gates     gate gradients        head_decay_gradient_kernel       gradients.py
    dg, dbeta                              gate gradients        head_gate_gradient_kernel        gates_of_heads.py

"Gate gradients" are the gradients of `g`, `g_gamma` and `beta`. `backward` and `Launches.pass_states` launch them, and
`plan` has their chunks and tiles. The kernels are the same on all chips.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, operand, tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix.gates_of_heads import head_gate_gradient_kernel, head_gate_sum_kernel
from flacompose.ops._recurrences.matrix.head_decay import gradients, plan
from flacompose.ops._recurrences.matrix.head_decay.kernels import (
    Around,
    Gates,
    ReadsAndWrites,
    States,
    head_decay_state_passing_kernel,
)
from flacompose.ops._recurrences.matrix.inputs import Inputs

BH = 16  # heads of a program of the kernels of gates


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    launches = launches_of(inputs)
    tokens = launches.tokens
    o, final_state = tokens.per_token(tokens.H, tokens.V, dtype=inputs.v.dtype), tokens.state(torch.float32)
    q, k, v = map(operand, (inputs.q, inputs.k, inputs.v))
    initial = launches.starts(k, v, operand(inputs.initial_state))
    launches.pass_states(q, k, v, initial=initial, out=o, final=final_state)
    return tokens.batched(o), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, HV, K, V], sum_g [N, HV])``."""
    assert inputs.g_gamma is None, "it is added to g before"
    launches = launches_of(inputs)
    return launches.row.map(partial(launches.pass_states, None, operand(inputs.k), operand(inputs.v)))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, inputs = call.wants, call.inputs
    q, k, v, g = inputs.q, inputs.k, inputs.v, inputs.g
    has_gate_gradients = wants("g", "g_gamma", "beta")
    launches = launches_of(inputs, has_gate_gradients, fine=wants("g_gamma"))
    tokens = launches.tokens
    dq, dk = (launches.output_of_keys(q) if wants(name) else None for name in ("q", "k"))
    dv = tokens.per_token(tokens.H, tokens.V, dtype=v.dtype) if wants("v") else None
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else tokens.state(start.dtype)
    q, k, v, do = map(operand, (q, k, v, call.do))
    initial_state, d_final_state = operand(inputs.initial_state), operand(call.arriving.final_state)

    S = dS = None
    if has_gate_gradients:
        S, dS = launches.per_chunk_state(), launches.per_chunk_state()
    if S is not None or wants("q"):
        initial = launches.starts(k, v, initial_state)
        if S is not None:
            launches.pass_states(None, k, v, initial=initial, states=S)
        else:
            launches.pass_states(do, v, k, initial=initial, out=dq, transpose=True)
    passes_dk = wants("k") and dS is None
    if passes_dk or dS is not None or wants("v", "initial_state"):
        # One of these passes also computes the gradient of the initial state, or is launched for it alone.
        initial, final = launches.starts(q, do, d_final_state, reverse=True), d_initial_state
        if wants("v") or not passes_dk:
            launches.pass_states(k, q, do, initial=initial, out=dv, states=dS, final=final, reverse=True)
            final = None
        if passes_dk:
            launches.pass_states(v, do, q, initial=initial, out=dk, final=final, transpose=True, reverse=True)

    dg = dbeta = None
    if has_gate_gradients:
        assert S is not None and dS is not None
        dtype = torch.float32 if g is None or wants("g_gamma") else g.dtype
        dg, dbeta = launches.compute_gradients(q, k, v, do, S, dS, dq, dk, dtype, call.wanted_input("beta"))
    return call.select(
        q=launches.summed_of_keys(dq, inputs.q),
        k=launches.summed_of_keys(dk, inputs.k),
        v=None if dv is None else tokens.batched(dv),
        g=dg,
        g_gamma=dg.sum((0, 1)) if dg is not None and wants("g_gamma") else None,
        beta=dbeta,
        initial_state=d_initial_state,
    )


def launches_of(inputs: Inputs, has_gate_gradients: bool = False, fine: bool = False) -> Launches:
    """The launches of a call. The running sums of its gates are launched here.

    `Gates` are one gate per head for all tokens, or these sums, in two parts for float32 products.
    """
    chosen = plan.plan_of(inputs, has_gate_gradients, fine)
    tokens = MatrixSequences(inputs.q, inputs.v, inputs.cu_seqlens, inputs.scale, chosen.C)
    g, gamma = operand(inputs.g), operand(inputs.g_gamma)
    is_constant = g is None and not has_gate_gradients
    gates = Gates(gamma) if is_constant else Gates(None, *sum_gates(tokens, g, gamma))
    return Launches(tokens, chosen, gates, operand(inputs.beta))


class Launches:
    """The launches of state passing and of gradients of one call."""

    def __init__(self, tokens: MatrixSequences, plan: plan.Plan, gates: Gates, beta: Tensor | None) -> None:
        self.tokens, self.plan, self.gates, self.beta = tokens, plan, gates, beta
        programs = tokens.H * max(prod(self.tiles(x)) for x in (False, True))
        steps, state = (tokens.T + plan.step - 1) // plan.step, (tokens.H, tokens.K, tokens.V)
        self.row = Segments(tokens, steps, programs, state, {"g": "sum_g"})

    def tiles(self, transpose: bool) -> tuple[int, int]:
        """The number of tiles of a state along the contracted axis and along the other."""
        axes, config = self.tokens.axes(transpose), self.plan.passing[transpose]
        return tile_count(axes.D1, config["BD1"]), tile_count(axes.D2, config["BD2"])

    def output_of_keys(self, q: Tensor) -> Tensor:
        """Memory for the gradient of queries or keys.

        It has the heads of values or, if gates get gradients, one head for several of these.
        """
        plan, H = self.plan, q.shape[2]
        parts = H * plan.parts if plan.has_gate_gradients else self.tokens.H
        return self.tokens.per_token(parts, self.tokens.K, dtype=q.dtype if parts == H else torch.float32)

    def summed_of_keys(self, dx: Tensor | None, x: Tensor) -> Tensor | None:
        """``[B, T, H, K]``, the sum over the heads of the memory from `output_of_keys`."""
        if dx is None:
            return None
        dx = self.tokens.batched(dx)
        return dx if dx.shape == x.shape else dx.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)

    def per_chunk_state(self) -> Tensor:
        """Memory for a state of each chunk."""
        tokens = self.tokens
        dtype = torch.bfloat16 if tokens.bfloat16 and not self.plan.fine else torch.float32
        return tokens.per_chunk(tokens.H, tokens.K, tokens.V, dtype=dtype)

    def starts(self, b: Tensor, x: Tensor, initial: Tensor | None, reverse: bool = False) -> Tensor | None:
        """The state before each segment, from the state before the sequence."""
        return self.row.starts(partial(self.pass_states, None, b, x, reverse=reverse), initial)

    def pass_states(
        self,
        a: Tensor | None,
        b: Tensor,
        x: Tensor,
        transpose: bool = False,
        reverse: bool = False,
        out: Tensor | None = None,
        around: Around | None = None,
        **states: Tensor | None,
    ) -> None:
        """Launch `head_decay_state_passing_kernel`; with `transpose`, `b` has the size of values and `x` that of keys.

        The `states` are its `States` by name; all others are absent.
        """
        tokens, plan, (tiles, columns) = self.tokens, self.plan, self.tiles(transpose)
        programs = columns * self.row.count * tokens.N * tokens.H
        arguments: dict[str, Any] = {
            "vectors": ReadsAndWrites(a, b, x, self.beta),
            "gates": self.gates,
            "states": States(**states),
            "around": Around() if around is None else around,
            "axes": tokens.axes(transpose),
            "HA": b.shape[2],
            "HX": x.shape[2],
            "SEGMENTS": self.row.count,
            "C": plan.step,
            "CS": plan.C,
            "REVERSE": reverse,
            "FINE": plan.fine and "states" in states,
            **tokens.arguments,
            **plan.passing[transpose],
        }

        def run(out: Tensor | None, partial: Tensor | None = None, tile: int | None = None) -> None:
            """All tiles, or one that is added to the `partial` sum."""
            count = tiles if tile is None else 1
            given = {"out": out, "partial": partial, "first_tile": tile, "TILES": count}
            launch(head_decay_state_passing_kernel, (count * programs,), **given, **arguments)

        if tiles == 1 or out is None:
            run(out)
        elif columns > 4:
            # With so many programs, tiles are launched one after the other, and each adds to the sum of those
            # before.
            partial = None
            for tile in range(tiles):
                last, shape = tile == tiles - 1, out.shape[-2:]
                sums = out if last else tokens.per_token(*shape, dtype=torch.float32, every=True)
                run(sums, partial, tile)
                partial = sums
        else:
            shares = tokens.per_token(tiles, *out.shape[-2:], dtype=torch.float32)
            run(shares)
            first, second = shares.unbind(-3)
            torch.add(first, second, out=out)  # PyTorch's sum over two takes twice as long

    def compute_gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        S: Tensor,
        dS: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dtype: torch.dtype,
        beta: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, T, H]``, the gradients of gates and, if it is given, of `beta`, from the stored states.

        Fills `dq` and `dk`, if given.
        """
        tokens, plan, H = self.tokens, self.plan, q.shape[2]
        tiles, blocks = tile_count(tokens.K, plan.gradient["BK"]), plan.C // plan.gradient["BC"]
        group = tokens.H // (H * plan.parts)
        shared = blocks > 1 and group > 1  # pairs between blocks are added up over heads too
        d_sums = tokens.per_chunk((3 + blocks) * tiles, tokens.H, plan.C)
        d_total = tokens.per_chunk(tokens.H, blocks * tiles)
        d_beta = None if beta is None else tokens.per_chunk((2 + shared) * tiles, tokens.H, plan.C)
        grid = (tiles * blocks * tokens.chunks * (H * plan.parts),)
        results = gradients.Results(dq, dk, d_sums, d_total, d_beta)
        tensors = gradients.Vectors(q, k, v, do, self.beta), self.gates, S, dS, results
        sizes = tokens.arguments | {"H": H, "HV": tokens.H, "K": tokens.K, "V": tokens.V, "C": plan.C}
        sizes |= {"GROUP": group, "SHARED": shared, "FINE": plan.fine}
        launch(gradients.head_decay_gradient_kernel, grid, *tensors, **sizes, **plan.gradient)
        dbeta = None if beta is None else tokens.per_token(tokens.H, dtype=beta.dtype)
        kinds, scale = (2 * tiles, tiles, tiles), tokens.arguments["scale"]
        dg = gate_gradient(tokens, d_sums, kinds, d_total, scale, dtype, d_beta, dbeta, blocks, shared)
        return dg, None if dbeta is None else tokens.batched(dbeta)


def sum_gates(
    sequences: MatrixSequences, g: Tensor | None, gamma: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The running sums of gates within each chunk, ``[chunks, H, C]``: for float32 products two, to be added."""
    H, C = sequences.H, sequences.C
    sums, rest = running_sums(sequences)
    grid = (sequences.chunks, tile_count(H, BH))
    launch(head_gate_sum_kernel, grid, g, gamma, sums, rest, **sequences.positions, H=H, C=C, BH=BH)
    return sums, rest


def running_sums(sequences: MatrixSequences) -> tuple[Tensor, Tensor | None]:
    """Memory for the running sums of gates. Sums over 64 tokens are precise enough for products in bfloat16."""
    H, C = sequences.H, sequences.C
    return sequences.per_chunk(H, C), None if sequences.bfloat16 and C <= 64 else sequences.per_chunk(H, C)


def gate_gradient(
    sequences: MatrixSequences,
    d_sums: Tensor,
    kinds: tuple[int, int, int],
    d_total: Tensor,
    scale: float,
    dtype: torch.dtype,
    d_beta: Tensor | None = None,
    dbeta: Tensor | None = None,
    blocks: int = 1,
    shared: bool = False,
) -> Tensor:
    """``[B, T, H]``: the gradient of each gate, from the gradients of all sums of it. Fills `dbeta` from `d_beta`.

    `kinds` are the numbers of parts of `d_sums` of the kinds `ENDING`, `BEGINNING` and `LEAVING` of `gates_of_heads`.
    The other parts are `ACROSS`, where a chunk has two `blocks`, or `BETWEEN` where heads are `shared` too.
    """
    (H, D), C = d_total.shape[-2:], sequences.C
    endings, beginnings, leavings = kinds
    dg = sequences.per_token(H, dtype=dtype)
    sizes = {"H": H, "D": D, "C": C, "BC": C // blocks, "BH": BH, "BD": block(D, 256)}
    sizes |= {"ENDINGS": endings, "BEGINNINGS": beginnings, "LEAVINGS": leavings, "PARTS": d_sums.shape[1]}
    sizes |= {"BETAS": 0 if d_beta is None else d_beta.shape[1], "SHARED": shared}
    grid = (sequences.chunks * blocks, tile_count(H, BH))
    tensors = d_sums, d_total, dg, d_beta, dbeta
    launch(head_gate_gradient_kernel, grid, *tensors, **sequences.positions, scale=scale, **sizes)
    return sequences.batched(dg)
