"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.selective_scan.inputs import Inputs
from flacompose.ops._recurrences.elementwise.selective_scan.kernels import (
    selective_scan_gradient_kernel,
    selective_scan_kernel,
)

# Tokens of a chunk. The state before each chunk is kept for the backward: S / 16 float32 numbers per input.
CHUNK = 16
# The most numbers of a state in a tile. Sums of several tiles are added up outside the kernels.
STATES = 16
# (tokens of a tile, a divisor of `CHUNK`; its most channels).
SWEEP, GRADIENT = (16, 32), (8, 16)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, S])``."""
    run = _Launches(inputs)
    y, final_state = run.per_channel(inputs.x.dtype), run.per_sequence(run.D, run.S)
    run.forwards(y=y, final=final_state)
    return run.summed(y, inputs.x.dtype), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, D, S], sum_dt [N, D])``."""
    run = _Launches(inputs)
    row, _ = run.tiles(SWEEP)
    return row.map(partial(run.pass_states, row.count))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, run, (x, dt, *_) = call.wants, _Launches(call.inputs), call.inputs
    (row, sizes), state, dy, before = run.tiles(GRADIENT), (run.D, run.S), call.do.contiguous(), None
    if wants("dt", "A", "C"):
        before = run.per_chunk(*state)
        run.forwards(before=before)
    dx, ddt = (run.per_channel(y.dtype) if wants(name) else None for name, y in (("x", x), ("dt", dt)))
    # A sum over the channels of a group; each tile of channels has its own.
    per_group = tile_count(run.P, sizes["BD"]), run.G, run.S
    dB, dC = (run.per_token(*per_group, dtype=torch.float32) if wants(name) else None for name in "BC")
    start, dA = call.wanted_input("initial_state"), None
    d_initial = None if start is None else run.per_sequence(*state, dtype=start.dtype)
    if wants("A"):
        dA = run.per_segment(row.count, *state) if row.split else run.per_sequence(*state)
    launch(
        selective_scan_gradient_kernel,
        (run.programs(row.count, sizes["BD"]),),
        **run.operands,
        **run.arguments,
        dy=dy,
        before=before,
        d_final=row.starts(
            partial(run.pass_states, row.count, x=dy, REVERSE=True), call.arriving.final_state
        ),
        dx=dx,
        ddt=ddt,
        dA=dA,
        dB=dB,
        dC=dC,
        d_initial=d_initial,
        SEGMENTS=row.count,
        **sizes,
    )
    if dA is not None:
        dA = dA[: row.count].sum((0, 1)) if row.split else dA.sum(0)
    return call.made(
        x=None if dx is None else run.summed(dx, x.dtype),
        dt=None if ddt is None else run.summed(ddt, dt.dtype),
        A=dA,
        B=None if dB is None else run.batched(dB).sum(2),
        C=None if dC is None else run.batched(dC).sum(2),
        initial_state=d_initial,
    )


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs) -> None:
        x, dt, A, B, C, self.initial, cu_seqlens = inputs
        super().__init__(x, cu_seqlens, CHUNK)
        (self.D, self.S), self.G = A.shape, B.shape[2]
        self.P = self.D // self.G
        # All channels read B and C, so they are converted once, not by each channel. `contiguous`, because
        # stack keeps the layout of images if tokens are last in memory.
        BC = torch.stack((B, C), 3).float().contiguous()
        BS = min(1 << (self.S - 1).bit_length(), STATES)
        self.state_tiles = tile_count(self.S, BS)
        self.operands = {"x": x.contiguous(), "dt": dt.contiguous(), "A": A.contiguous(), "BC": BC}
        self.arguments |= {"D": self.D, "S": self.S, "G": self.G, "CHUNK": CHUNK, "BS": BS}

    def per_channel(self, dtype: torch.dtype) -> Tensor:
        """Memory for a sum over the states: for each of several tiles, in float32."""
        if self.state_tiles == 1:
            return self.per_token(self.D, dtype=dtype)
        return self.per_token(self.state_tiles, self.D, dtype=torch.float32)

    def summed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, T, D]``, the sum over the tiles of memory from `per_channel`."""
        x = self.batched(x)
        return x if self.state_tiles == 1 else x.sum(2).to(dtype)

    def programs(self, segments: int, BD: int) -> int:
        return self.N * segments * self.state_tiles * self.G * tile_count(self.P, BD)

    def tiles(self, config: tuple[int, int]) -> tuple[Segments, dict[str, int]]:
        """The segments of a row, and the sizes of tiles, for a `config`."""
        TOKENS, channels = config
        BD = min(1 << (self.P - 1).bit_length(), channels)
        # In units of 32 tokens a segment has at least 64 * 32 = 2,048. Programs of one warp are small, so
        # twice as many run.
        programs = tile_count(self.state_tiles * self.G * tile_count(self.P, BD), 2)
        rates = self.operands["A"]
        row = Segments(self, self.T // 32, programs, (self.D, self.S), {"gk": "sum_dt"}, rates)
        return row, {"TOKENS": TOKENS, "BD": BD, "num_warps": 1}

    def forwards(self, **results: Any) -> None:
        """Fill `y`, `before` and `final`, if given."""
        row, _ = self.tiles(SWEEP)
        pass_states = partial(self.pass_states, row.count)
        pass_states(initial=row.starts(pass_states, self.initial), **results)

    def pass_states(self, SEGMENTS: int, REVERSE: bool = False, **given: Any) -> None:
        """Launch `selective_scan_kernel`, which fills the given results; backwards with `dy` in place of `x`."""
        _, sizes = self.tiles(SWEEP)
        absent: dict[str, Any] = dict.fromkeys(("initial", "y", "before", "ends", "sum_dt", "final"))
        arguments = {**absent, **self.operands, **self.arguments, **sizes, **given}
        programs = (self.programs(SEGMENTS, sizes["BD"]),)
        launch(selective_scan_kernel, programs, **arguments, SEGMENTS=SEGMENTS, REVERSE=REVERSE)
