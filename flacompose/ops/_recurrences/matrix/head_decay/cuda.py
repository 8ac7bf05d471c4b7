"""Launches of head decay on CUDA, in float32, bfloat16 and float16, and the table of their kernels.

    result                                 condition             kernel                           file
    running sums of gates                  g, or gate gradients  head_gate_sum_kernel             gates_of_heads.py
    o, dv                                  always                head_decay_state_passing_kernel  kernels.py
    dq, dk                                 no gate gradients     head_decay_state_passing_kernel  kernels.py
    states before chunks, their gradients  gate gradients        head_decay_state_passing_kernel  kernels.py
    dq, dk, gradients of sums of gates     gate gradients        head_decay_gradient_kernel       gradients.py
    dg, dbeta                              gate gradients        head_gate_gradient_kernel        gates_of_heads.py

"Gate gradients" are those of `g`, `g_gamma` and `beta`. `backward` and `Launches` choose. The kernels are the
same on all chips.
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
from flacompose.ops._recurrences.matrix.head_decay import plan
from flacompose.ops._recurrences.matrix.head_decay.gradients import Made, Vectors, head_decay_gradient_kernel
from flacompose.ops._recurrences.matrix.head_decay.kernels import (
    Around,
    Gates,
    Operands,
    States,
    head_decay_state_passing_kernel,
)
from flacompose.ops._recurrences.matrix.inputs import Inputs

BH = 16  # heads of a program of the kernels of gates


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    sweep = Launches(inputs)
    sweep.prepare_gates(inputs.g, inputs.g_gamma)
    o, final_state = sweep.per_token(sweep.H, sweep.V, dtype=inputs.v.dtype), sweep.state(torch.float32)
    q, k, v = map(operand, (inputs.q, inputs.k, inputs.v))
    initial = sweep.starts(k, v, operand(inputs.initial_state))
    sweep(q, k, v, initial=initial, out=o, final=final_state)
    return sweep.batched(o), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, HV, K, V], sum_g [N, HV])``."""
    assert inputs.g_gamma is None, "it is added to g before"
    sweep = Launches(inputs)
    sweep.prepare_gates(inputs.g, inputs.g_gamma)
    return sweep.row.map(partial(sweep, None, operand(inputs.k), operand(inputs.v)))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, inputs = call.wants, call.inputs
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    gradient_of_gates = wants("g", "g_gamma", "beta")
    sweep = Launches(inputs, gradient_of_gates, fine=wants("g_gamma"))
    sweep.prepare_gates(inputs.g, inputs.g_gamma)
    dq, dk = (sweep.output_of_keys(q) if wants(name) else None for name in ("q", "k"))
    dv = sweep.per_token(sweep.H, sweep.V, dtype=v.dtype) if wants("v") else None
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else sweep.state(start.dtype)
    q, k, v, do = map(operand, (q, k, v, call.do))
    initial_state, d_final_state = operand(inputs.initial_state), operand(call.arriving.final_state)

    S = dS = None
    if gradient_of_gates:
        S, dS = sweep.per_chunk_state(), sweep.per_chunk_state()
    if S is not None or wants("q"):
        initial = sweep.starts(k, v, initial_state)
        if S is not None:
            sweep(None, k, v, initial=initial, states=S)
        else:
            sweep(do, v, k, initial=initial, out=dq, transpose=True)
    sweeps_dk = wants("k") and dS is None
    if sweeps_dk or dS is not None or wants("v", "initial_state"):
        # One of these passes also computes the gradient of the initial state, or is launched for it alone.
        initial, final = sweep.starts(q, do, d_final_state, reverse=True), d_initial_state
        if wants("v") or not sweeps_dk:
            sweep(k, q, do, initial=initial, out=dv, states=dS, final=final, reverse=True)
            final = None
        if sweeps_dk:
            sweep(v, do, q, initial=initial, out=dk, final=final, transpose=True, reverse=True)

    dg = dbeta = None
    if gradient_of_gates:
        assert S is not None and dS is not None
        dtype = torch.float32 if g is None or wants("g_gamma") else g.dtype
        dg, dbeta = sweep.gradients(q, k, v, do, S, dS, dq, dk, dtype, beta if wants("beta") else None)
    return call.made(
        q=sweep.summed_of_keys(dq, inputs.q),
        k=sweep.summed_of_keys(dk, inputs.k),
        v=None if dv is None else sweep.batched(dv),
        g=dg,
        g_gamma=dg.sum((0, 1)) if dg is not None and wants("g_gamma") else None,
        beta=dbeta,
        initial_state=d_initial_state,
    )


class Launches(MatrixSequences):
    """The launches of one call: `prepare_gates` is the first, then those of state passing and of gradients."""

    def __init__(self, inputs: Inputs, gradient_of_gates: bool = False, fine: bool = False) -> None:
        q, v, self.scale = inputs.q, inputs.v, inputs.scale
        self.beta = operand(inputs.beta)
        self.gradient_of_gates = gradient_of_gates
        gated = inputs.g is not None or inputs.g_gamma is not None or gradient_of_gates
        bfloat16 = q.dtype == torch.bfloat16
        group, K, V = v.shape[2] // q.shape[2], q.shape[3], v.shape[3]
        self.step = plan.step_size(bfloat16, max(K, V), gated)
        self.fine = fine and bfloat16
        C = plan.chunk_size(bfloat16, self.step, gradient_of_gates, group, K, V, self.fine)
        super().__init__(q, v, inputs.cu_seqlens, self.scale, C)
        self.parts = plan.head_parts(group)
        programs = self.H * max(prod(self.tiles(x)) for x in (False, True))
        steps = (self.T + self.step - 1) // self.step
        self.row = Segments(self, steps, programs, (self.H, self.K, self.V), {"g": "sum_g"})
        self.gates: Gates  # set by `prepare_gates`

    def prepare_gates(self, g: Tensor | None, g_gamma: Tensor | None) -> None:
        """Either one gate per head for all tokens, or running sums of gates, in two parts for float32 products."""
        gamma = operand(g_gamma)
        if g is None and not self.gradient_of_gates:
            self.gates = Gates(gamma)
        else:
            self.gates = Gates(None, *self.sum_gates(operand(g), gamma))

    def sum_gates(self, g: Tensor | None, gamma: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return sum_gates(self, g, gamma)

    def config(self, transpose: bool) -> dict[str, int]:
        axes = self.axes(transpose)
        return plan.sweep_config(self.chip, self.bfloat16, self.step, axes.D1, axes.D2)

    def tiles(self, transpose: bool) -> tuple[int, int]:
        """The number of tiles of a state along the contracted axis and along the other."""
        axes, config = self.axes(transpose), self.config(transpose)
        return tile_count(axes.D1, config["BD1"]), tile_count(axes.D2, config["BD2"])

    def output_of_keys(self, q: Tensor) -> Tensor:
        """Memory for the gradient of queries or keys.

        It has the heads of values or, if gates get gradients, one head for several of these.
        """
        if not self.gradient_of_gates:
            return self.per_token(self.H, self.K, dtype=q.dtype if q.shape[2] == self.H else torch.float32)
        return self.per_token(
            q.shape[2] * self.parts, self.K, dtype=q.dtype if self.parts == 1 else torch.float32
        )

    def summed_of_keys(self, dx: Tensor | None, x: Tensor) -> Tensor | None:
        """``[B, T, H, K]``, the sum over the heads of the memory from `output_of_keys`."""
        if dx is None:
            return None
        dx = self.batched(dx)
        return dx if dx.shape == x.shape else dx.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)

    def per_chunk_state(self) -> Tensor:
        """Memory for a state of each chunk."""
        dtype = torch.bfloat16 if self.bfloat16 and not self.fine else torch.float32
        return self.per_chunk(self.H, self.K, self.V, dtype=dtype)

    def starts(self, b: Tensor, x: Tensor, initial: Tensor | None, reverse: bool = False) -> Tensor | None:
        """The state before each segment, from the state before the sequence."""
        return self.row.starts(partial(self, None, b, x, reverse=reverse), initial)

    def __call__(
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

        The `states` are its `States` by name; those that are not given are absent.
        """
        tiles, columns = self.tiles(transpose)
        programs = columns * self.row.count * self.N * self.H
        arguments: dict[str, Any] = {
            "operands": Operands(a, b, x, self.beta),
            "gates": self.gates,
            "states": States(**states),
            "around": Around() if around is None else around,
            "axes": self.axes(transpose),
            "HA": b.shape[2],
            "HX": x.shape[2],
            "SEGMENTS": self.row.count,
            "C": self.step,
            "CS": self.C,
            "REVERSE": reverse,
            "FINE": self.fine and "states" in states,
            **self.arguments,
            **self.config(transpose),
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
                total = out if last else self.per_token(*shape, dtype=torch.float32, every=True)
                run(total, partial, tile)
                partial = total
        else:
            shares = self.per_token(tiles, *out.shape[-2:], dtype=torch.float32)
            run(shares)
            first, second = shares.unbind(-3)
            torch.add(first, second, out=out)  # PyTorch's sum over two takes twice as long

    def gradients(
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
        H, config = q.shape[2], plan.gradient_config(self.chip, self.bfloat16, self.K, self.fine)
        tiles, blocks = tile_count(self.K, config["BK"]), self.C // config["BC"]
        group = self.H // (H * self.parts)
        shared = blocks > 1 and group > 1  # pairs between blocks are added up over heads too
        d_sums = self.per_chunk((3 + blocks) * tiles, self.H, self.C)
        d_total = self.per_chunk(self.H, blocks * tiles)
        d_beta = None if beta is None else self.per_chunk((2 + shared) * tiles, self.H, self.C)
        grid = (tiles * blocks * self.chunks * (H * self.parts),)
        made = Made(dq, dk, d_sums, d_total, d_beta)
        tensors = Vectors(q, k, v, do, self.beta), self.gates, S, dS, made
        sizes = self.arguments | {"H": H, "HV": self.H, "K": self.K, "V": self.V, "C": self.C}
        sizes |= {"GROUP": group, "SHARED": shared, "FINE": self.fine}
        launch(head_decay_gradient_kernel, grid, *tensors, **sizes, **config)
        dbeta = None if beta is None else self.per_token(self.H, dtype=beta.dtype)
        kinds = (2 * tiles, tiles, tiles)
        dg = gate_gradient(self, d_sums, kinds, d_total, self.scale, dtype, d_beta, dbeta, blocks, shared)
        return dg, None if dbeta is None else self.batched(dbeta)


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
    """``[B, T, H]``: the gradient of each gate, from those of the sums that contain it. Fills `dbeta` from `d_beta`.

    `kinds` are the numbers of parts of `d_sums` of the kinds `ENDING`, `BEGINNING` and `LEAVING` of `gates`.
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
